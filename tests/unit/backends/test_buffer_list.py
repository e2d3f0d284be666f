from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen.backends.buffer_list import BufferList, rank_slice, zip_pieces
from reigen.backends.shm.cross_memory import cut_ranges, pair_ranges

sizes = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def strung(counts: list[int]) -> tuple[BufferList, np.ndarray]:
    whole = np.arange(sum(counts))
    return BufferList(np.split(whole, np.cumsum(counts)[:-1])), whole


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
    found = list(zip_pieces([strung(first)[0], strung(second)[0]], begin, end))
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
    slices = [rank_slice(count, rank, 3, itemsize) for rank in range(3)]
    assert [n for low, high in slices for n in range(low, high)] == list(range(count))
    assert all(low * itemsize % 64 == 0 for low, _ in slices if low < count)


ranges = st.lists(st.integers(1, 9), max_size=6)


def lying(lengths: list[int], apart: int) -> list[tuple[int, int]]:
    """Ranges of these lengths at some addresses."""
    return [(1000 * index + apart, nbytes) for index, nbytes in enumerate(lengths)]


def unrolled(where: list[tuple[int, int]]) -> list[int]:
    return [address + n for address, nbytes in where for n in range(nbytes)]


@given(ranges, st.integers(0, 60), st.integers(0, 60))
def test_ranges_are_cut(lengths: list[int], begin: int, end: int) -> None:
    where = lying(lengths, 7)
    assert unrolled(cut_ranges(where, begin, end)) == unrolled(where)[begin:end]


@given(ranges, st.data())
def test_ranges_are_paired(lengths: list[int], data: st.DataObject) -> None:
    one = lying(lengths, 7)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, sum(lengths) - 1)), max_size=5))) if sum(lengths) > 1 else []
    ends = [0, *cuts, sum(lengths)]
    other = lying([high - low for low, high in itertools.pairwise(ends) if high > low], 300)
    left, right = pair_ranges(one, other)
    assert [nbytes for _, nbytes in left] == [nbytes for _, nbytes in right]
    assert (unrolled(left), unrolled(right)) == (unrolled(one), unrolled(other))
