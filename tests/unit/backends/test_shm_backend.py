"""The slots of the shared-memory backend: no rank fills one that another still reads, however they are interleaved."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from reigen.backends.base import ProgressHook, ReduceBuffer
from reigen.backends.shm.backend import SLOT_BYTES, ShmBackend, shm_backend_bytes
from reigen.cluster.local_peers import map_local_peers
from reigen.cluster.membership.rendezvous import LocalRendezvous
from reigen.kernels.reduce import Reduction
from reigen.testing import run_threads
from reigen.types import DTYPES, ReduceOp
from tests.machines import soon

Array = NDArray[np.int64]


class Pauses:
    """Keeps one rank at a time, at the end of a phase, until all others have ended or can go no further without it."""

    def __init__(self, size: int, seed: int) -> None:
        self._is_keeping = threading.Lock()
        self._is_stuck = [threading.Event() for _ in range(size)]
        self._ended: set[int] = set()
        self._random = [np.random.default_rng([seed, rank]) for rank in range(size)]
        self._readable, writable = os.pipe()
        os.close(writable)  # and so it is readable for ever
        self.count = 0

    @contextlib.contextmanager
    def applied_to(self, backend: ShmBackend) -> Iterator[None]:
        rank = backend.rank
        backend.phase_ended = lambda _: self._may_keep(rank)
        backend.progress_hook = ProgressHook(self._readable, self._is_stuck[rank].set)
        yield
        self._ended.add(rank)
        self._is_stuck[rank].set()

    def _may_keep(self, rank: int) -> None:
        if self._random[rank].random() < 0.3 and self._is_keeping.acquire(blocking=False):
            try:
                others = [(other, event) for other, event in enumerate(self._is_stuck) if other != rank]
                for other, event in others:
                    event.clear()
                    if other in self._ended:
                        event.set()
                assert all(event.wait(20.0) for _, event in others)
                self.count += 1
            finally:
                self._is_keeping.release()

    def close(self) -> None:
        os.close(self._readable)


def contribution(rank: int, number: int, count: int) -> Array:
    return np.random.default_rng([rank, number]).integers(-(10**6), 10**6, count)


def allreduce(backend: ShmBackend, number: int, count: int, num_arrays: int) -> None:
    mine = np.array_split(contribution(backend.rank, number, count), num_arrays)
    results = [np.empty_like(part) for part in mine]
    buffers = [ReduceBuffer(part, result) for part, result in zip(mine, results, strict=True)]
    backend.allreduce(buffers, Reduction(DTYPES["int64"], ReduceOp.SUM, backend.size), soon())
    total = sum(contribution(rank, number, count) for rank in range(backend.size))
    np.testing.assert_array_equal(np.concatenate(results), total)


def allgather(backend: ShmBackend, number: int, count: int) -> None:
    counts = [count * (rank + 1) // backend.size for rank in range(backend.size)]
    result = np.empty(sum(counts), np.int64)
    backend.allgather(contribution(backend.rank, number, counts[backend.rank]), counts, result, soon())
    truth = [contribution(rank, number, each) for rank, each in enumerate(counts)]
    np.testing.assert_array_equal(result, np.concatenate(truth))


def to_one_and_back(backend: ShmBackend, number: int, count: int) -> None:
    """Rounds that only rank 0 waits for, and rounds behind them that all wait for."""
    shown = min(count, SLOT_BYTES // 8)
    truth = [contribution(rank, number, shown) for rank in range(backend.size)]

    def fill(_: int, slot: NDArray[np.uint8]) -> None:
        slot[: shown * 8] = truth[backend.rank].view(np.uint8)

    def collect(_: int, slots: Sequence[NDArray[np.uint8]]) -> None:
        for slot, expected in zip(slots, truth, strict=True):
            np.testing.assert_array_equal(slot[: shown * 8].view(np.int64), expected)

    backend.rounds(1, fill, collect, soon(), waits_last=backend.rank == 0)
    backend.rounds(1, fill, collect, soon())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 3])
def test_no_slot_is_filled_that_another_rank_reads(size: int, seed: int) -> None:
    pauses = Pauses(size, seed)

    def act(rank: int, rendezvous: LocalRendezvous) -> None:
        random = np.random.default_rng(seed)
        peers, [part] = map_local_peers(rendezvous, rank, range(size), 0, 60.0, [shm_backend_bytes()])
        backend = ShmBackend(peers, part, looks=0)
        try:
            with pauses.applied_to(backend):
                for number in itertools.count():
                    count = int(random.choice([5, 6_000, 70_000, 200_000, 330_000]))
                    match random.integers(8):
                        case 0:
                            allgather(backend, number, count)
                        case 1:
                            to_one_and_back(backend, number, count)
                        case 2:
                            backend.barrier(soon())
                        case kind:
                            allreduce(backend, number, count, 1 + int(kind) % 3)
                    if number == 40:
                        return
        finally:
            backend.close()
            peers.close()

    try:
        run_threads(act, size)
    finally:
        pauses.close()
    assert pauses.count > 20


@pytest.mark.parametrize("count", [20_000, 200_000])
def test_two_ranks_agree_where_a_result_overwrites_another_source(count: int) -> None:
    def act(rank: int, rendezvous: LocalRendezvous) -> tuple[Array, Array]:
        peers, [part] = map_local_peers(rendezvous, rank, range(2), 0, 60.0, [shm_backend_bytes()])
        backend = ShmBackend(peers, part, looks=0)
        try:
            one, other = contribution(rank, 0, count), contribution(rank, 1, count)
            buffers = [ReduceBuffer(one, one), ReduceBuffer(one, other), ReduceBuffer(other, one)]
            backend.allreduce(buffers, Reduction(DTYPES["int64"], ReduceOp.SUM, 2), soon())
            return one, other
        finally:
            backend.close()
            peers.close()

    first, second = run_threads(act, 2)
    np.testing.assert_array_equal(first, second)
