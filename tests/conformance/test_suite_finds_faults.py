"""A conformance suite is worth what it finds: planes with one fault each fail it, in the case that names the fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from reigen.cluster.neighbours import meet
from reigen.cluster.rendezvous import Rendezvous
from reigen.kernels.reduce import Reduction
from reigen.planes.base import Array, Buffer, DataPlane, Region
from reigen.planes.null import NullPlane
from reigen.planes.shm import ShmPlane, shm_plane_bytes
from reigen.testing import MakePlane, RankError, check_plane
from reigen.types import ReduceOp


def alone(plane: type[NullPlane]) -> MakePlane:
    @contextmanager
    def make(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[DataPlane]:
        yield plane()

    return make


def together(plane: type[ShmPlane]) -> MakePlane:
    @contextmanager
    def make(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[DataPlane]:
        neighbours, [part] = meet(rendezvous, rank, range(size), 0, 60.0, [shm_plane_bytes()])
        try:
            yield plane(neighbours, part, looks=0)
        finally:
            neighbours.close()

    return make


class WritesTooFar(NullPlane):
    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        super().broadcast(source, target, root, deadline)
        if target.base is not None and target.size == 7:
            end = target.base.view(target.dtype)
            end[end.size - 1] = 0


class ForgetsPostscale(NullPlane):
    def allreduce(self, buffers: Sequence[Buffer], reduction: Reduction, deadline: float) -> None:
        plain = Reduction(reduction.dtype, reduction.op, reduction.count, prescale=reduction.prescale)
        super().allreduce(buffers, plain, deadline)


class SpoilsItsSource(NullPlane):
    def allreduce(self, buffers: Sequence[Buffer], reduction: Reduction, deadline: float) -> None:
        super().allreduce(buffers, reduction, deadline)
        for buffer in buffers:
            buffer.source.view(np.uint8)[:1] ^= 1


class GivesDirtyMemory(NullPlane):
    def allocate(self, nbytes: int, deadline: float) -> Region:
        region = super().allocate(nbytes, deadline)
        region.array[-1] = 1
        return region


class AddsBackwards(ShmPlane):
    """The same numbers in another order: floating-point bits differ, integers do not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._slots = [slots[::-1] for slots in self._slots]
        self._mine = self.rank

    def allreduce(self, buffers: Sequence[Buffer], reduction: Reduction, deadline: float) -> None:
        self.rank = self.size - 1 - self._mine
        super().allreduce(buffers, reduction, deadline)
        self.rank = self._mine


class AveragesWithoutOne(ShmPlane):
    def allreduce(self, buffers: Sequence[Buffer], reduction: Reduction, deadline: float) -> None:
        count = self.size - 1 if reduction.op is ReduceOp.AVERAGE else self.size
        super().allreduce(buffers, Reduction(reduction.dtype, reduction.op, count), deadline)


class DoesNotWait(ShmPlane):
    def barrier(self, deadline: float) -> None:
        pass


class KnowsOneRoot(ShmPlane):
    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        zero = target if self.rank == 0 and source is None else source
        super().broadcast(zero if self.rank == 0 else None, target, 0, deadline)


class SharesNothing(ShmPlane):
    def allocate_shared(self, nbytes: int, deadline: float) -> Region:
        return self.allocate(nbytes, deadline)


class GivesOwnersTheWrongParts(ShmPlane):
    def reduce_to_owners(self, buffer: Buffer, counts: Sequence[int], reduction: Reduction, deadline: float) -> None:
        super().reduce_to_owners(buffer, counts[::-1], reduction, deadline)


@pytest.mark.parametrize(
    ("plane", "complaint"),
    [
        (WritesTooFar, "beyond the end of the target"),
        (ForgetsPostscale, "case: factors"),
        (SpoilsItsSource, "the source was changed"),
        (GivesDirtyMemory, "not zeroed"),
    ],
)
def test_faults_of_one_rank(plane: type[NullPlane], complaint: str) -> None:
    with pytest.raises(RankError, match=complaint):
        check_plane(alone(plane), 1)


@pytest.mark.parametrize(
    ("plane", "complaint"),
    [
        (AddsBackwards, "case: allreduce float32 SUM"),
        (AveragesWithoutOne, "case: allreduce float32 AVERAGE"),
        (DoesNotWait, "barrier.. returned"),
        (KnowsOneRoot, "case: broadcast"),
        (SharesNothing, "case: shared memory"),
        (GivesOwnersTheWrongParts, "case: reduction to owners"),
    ],
)
def test_faults_between_ranks(plane: type[ShmPlane], complaint: str) -> None:
    with pytest.raises(RankError, match=complaint):
        check_plane(together(plane), 3, trimmed=True)
