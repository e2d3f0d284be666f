"""Sums of a step in flight: which can be had, who completes what, and with which bits."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from reigen.backends.shm.reduction_journal import BucketExtent, ReductionJournal, journal_bytes
from reigen.backends.shm.step_sums import StepSums
from reigen.kernels.reduce import BlockReducer, Reduction
from reigen.types import DTYPES, ReduceOp

_COUNT, _NUM_BUCKETS = 100_000, 2


class Host:
    def __init__(self, size: int) -> None:
        self.size = size
        self.reduction = Reduction(DTYPES["float32"], ReduceOp.SUM, size)
        extents = [BucketExtent(number * _COUNT * 4, _COUNT * 4, self.reduction) for number in range(_NUM_BUCKETS)]
        nbytes = _NUM_BUCKETS * _COUNT * 4 + journal_bytes(_NUM_BUCKETS)
        self.copies = [np.zeros(nbytes, np.uint8) for _ in range(size)]
        self.journals = [ReductionJournal(self.copies, rank, extents) for rank in range(size)]
        self.sums = [StepSums(journal) for journal in self.journals]

    def bucket(self, rank: int, number: int) -> NDArray[np.float32]:
        return self.copies[rank][number * _COUNT * 4 : (number + 1) * _COUNT * 4].view(np.float32)

    def fill(self, rank: int, number: int, step: int) -> None:
        self.bucket(rank, number)[:] = gradient(rank, number, step)
        self.journals[rank].buckets[number].fill()

    def step(self, step: int) -> None:
        """Run a step without disturbance."""
        self.begin()
        for rank in range(self.size):
            for number in range(_NUM_BUCKETS):
                self.fill(rank, number, step)
        for rank in range(self.size):
            self.reduce(rank)

    def begin(self) -> None:
        for sums in self.sums:
            sums.begin_step()

    def reduce(self, rank: int) -> None:
        for bucket in self.journals[rank].buckets:
            bucket.reduce(BlockReducer(self.reduction))


def gradient(rank: int, number: int, step: int) -> NDArray[np.float32]:
    return np.random.default_rng([rank, number, step]).standard_normal(_COUNT).astype(np.float32)


def total(size: int, number: int, step: int) -> NDArray[np.float32]:
    result = gradient(0, number, step).copy()
    for rank in range(1, size):
        result = result + gradient(rank, number, step)
    return result


def test_a_bucket_is_held_if_all_who_are_lost_had_filled_it() -> None:
    host = Host(3)
    host.step(0)
    host.begin()
    host.fill(1, 0, step=1)
    assert host.sums[0].held({1}) == [0]  # 0 and 2 are going to fill it
    assert host.sums[0].held({2}) == []
    assert host.sums[0].held({1, 2}) == []
    assert host.sums[0].held(set()) == [0, 1]
    assert not host.sums[0].can_finish
    host.fill(1, 1, step=1)
    assert host.sums[2].held({1}) == [0, 1]


def test_nothing_is_held_of_a_step_that_began_without_the_journal() -> None:
    host = Host(2)
    assert host.sums[0].held({1}) == []
    assert not host.sums[0].can_finish
    assert not host.sums[0].is_whole


def test_sums_of_the_step_before_are_none_of_this_step() -> None:
    host = Host(2)
    host.step(0)
    assert host.sums[0].is_whole
    host.begin()
    assert not host.sums[0].is_whole
    assert not host.sums[0].can_finish
    assert host.sums[0].held({1}) == []


@pytest.mark.parametrize("survivors", [(0, 2), (0, 1, 2, 4), (3,), (4, 5)])
def test_survivors_complete_the_sums_of_all(survivors: tuple[int, ...]) -> None:
    size = 6
    host = Host(size)
    host.step(0)
    host.begin()
    for rank in range(size):
        for number in range(_NUM_BUCKETS):
            host.fill(rank, number, step=1)
    host.journals[1].buckets[1].reduce(BlockReducer(host.reduction))
    host.reduce(4)
    for rank in survivors:
        assert host.sums[rank].can_finish
        assert not host.sums[rank].is_whole
    for rank in survivors:
        host.sums[rank].finish(survivors)
    for rank in survivors:
        assert host.sums[rank].is_whole
        for number in range(_NUM_BUCKETS):
            np.testing.assert_array_equal(host.bucket(rank, number), total(size, number, 1))


def test_who_is_behind_has_the_sums_though_others_have_begun_the_next_pass() -> None:
    host = Host(3)
    host.step(0)
    host.step(1)
    host.fill(0, 0, step=2)
    host.fill(0, 1, step=2)
    assert host.sums[1].is_whole
    assert not host.sums[0].is_whole
    np.testing.assert_array_equal(host.bucket(1, 0), total(3, 0, 1))
