"""Network in memory, for ranks that are threads of one process; it counts the bytes that they send each other.

Queues do here the work of sockets, in the plainest way: each rank sends straight to each other one, and each slice of
a reduction is added up by one rank, in rank order. So each rank sends 2 (n-1)/n S bytes for an allreduce of S bytes,
and the minimum for the other operations; only the root of a broadcast sends n-1 times S.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from reigen.backends.base import (
    Array,
    Backend,
    BackendCapabilities,
    FailureCheck,
    FlatBackend,
    ReduceBuffer,
)
from reigen.backends.buffer_list import BufferList, rank_slice
from reigen.errors import CollectiveError, DeadlineError
from reigen.kernels.reduce import BlockReducer, Reduction

_SLICE_SECONDS = 0.05


class Hub:
    """Common state of the ranks' networks."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        #: (backend, sender, receiver), by ranks of the job -> data under way
        self.queues: dict[tuple[object, int, int], deque[bytes]] = defaultdict(deque)
        #: backend -> the first error that a rank aborted with
        self.aborted: dict[object, CollectiveError] = {}
        #: number of bytes that each rank of the job has sent
        self.num_sent_bytes: dict[int, int] = defaultdict(int)
        self._num_backends: dict[tuple[int, ...], dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def enter(self, ranks: tuple[int, ...], rank: int) -> object:
        """Return the key of a rank's next backend among these ranks: the same for all of them."""
        with self.changed:
            self._num_backends[ranks][rank] += 1
            return ranks, self._num_backends[ranks][rank]


class MemoryNetwork:
    """End of one rank of a `reigen.backends.base.HostNetwork`; ``failure`` is asked while a rank waits."""

    name = "memory"

    def __init__(self, hub: Hub, rank: int, failure: FailureCheck = lambda _: None) -> None:
        self._hub, self._rank, self._failure = hub, rank, failure

    def among(self, ranks: Sequence[int], deadline: float) -> Backend:
        assert list(ranks) == sorted(ranks), "ranks are given in ascending order"
        backend = MemoryBackend(self, self._hub, tuple(ranks), self._rank, self._failure)
        backend.barrier(deadline)
        return backend

    def close(self) -> None:
        """Release nothing."""


class MemoryBackend(FlatBackend):
    """`reigen.backends.base.Backend` over such a network, without its own docstrings where the interface says all."""

    name = "memory"
    capabilities = BackendCapabilities(registered_memory=False, ordered_sums=True, abortable=True)

    def __init__(
        self, network: MemoryNetwork, hub: Hub, ranks: tuple[int, ...], rank: int, failure: FailureCheck
    ) -> None:
        self.rank, self.size = ranks.index(rank), len(ranks)
        self._network, self._hub, self._ranks, self._failure = network, hub, ranks, failure
        self._key = hub.enter(ranks, rank)

    def allreduce(self, buffers: Sequence[ReduceBuffer], reduction: Reduction, deadline: float) -> None:
        source, target = BufferList([b.source for b in buffers]), BufferList([b.target for b in buffers])
        total = np.empty(source.size, reduction.dtype.storage)
        source.read(0, source.size, total)
        bounds = [rank_slice(total.size, rank, self.size, total.itemsize) for rank in range(self.size)]
        counts = [high - low for low, high in bounds]
        own = np.empty(counts[self.rank], total.dtype)
        self.reduce_scatter(total, counts, own, reduction, deadline)
        self.allgather(own, counts, total, deadline)
        target.write(0, total)

    def reduce_scatter(
        self, source: Array, counts: Sequence[int], target: Array, reduction: Reduction, deadline: float
    ) -> None:
        gathered = np.empty((self.size, target.size), target.dtype)
        table = [list(counts) for _ in range(self.size)]
        self.alltoall(source, table, gathered.reshape(-1), deadline)
        BlockReducer(reduction).reduce(list(gathered), target)

    def allgather(self, source: Array, counts: Sequence[int], target: Array, deadline: float) -> None:
        copies = np.concatenate([source] * self.size)
        self.alltoall(copies, [[count] * self.size for count in counts], target, deadline)

    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        copies = np.empty(0, target.dtype) if source is None else np.concatenate([source] * self.size)
        counts = [[target.size if rank == root else 0] * self.size for rank in range(self.size)]
        self.alltoall(copies, counts, target, deadline)

    def alltoall(self, source: Array, counts: Sequence[Sequence[int]], target: Array, deadline: float) -> None:
        ends = list(itertools.accumulate(counts[self.rank]))
        own = source[ends[self.rank] - counts[self.rank][self.rank] : ends[self.rank]].copy()
        for peer, (count, end) in enumerate(zip(counts[self.rank], ends, strict=True)):
            if peer != self.rank and count:
                self._send(peer, source[end - count : end].tobytes())
        place = 0
        for peer, row in enumerate(counts):
            count = row[self.rank]
            if count:
                target[place : place + count] = (
                    own if peer == self.rank else np.frombuffer(self._receive([peer], deadline)[0], target.dtype)
                )
            place += count

    def barrier(self, deadline: float) -> None:
        peers = [peer for peer in range(self.size) if peer != self.rank]
        for peer in peers:
            self._send(peer, b"")
        self._receive(peers, deadline)

    def split(self, ranks: Sequence[int], deadline: float) -> Backend | None:
        return self._network.among([self._ranks[rank] for rank in ranks], deadline) if self.rank in ranks else None

    def abort(self, error: CollectiveError) -> None:
        with self._hub.changed:
            self._hub.aborted.setdefault(self._key, error)
            self._hub.changed.notify_all()

    def close(self) -> None:
        """Implement `Backend.close`: nothing is held."""

    def _send(self, peer: int, data: bytes) -> None:
        own = self._ranks[self.rank]
        with self._hub.changed:
            self._hub.num_sent_bytes[own] += len(data)
            self._hub.queues[self._key, own, self._ranks[peer]].append(data)
            self._hub.changed.notify_all()

    def _receive(self, peers: Sequence[int], deadline: float) -> list[bytes]:
        """Receive one message of each peer."""
        own = self._ranks[self.rank]
        with self._hub.changed:
            queues = {peer: self._hub.queues[self._key, self._ranks[peer], own] for peer in peers}
        while True:
            with self._hub.changed:
                missing = [peer for peer, queue in queues.items() if not queue]
                if not missing:
                    return [queue.popleft() for queue in queues.values()]
                if self._key in self._hub.aborted:
                    raise self._hub.aborted[self._key]
                self._hub.changed.wait(max(0.0, min(_SLICE_SECONDS, deadline - time.monotonic())))
            self._look([peer for peer, queue in queues.items() if not queue], deadline)

    def _look(self, missing: Sequence[int], deadline: float) -> None:
        ranks = [self._ranks[peer] for peer in missing]
        if self.progress_hook is not None:
            self.progress_hook.work_if_readable()
        if missing and self.ranks_missing is not None:
            self.ranks_missing(missing)
        error = self._failure(ranks)
        if error is not None:
            raise error
        if missing and time.monotonic() >= deadline and self._key not in self._hub.aborted:
            raise DeadlineError(f"rank(s) {ranks} did not take their part in time", ranks=ranks)
