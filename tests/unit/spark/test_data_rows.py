"""Each row is used once in a pass, by one rank, whatever the numbers of rows, row groups and ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen.spark.data_rows import RowPlan, cut_pieces, steps_from

GROUPS = st.lists(st.integers(0, 12), min_size=1, max_size=8)


def rows_of(plan: RowPlan, number: int) -> list[tuple[int, int]]:
    """The rank's rows, as (row group, row), in the order in which they are read."""
    return [
        (piece.group, int(row))
        for piece in plan.pieces(number)
        for row in plan.group_order(number, piece.group)[piece.start : piece.stop]
    ]


@given(GROUPS, st.integers(1, 5), st.integers(1, 7), st.booleans(), st.booleans(), st.integers(0, 2**63))
def test_each_row_is_dealt_once(
    groups: list[int], size: int, batch: int, shuffle: bool, same_part: bool, seed: int
) -> None:
    if sum(groups) < size:
        return
    every = {(group, row) for group, rows in enumerate(groups) for row in range(rows)}
    plans = [RowPlan(groups, size, rank, batch, shuffle, seed, same_part) for rank in range(size)]
    for number in (0, 1, 5):
        dealt = Counter(row for plan in plans for row in rows_of(plan, number))
        assert set(dealt) == every
        assert set(dealt.values()) <= {1}
        assert [len(rows_of(plan, number)) for plan in plans] == [plan.num_rows for plan in plans]
    assert max(plan.num_rows for plan in plans) - min(plan.num_rows for plan in plans) <= 1


@given(st.integers(1, 200), st.integers(1, 6), st.integers(1, 9))
def test_all_ranks_take_as_many_steps_and_none_is_empty(rows: int, size: int, batch: int) -> None:
    if rows < size:
        return
    plans = [RowPlan([rows], size, rank, batch) for rank in range(size)]
    sizes = [plan.batch_sizes() for plan in plans]
    assert {len(each) for each in sizes} == {plans[0].num_steps}
    assert [sum(each) for each in sizes] == [plan.num_rows for plan in plans]
    assert all(all(number == batch for number in each[:-1]) for each in sizes)
    assert all(1 <= each[-1] <= batch + (2 if batch > 1 else 1) for each in sizes)
    if batch > 1 and rows >= 2 * size:
        assert all(each[-1] > 1 for each in sizes), "batch normalization cannot train on one row"
    for step in range(plans[0].num_steps):
        in_step = [each[step] for each in sizes]
        weighted = [plan.weight(step) / size for plan in plans]
        np.testing.assert_allclose(weighted, np.array(in_step) / sum(in_step))
    assert plans[0].is_even == all(plan.weight(plan.num_steps - 1) == 1 for plan in plans)


def test_another_order_in_each_pass_and_the_same_from_the_same_seed() -> None:
    plan = RowPlan([50, 50, 50], 2, 0, 8, seed=3)
    assert rows_of(plan, 0) != rows_of(plan, 1)
    assert rows_of(plan, 1) == rows_of(RowPlan([50, 50, 50], 2, 0, 8, seed=3), 1)
    assert rows_of(plan, 1) != rows_of(RowPlan([50, 50, 50], 2, 0, 8, seed=4), 1)
    assert sorted(plan.chunk_order(0, 0, 20)) == list(range(20))
    assert list(plan.chunk_order(0, 0, 20)) != list(plan.chunk_order(1, 0, 20))


def test_rows_that_stay_in_memory_are_the_same_in_each_pass() -> None:
    plan = RowPlan([50, 50, 50], 3, 1, 8, same_part=True)
    assert rows_of(plan, 0) == rows_of(plan, 7)
    assert list(plan.chunk_order(0, 0, 50)) != list(plan.chunk_order(7, 0, 50))


def test_without_shuffling_the_order_is_that_of_the_files() -> None:
    plans = [RowPlan([3, 4], 2, rank, 2, shuffle=False) for rank in range(2)]
    assert [row for plan in plans for row in rows_of(plan, 6)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 3),
    ]
    assert list(plans[0].chunk_order(1, 0, 3)) == [0, 1, 2]


def test_empty_row_groups_have_no_pieces() -> None:
    assert cut_pieces([0, 2, 0], [0, 1, 2], range(2)) == [(1, 0, 2)]


def test_steps_go_on_in_the_next_pass() -> None:
    assert list(steps_from(3, 0, 3)) == [(0, 0, 3)]
    assert list(steps_from(3, 2, 2)) == [(0, 2, 3), (1, 0, 1)]
    assert list(steps_from(3, 3, 0)) == []


def test_wrong_numbers_are_errors() -> None:
    with pytest.raises(ValueError, match="2 rows are fewer than the 3 processes"):
        RowPlan([2], 3, 0, 8).check_enough_rows()
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        RowPlan([2], 1, 0, 0)
