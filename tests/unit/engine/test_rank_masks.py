"""Sets of ranks as integers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reigen.engine.rank_masks import from_bytes, lowest_rank, to_bytes, to_mask, to_ranks


@given(st.sets(st.integers(0, 5_000)))
def test_there_and_back(ranks: set[int]) -> None:
    mask = to_mask(ranks)
    assert to_ranks(mask) == tuple(sorted(ranks))
    assert not mask or from_bytes(*to_bytes(mask)) == mask
    assert mask.bit_count() == len(ranks)


def test_unions_and_the_lowest() -> None:
    assert to_ranks(to_mask([3, 1]) | to_mask([1, 70])) == (1, 3, 70)
    assert to_ranks(0) == ()
    assert lowest_rank(to_mask([70, 9])) == 9
    assert to_bytes(to_mask([1_000, 1_007])) == (1_000, b"\x81")
