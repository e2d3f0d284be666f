"""A rank stops at every boundary of its reductions; others finish them with the bits of an undisturbed job."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reigen.backends.base import ReduceBuffer
from reigen.backends.shm import reduction_journal
from reigen.backends.shm.backend import ShmBackend, shm_backend_bytes
from reigen.backends.shm.reduction_journal import BucketExtent, ReductionJournal, journal_bytes
from reigen.cluster.local_peers import map_local_peers
from reigen.cluster.membership.rendezvous import LocalRendezvous
from reigen.kernels.reduce import BlockReducer, Reduction
from reigen.testing import run_threads
from reigen.types import DTYPES, ReduceOp
from tests.machines import soon

#: Elements of the buckets: several blocks and a short one for each rank; fewer than ranks; one.
COUNTS = (1000, 3, 1, 517)
EVERYTHING = range(len(COUNTS))
_BLOCK_BYTES = 256


class StoppedError(Exception):
    """The rank is killed here."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction_journal, "BLOCK_BYTES", _BLOCK_BYTES)


class Boundaries:
    """Counts the boundaries between instructions of a reduction, and stops it at one of them.

    Where an array is written, that is in the middle of it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.passed = 0
        store, copy = reduction_journal._store, reduction_journal._copy_block
        reduce = BlockReducer.reduce

        def stopping_store(word: memoryview, value: int) -> None:
            self._pass()
            store(word, value)
            self._pass()

        def stopping_copy(target: NDArray[Any], total: NDArray[Any]) -> None:
            if self._is_last():
                target[: total.size // 2] = total[: total.size // 2]
            self._pass()
            copy(target, total)

        def stopping_reduce(reducer: BlockReducer, inputs: list[NDArray[Any]], out: NDArray[Any]) -> None:
            if self._is_last():
                out[: out.size // 2] = 17
            self._pass()
            reduce(reducer, inputs, out)

        monkeypatch.setattr(reduction_journal, "_store", stopping_store)
        monkeypatch.setattr(reduction_journal, "_copy_block", stopping_copy)
        monkeypatch.setattr(BlockReducer, "reduce", stopping_reduce)

    def _is_last(self) -> bool:
        return self.left == 0

    def _pass(self) -> None:
        self.passed += 1
        if self.left == 0:
            self.left = -1
            raise StoppedError
        self.left -= self.left > 0

    def stop(self, act: Callable[[], None], boundary: int) -> bool:
        """Return whether the boundary was reached."""
        self.left = boundary
        try:
            act()
        except StoppedError:
            return True
        finally:
            self.left = -1
        return False


class Host:
    """Ranks with one bucket each of `COUNTS`, in memory that all have mapped."""

    def __init__(self, size: int, *, dtype: str = "float32") -> None:
        self.size, self.storage = size, DTYPES[dtype].storage
        self.reduction = Reduction(DTYPES[dtype], ReduceOp.AVERAGE, size)
        extents, offset = [], 0
        for count in COUNTS:
            extents.append(BucketExtent(offset, count * self.storage.itemsize, self.reduction))
            offset += -(-count * self.storage.itemsize // 64) * 64
        self.extents = extents
        self.copies = [np.zeros(offset + journal_bytes(len(COUNTS)), np.uint8) for _ in range(size)]
        self.journals = [ReductionJournal(self.copies, rank, extents) for rank in range(size)]

    def bucket(self, rank: int, number: int) -> NDArray[Any]:
        extent = self.extents[number]
        return self.copies[rank][extent.offset : extent.offset + extent.nbytes].view(self.storage)

    def fill(self, rank: int, seed: int) -> None:
        for number, count in enumerate(COUNTS):
            gradient = np.random.default_rng([seed, rank, number]).standard_normal(count) * 10.0**rank
            self.bucket(rank, number)[:] = gradient.astype(self.storage)
            self.journals[rank].buckets[number].fill()

    def reduce(self, rank: int) -> None:
        for bucket in self.journals[rank].buckets:
            bucket.reduce(BlockReducer(self.reduction))

    def truth(self, seed: int) -> list[NDArray[Any]]:
        """Sums in rank order, element by element in the type itself: computed apart from the code under test."""
        sums = []
        for number, count in enumerate(COUNTS):
            parts = [
                (np.random.default_rng([seed, rank, number]).standard_normal(count) * 10.0**rank).astype(self.storage)
                for rank in range(self.size)
            ]
            total = parts[0].copy()
            for part in parts[1:]:
                total = total + part
            sums.append(total / self.storage.type(self.size))
        return sums

    def check(self, seed: int, survivors: Iterator[int] | range | list[int]) -> None:
        for number, total in enumerate(self.truth(seed)):
            for rank in survivors:
                np.testing.assert_array_equal(self.bucket(rank, number), total)


def _stop_everywhere(
    monkeypatch: pytest.MonkeyPatch, size: int, *, survivors_stop: bool, spoil: Callable[[Host], None]
) -> int:
    """Stop rank 1 at every boundary of its reductions; returns how many there are."""
    boundaries = Boundaries(monkeypatch)
    for boundary in itertools.count():
        host = Host(size)
        spoil(host)
        for seed in range(2):  # a pass that is over comes before
            for rank in range(size):
                host.fill(rank, seed)
            for rank in range(size) if not seed else ():
                host.reduce(rank)
        if not boundaries.stop(lambda host=host: host.reduce(1), boundary):
            return boundary
        # the others have come to anywhere: they were revoked
        for rank in range(size):
            if rank != 1:
                boundaries.stop(lambda host=host, rank=rank: host.reduce(rank), boundary * 7 % (3 + 5 * rank) * 9)
        survivor = host.journals[0]
        assert all(bucket.can_finish(2) for bucket in survivor.buckets)
        if survivors_stop:  # who finishes the slice of the dead dies in its turn, and the next one goes on
            boundaries.stop(lambda survivor=survivor: survivor.finish([1], EVERYTHING), 5)
            survivor = host.journals[size - 1]
        survivor.finish(range(size), EVERYTHING)
        host.check(1, [rank for rank in range(size) if rank != 1])
        assert all(bucket.is_whole(2) for bucket in survivor.buckets)
    raise AssertionError


@pytest.mark.parametrize("survivors_stop", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_others_finish_what_a_rank_began_wherever_it_stopped(
    monkeypatch: pytest.MonkeyPatch, size: int, survivors_stop: bool
) -> None:
    num_boundaries = _stop_everywhere(monkeypatch, size, survivors_stop=survivors_stop, spoil=lambda _: None)
    assert num_boundaries > 30


def test_a_journal_without_words_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(word: memoryview, value: int) -> None:
        if not value & 0xFFFFFFFF:  # the pass alone
            word[0] = value

    monkeypatch.setattr(reduction_journal, "_store", forget)
    with pytest.raises(AssertionError):
        _stop_everywhere(monkeypatch, 3, survivors_stop=False, spoil=lambda _: None)


def test_a_journal_without_scratch_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def sum_in_place(host: Host) -> None:
        for journal in host.journals:
            for number, bucket in enumerate(journal.buckets):
                bucket._scratch = [host.bucket(rank, number) for rank in range(host.size)]

    with pytest.raises(AssertionError):
        _stop_everywhere(monkeypatch, 3, survivors_stop=False, spoil=sum_in_place)


def test_a_mark_before_the_sum_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the word says that the sum counts, and then it is made."""

    def reversed_order(self: Any, rank: int, reducer: BlockReducer) -> None:
        low, high = self._slices[rank]
        word = self._words[rank]
        for begin in range(low, high, self._block):
            end = min(high, begin + self._block)
            total = self._scratch[rank][: end - begin]
            reduction_journal._store(word, word[0] + 1)
            reducer.reduce([copy[begin:end] for copy in self._copies], total)
            for copy in self._copies:
                reduction_journal._copy_block(copy[begin:end], total)
            reduction_journal._store(word, word[0] + 1)

    monkeypatch.setattr(reduction_journal.BucketJournal, "reduce", lambda self, r: reversed_order(self, self._rank, r))
    with pytest.raises(AssertionError):
        _stop_everywhere(monkeypatch, 3, survivors_stop=False, spoil=lambda _: None)


def test_a_bucket_that_one_has_not_filled_cannot_be_finished() -> None:
    host = Host(3)
    for rank in range(3):
        host.fill(rank, 0)
    for rank in range(3):
        host.reduce(rank)
    host.fill(0, 1)
    host.fill(2, 1)
    host.journals[1].buckets[0].fill()
    can = [bucket.can_finish(2) for bucket in host.journals[0].buckets]
    assert can == [True, False, False, False]
    assert host.journals[2].buckets[1].ranks_without(2) == [1]


def test_nothing_is_finished_once_a_bucket_was_reduced_elsewhere() -> None:
    host = Host(2)
    for rank in range(2):
        host.fill(rank, 0)
        host.journals[rank].check_reduced()  # some rank had joined: it went through ordinary memory
        host.fill(rank, 1)
    for journal in host.journals:
        assert not any(bucket.can_finish(number) for bucket in journal.buckets for number in range(5))


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int32"])
def test_results_are_those_of_the_backend_for_all_types(dtype: str) -> None:
    host = Host(3, dtype=dtype)
    inputs: list[list[NDArray[Any]]] = []
    for rank in range(3):
        host.fill(rank, 0)
        inputs.append([host.bucket(rank, number).copy() for number in range(len(COUNTS))])
    for rank in range(3):
        host.reduce(rank)
    for number in range(len(COUNTS)):
        total = np.empty_like(inputs[0][number])
        BlockReducer(host.reduction).reduce([each[number] for each in inputs], total)
        for rank in range(3):
            np.testing.assert_array_equal(host.bucket(rank, number), total)


def test_the_backend_reduces_by_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = (40_000, 7)

    def act(rank: int, rendezvous: LocalRendezvous) -> bool:
        peers, [part] = map_local_peers(rendezvous, rank, range(3), 0, 60.0, [shm_backend_bytes()])
        backend = ShmBackend(peers, part, looks=0)
        try:
            reduction = Reduction(DTYPES["float32"], ReduceOp.SUM, 3)
            extents = [BucketExtent(0, counts[0] * 4, reduction), BucketExtent(counts[0] * 4, counts[1] * 4, reduction)]
            region = backend.allocate(counts[0] * 4 + 64 + journal_bytes(2), soon())
            journal = ReductionJournal(region.owned, rank, extents)
            for number in range(3):
                buffers, truth = [], []
                for extent, bucket, count in zip(extents, journal.buckets, counts, strict=True):
                    parts = [np.random.default_rng([number, r, count]).standard_normal(count) for r in range(3)]
                    array = region.array[extent.offset : extent.offset + extent.nbytes].view(np.float32)
                    array[:] = parts[rank]
                    bucket.fill()
                    buffers.append(ReduceBuffer(array, array, region.offset + extent.offset, bucket))
                    first, second, third = (each.astype(np.float32) for each in parts)
                    truth.append((first + second) + third)
                backend.barrier(soon())  # all have submitted it
                backend.allreduce(buffers, reduction, soon())
                for buffer, total in zip(buffers, truth, strict=True):
                    np.testing.assert_array_equal(buffer.target, total)
                journal.check_reduced()
                backend.barrier(soon())
            return all(bucket.is_whole(3) for bucket in journal.buckets)
        finally:
            backend.close()
            peers.close()

    monkeypatch.setattr(reduction_journal, "BLOCK_BYTES", 3 << 17)
    assert all(run_threads(act, 3))
