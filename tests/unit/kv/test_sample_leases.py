"""Leases of samples: what ledger and shards decide, alone and under random schedules."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen.elastic.cursor import Cursor
from reigen.errors import ArgumentError
from reigen.kv.consistency.sample_leases import (
    LedgerBook,
    NumberSet,
    SampleLedger,
    SamplePlan,
    batch_number,
    select_unapplied,
)
from reigen.kv.samples import BatchOrder, checked_plan
from tests.unit.kv.lease_simulator import Rules, Simulation

PLAN = SamplePlan(num_samples=10, batch_size=4, seed=3)
FIRST, SECOND = (0, 1), (1, 1)
#: Schedules that are played; more of them take 2 ms each.
SCHEDULES = int(os.environ.get("REIGEN_TEST_SCHEDULES", "500"))


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5))))
def test_a_set_of_numbers_is_one(ranges: list[tuple[int, int]]) -> None:
    numbers, expected = NumberSet(), set[int]()
    for start, length in ranges:
        numbers.add_range(start, start + length)
        expected |= set(range(start, start + length))
        assert len(numbers) == len(expected)
    assert {number for number in range(50) if number in numbers} == expected
    gaps = [number for start, stop in numbers.gaps(45) for number in range(start, stop)]
    assert gaps == sorted(set(range(45)) - expected)
    assert NumberSet(numbers.ranges()).ranges() == numbers.ranges()
    assert all(stop < start for (_, stop), (start, _) in zip(numbers.ranges(), numbers.ranges()[1:], strict=False))


@pytest.mark.parametrize("ranges", [[(2, 2)], [(3, 5), (5, 6)], [(3, 5), (1, 2)], [(-1, 2)]])
def test_ranges_that_are_no_set_are_refused(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="does not follow"):
        NumberSet(ranges)


def test_a_shard_applies_a_batch_once() -> None:
    applied = NumberSet([(1, 3)])
    assert select_unapplied([0, 2, 3, 3, 0], applied) == [0, 2, 4]


def test_each_batch_goes_to_one_worker_and_comes_back_when_that_dies() -> None:
    ledger = SampleLedger(PLAN)
    assert (ledger.lease(FIRST, 3), ledger.lease(SECOND, 3)) == (0, 1)
    assert ledger.commit(1)
    assert ledger.lease(SECOND, 3) == 2
    assert ledger.release(FIRST)
    assert not ledger.release(FIRST)
    assert ledger.holders() == (1,)
    assert ledger.commit(2)
    assert ledger.lease(SECOND, 3) == 0
    assert ledger.lease(FIRST, 3) is None
    assert not ledger.is_over(3)
    assert ledger.commit(0)
    assert not ledger.commit(0)
    assert ledger.is_over(3)
    assert ledger.floor == 3
    ledger.validate()


def test_a_worker_that_asks_again_gets_the_same_batch() -> None:
    """The answer was lost with its connection."""
    ledger = SampleLedger(PLAN)
    assert ledger.lease(FIRST, 3) == ledger.lease(FIRST, 3) == 0


def test_a_ledger_is_restored() -> None:
    ledger = SampleLedger(PLAN, num_skipped=6)
    assert [ledger.lease(FIRST, 9), ledger.lease(SECOND, 9)] == [6, 7]
    ledger.commit(7)
    again = SampleLedger.from_state(ledger.state())
    assert again.state() == ledger.state()
    assert again.floor == 6
    assert again.lease(SECOND, 9) == 8


def test_workers_have_the_same_plan() -> None:
    book, other = LedgerBook(), SamplePlan(num_samples=10, batch_size=5)
    number, ledger = book.find(PLAN)
    assert (number, ledger.lease(FIRST, 3)) == (0, 0)
    with pytest.raises(ArgumentError, match=r"batch_size=5.*worker 0 lease\(s\) them by .*batch_size=4"):
        book.find(other)
    ledger.commit(0)
    assert book.find(other)[0] == 1
    assert LedgerBook(book.state()).find(other)[0] == 1
    assert batch_number(1, 0) > batch_number(0, (1 << 40) - 1)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_the_order_is_that_of_a_cursor(*, shuffle: bool, drop_last: bool) -> None:
    plan, first, stop = checked_plan(10, 4, 3, 1, 5, shuffle=shuffle, drop_last=drop_last)
    cursor = Cursor(10, global_batch=4, seed=5, epoch=1, shuffle=shuffle, drop_last=drop_last)
    order = BatchOrder(plan)
    assert stop - first == 2 * (2 if drop_last else 3)
    for batch in range(first, stop):
        interval = cursor.next_interval(1)
        lease = order.lease(batch)
        assert (lease.epoch, lease.number, len(lease)) == (interval.epoch, batch, interval.size)
        np.testing.assert_array_equal(lease.indices, cursor.deal(interval, 0, 1)[0].indices)
        cursor.move_behind(interval)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0, 4, 1, 0, 0), "num_samples of sample_leases.. is an integer of at least 1, got 0"),
        ((4, 1.5, 1, 0, 0), "batch_size"),
        ((4, 2, True, 0, 0), "epochs"),
        ((4, 2, 1, -1, 0), "first_epoch"),
        ((4, 2, 1, 0, -1), "seed"),
        ((4, 8, 1, 0, 0), "drop_last leaves out all of the 4 samples"),
        ((1 << 40, 1, 2, 0, 0), "more than"),
    ],
)
def test_arguments_without_sense_are_refused(arguments: tuple[int, int, int, int, int], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        checked_plan(*arguments, shuffle=True, drop_last=True)


def test_each_batch_is_in_each_shard_exactly_once_whoever_dies() -> None:
    num_repeated = 0
    for seed in range(SCHEDULES):
        simulation = Simulation(seed)
        try:
            simulation.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        num_repeated += simulation.num_repeated
    assert num_repeated, "no schedule has had a batch trained on twice"


@pytest.mark.parametrize(
    "rules",
    [
        Rules(leaves_out=False),
        Rules(saves_batches=False),
        Rules(commits_last=False),
        Rules(saves_first=False),
        Rules(frees=False),
        Rules(floor_is_low=False),
    ],
    ids=str,
)
def test_without_any_one_of_its_rules_something_goes_wrong(rules: Rules) -> None:
    with pytest.raises(AssertionError):  # noqa: PT012
        for seed in range(500):
            Simulation(seed, rules).run()
