"""A conformance suite is worth what it finds: backends with one fault each fail it, in the case that names it."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from reigen.backends.base import Array, Backend, FailureCheck, FlatBackend, MemoryRegion, ReduceBuffer
from reigen.backends.null import NullBackend
from reigen.backends.shm.backend import ShmBackend, shm_backend_bytes
from reigen.cluster.local_peers import map_local_peers
from reigen.cluster.membership.rendezvous import Rendezvous
from reigen.errors import CollectiveError
from reigen.kernels.reduce import Reduction
from reigen.testing import Hub, MakeBackend, MemoryNetwork, RankError, backend_cases, backends, check_backend
from reigen.testing.backend_cases import BackendConformance
from reigen.testing.memory_network import MemoryBackend
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


def only(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = BackendConformance.cases
    monkeypatch.setattr(
        BackendConformance, "cases", lambda self: (each for each in everything(self) if each[0] == case)
    )


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


class SplitsNothing(ShmBackend):
    def split(self, ranks: Sequence[int], deadline: float) -> ShmBackend | NullBackend | None:
        raise NotImplementedError


class SplitsOffAll(ShmBackend):
    def split(self, ranks: Sequence[int], deadline: float) -> ShmBackend | NullBackend | None:
        return self if self.rank in ranks else None


class SplitsOffOthersToo(ShmBackend):
    def split(self, ranks: Sequence[int], deadline: float) -> ShmBackend | NullBackend | None:
        return super().split(ranks, deadline) or NullBackend()


class GivesGroupsTheSameMemory(ShmBackend):
    def split(self, ranks: Sequence[int], deadline: float) -> ShmBackend | NullBackend | None:
        part = super().split(ranks, deadline)
        if isinstance(part, ShmBackend):
            part._give_back()
        return part


class ClosesAllGroups(ShmBackend):
    groups: tuple[ShmBackend | NullBackend, ...] = ()

    def split(self, ranks: Sequence[int], deadline: float) -> ShmBackend | NullBackend | None:
        part = super().split(ranks, deadline)
        if part is not None:
            self.groups += (part,)
            part.close = self._close_groups  # type: ignore[method-assign]
        return part

    def _close_groups(self) -> None:
        for group in self.groups:
            type(group).close(group)


class TakesGroupsOfTheSameRanksForOne(MemoryBackend):
    """Messages are known by their numbers, which begin anew in every group."""

    def __init__(
        self, network: MemoryNetwork, hub: Hub, ranks: tuple[int, ...], rank: int, failure: FailureCheck
    ) -> None:
        super().__init__(network, hub, ranks, rank, failure)
        self._key = ranks
        self._numbers: dict[tuple[int, int], int] = defaultdict(int)

    def split(self, ranks: Sequence[int], deadline: float) -> Backend | None:
        members, own = tuple(self._ranks[rank] for rank in ranks), self._ranks[self.rank]
        return type(self)(self._network, self._hub, members, own, self._failure) if own in members else None

    def _send(self, peer: int, data: bytes) -> None:
        with self._hub.changed:
            self._hub.queues[self._next(self.rank, peer)] = deque([data])
            self._hub.changed.notify_all()

    def _receive(self, peers: Sequence[int], deadline: float) -> list[bytes]:
        keys = [self._next(peer, self.rank) for peer in peers]
        with self._hub.changed:
            if not self._hub.changed.wait_for(lambda: all(self._hub.queues[key] for key in keys), 2.0):
                raise CollectiveError("nothing comes")
            return [self._hub.queues[key].popleft() for key in keys]

    def _next(self, sender: int, receiver: int) -> tuple[object, int, int]:
        self._numbers[sender, receiver] += 1
        return (self._key, self._numbers[sender, receiver]), self._ranks[sender], self._ranks[receiver]


class NamesNobody(ShmBackend):
    def _report_missing(self, members: Sequence[int]) -> None:
        pass


class NamesItself(ShmBackend):
    def _report_missing(self, members: Sequence[int]) -> None:
        super()._report_missing([*members, self.rank])


class NamesTheWrongRank(ShmBackend):
    def _report_missing(self, members: Sequence[int]) -> None:
        super()._report_missing([int(self.rank == 0)])


class DoesNoWork(ShmBackend):
    def _idle(self) -> bool:
        return False


class WorksOnce(ShmBackend):
    def _idle(self) -> bool:
        busy = super()._idle()
        self.progress_hook = None
        return busy


class WorksWithoutNeed(ShmBackend):
    def _idle(self) -> bool:
        if self.progress_hook is not None:
            self.progress_hook.work()
        return True


class NamesRanksOnAnotherThread(ShmBackend):
    def _report_missing(self, members: Sequence[int]) -> None:
        thread = threading.Thread(target=super()._report_missing, args=(members,))
        thread.start()
        thread.join()


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


@pytest.mark.parametrize(
    ("backend", "complaint"),
    [
        (SplitsNothing, "case: split"),
        (SplitsOffAll, r"split\(\[0, 2\]\): rank 2 is rank 2 of 3"),
        (SplitsOffOthersToo, r"split\(\[0, 2\]\) gives rank 1 a backend"),
        (GivesGroupsTheSameMemory, "case: split"),
        (ClosesAllGroups, "case: split"),
    ],
)
def test_faults_of_groups(backend: type[ShmBackend], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only("split", monkeypatch)
    monkeypatch.setattr(backend_cases, "CASE_TIMEOUT_SECONDS", 2.0)
    with pytest.raises(RankError, match=complaint):
        check_backend(together(backend), 3, trimmed=True)


def test_groups_of_the_same_ranks_that_are_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()

    @contextmanager
    def make(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[Backend]:
        network = MemoryNetwork(hub, rank)
        yield TakesGroupsOfTheSameRanksForOne(network, hub, tuple(range(size)), rank, lambda _: None)

    only("split", monkeypatch)
    monkeypatch.setattr(backends, "_CHECKS_OF_WAITING", ())
    with pytest.raises(RankError, match="case: split"):
        check_backend(make, 4, trimmed=True)


@pytest.mark.parametrize(
    ("backend", "complaint"),
    [
        (NamesNobody, "ranks_missing was called 0 times"),
        (NamesItself, r"ranks_missing was called with .0, 2. on rank 0"),
        (NamesTheWrongRank, "ranks_missing was called on no rank with 2"),
        (DoesNoWork, "work was done 0 times"),
        (WorksOnce, "work was done 1 times"),
        (WorksWithoutNeed, "BlockingIOError"),
        (NamesRanksOnAnotherThread, "on another thread"),
    ],
)
def test_faults_while_waiting(backend: type[ShmBackend], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_LISTENING_SECONDS", 1.0)
    monkeypatch.setattr(backend_cases, "CASE_TIMEOUT_SECONDS", 3.0)
    with pytest.raises(RankError, match=complaint):
        check_backend(together(backend), 3, trimmed=True)


def test_a_backend_that_lacks_a_method_cannot_be_made() -> None:
    class Incomplete(NullBackend):
        barrier = FlatBackend.barrier

    with pytest.raises(TypeError, match="barrier"):
        Incomplete()
    with pytest.raises(TypeError, match=r"abort, allgather, .*, split"):
        FlatBackend()  # type: ignore[abstract]
