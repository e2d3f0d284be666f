"""A conformance suite is worth what it finds: backends with one fault each fail it, in the case that names it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from reigen.backends.base import Array, Backend, MemoryRegion, ReduceBuffer
from reigen.backends.null import NullBackend
from reigen.backends.shm.backend import ShmBackend, shm_backend_bytes
from reigen.cluster.local_peers import map_local_peers
from reigen.cluster.membership.rendezvous import Rendezvous
from reigen.kernels.reduce import Reduction
from reigen.testing import MakeBackend, RankError, check_backend
from reigen.types import ReduceOp


def alone(backend: type[NullBackend]) -> MakeBackend:
    @contextmanager
    def make(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[Backend]:
        yield backend()

    return make


def together(backend: type[ShmBackend]) -> MakeBackend:
    @contextmanager
    def make(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[Backend]:
        neighbours, [part] = map_local_peers(rendezvous, rank, range(size), 0, 60.0, [shm_backend_bytes()])
        try:
            yield backend(neighbours, part, looks=0)
        finally:
            neighbours.close()

    return make


class WritesTooFar(NullBackend):
    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        super().broadcast(source, target, root, deadline)
        if target.base is not None and target.size == 7:
            end = target.base.view(target.dtype)
            end[end.size - 1] = 0


class ForgetsPostscale(NullBackend):
    def allreduce(self, buffers: Sequence[ReduceBuffer], reduction: Reduction, deadline: float) -> None:
        plain = Reduction(reduction.dtype, reduction.op, reduction.count, prescale=reduction.prescale)
        super().allreduce(buffers, plain, deadline)


class SpoilsItsSource(NullBackend):
    def allreduce(self, buffers: Sequence[ReduceBuffer], reduction: Reduction, deadline: float) -> None:
        super().allreduce(buffers, reduction, deadline)
        for buffer in buffers:
            buffer.source.view(np.uint8)[:1] ^= 1


class GivesDirtyMemory(NullBackend):
    def allocate(self, nbytes: int, deadline: float) -> MemoryRegion:
        region = super().allocate(nbytes, deadline)
        region.array[-1] = 1
        return region


class AddsBackwards(ShmBackend):
    """The same numbers in another order: floating-point bits differ, integers do not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slots = [slots[::-1] for slots in self._slots]
        self._mine = self.rank

    def allreduce(self, buffers: Sequence[ReduceBuffer], reduction: Reduction, deadline: float) -> None:
        self.rank = self.size - 1 - self._mine
        super().allreduce(buffers, reduction, deadline)
        self.rank = self._mine


class AveragesWithoutOne(ShmBackend):
    def allreduce(self, buffers: Sequence[ReduceBuffer], reduction: Reduction, deadline: float) -> None:
        count = self.size - 1 if reduction.op is ReduceOp.AVERAGE else self.size
        super().allreduce(buffers, Reduction(reduction.dtype, reduction.op, count), deadline)


class DoesNotWait(ShmBackend):
    def barrier(self, deadline: float) -> None:
        pass


class KnowsOneRoot(ShmBackend):
    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        zero = target if self.rank == 0 and source is None else source
        super().broadcast(zero if self.rank == 0 else None, target, 0, deadline)


class SharesNothing(ShmBackend):
    def allocate_shared(self, nbytes: int, deadline: float) -> MemoryRegion:
        return self.allocate(nbytes, deadline)


class GivesOwnersTheWrongParts(ShmBackend):
    def reduce_to_owners(
        self, buffer: ReduceBuffer, counts: Sequence[int], reduction: Reduction, deadline: float
    ) -> None:
        super().reduce_to_owners(buffer, counts[::-1], reduction, deadline)


@pytest.mark.parametrize(
    ("backend", "complaint"),
    [
        (WritesTooFar, "beyond the end of the target"),
        (ForgetsPostscale, "case: factors"),
        (SpoilsItsSource, "the source was changed"),
        (GivesDirtyMemory, "not zeroed"),
    ],
)
def test_faults_of_one_rank(backend: type[NullBackend], complaint: str) -> None:
    with pytest.raises(RankError, match=complaint):
        check_backend(alone(backend), 1)


@pytest.mark.parametrize(
    ("backend", "complaint"),
    [
        (AddsBackwards, "case: allreduce float32 SUM"),
        (AveragesWithoutOne, "case: allreduce float32 AVERAGE"),
        (DoesNotWait, "barrier.. returned"),
        (KnowsOneRoot, "case: broadcast"),
        (SharesNothing, "case: shared memory"),
        (GivesOwnersTheWrongParts, "case: reduction to owners"),
    ],
)
def test_faults_between_ranks(backend: type[ShmBackend], complaint: str) -> None:
    with pytest.raises(RankError, match=complaint):
        check_backend(together(backend), 3, trimmed=True)
