from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen.planes.strung import Strung, slice_of, together

sizes = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def strung(counts: list[int]) -> tuple[Strung, np.ndarray]:
    whole = np.arange(sum(counts))
    return Strung(np.split(whole, np.cumsum(counts)[:-1])), whole


@given(sizes, st.data())
def test_parts_are_those_of_the_whole(counts: list[int], data: st.DataObject) -> None:
    arrays, whole = strung(counts)
    begin = data.draw(st.integers(0, whole.size))
    end = data.draw(st.integers(begin, whole.size))
    assert [n for _, piece in arrays.pieces(begin, end) for n in piece] == list(range(begin, end))
    cut = arrays.cut(begin, end)
    assert cut.size == end - begin
    read = np.empty(cut.size, whole.dtype)
    cut.read(0, cut.size, read)
    assert read.tolist() == list(range(begin, end))
    cut.write(0, -read)
    assert whole[begin:end].tolist() == [-n for n in range(begin, end)]  # no copies
    assert whole[:begin].tolist() == list(range(begin))


@given(sizes, sizes, st.data())
def test_pieces_that_lie_together_in_all(first: list[int], second: list[int], data: st.DataObject) -> None:
    total = min(sum(first), sum(second))
    begin = data.draw(st.integers(0, total))
    end = data.draw(st.integers(begin, total))
    found = list(together([strung(first)[0], strung(second)[0]], begin, end))
    assert [place for place, _ in found] == sorted({place for place, _ in found})
    for place, (one, other) in found:
        assert one.size
        assert one.tolist() == other.tolist() == list(range(place, place + one.size))
    assert sum(one.size for _, (one, _) in found) == end - begin


@given(sizes)
def test_joined_copies_only_what_lies_apart(counts: list[int]) -> None:
    arrays, whole = strung(counts)
    joined = arrays.joined()
    assert joined.tolist() == whole.tolist()
    if sum(count > 0 for count in counts) == 1:
        assert np.shares_memory(joined, whole)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 1000])
def test_slices_cover_everything_once(count: int, itemsize: int) -> None:
    slices = [slice_of(count, rank, 3, itemsize) for rank in range(3)]
    assert [n for low, high in slices for n in range(low, high)] == list(range(count))
    assert all(low * itemsize % 64 == 0 for low, _ in slices if low < count)
