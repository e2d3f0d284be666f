"""Backend of ranks that are connected by TCP, each of them on its own: only connections are shared.

Connections lead from rank to rank (`cluster.connection_pool`), carry raw bytes (`net.bulk_connection`) and are driven
by one event loop (`backends.tcp.event_loop`). All backends of a `TcpNetwork` share them: as no two ranks use two
backends in different orders, the messages between two ranks have one order, too.

Reductions have an algorithm (`backends.tcp.algorithm`, `backends.tcp.allreduce`); in the other operations data of one
rank for another go there at once, but for a large broadcast, which goes from rank to rank in a chain, chunk by chunk,
and a small one, which goes along a tree.

Registered memory is ordinary memory of this rank: it is sent from where it lies and reduced in place.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from reigen.backends.base import (
    Array,
    BackendCapabilities,
    FailureCheck,
    FlatBackend,
    MemoryRegion,
    ReduceBuffer,
)
from reigen.backends.buffer_list import BufferList, split_array
from reigen.backends.null import NullBackend
from reigen.backends.tcp.algorithm import (
    adds_in_order,
    choose_algorithm,
    make_owner_rows,
    make_rows,
    plan_broadcast,
    stripe_messages,
)
from reigen.backends.tcp.allreduce import DirectAllreduce, LatencyAllreduce, RingAllreduce, TcpGroup
from reigen.backends.tcp.event_loop import TcpEventLoop
from reigen.cluster.connection_pool import ConnectionPool
from reigen.errors import CollectiveError, SharedMemoryError, format_ranks
from reigen.kernels.reduce import BlockReducer, Reduction

#: Up to so many ranks all connections are made with the backend; beyond, each when it is first needed.
_CONNECTED_RANKS = 32
#: Up to so many ranks each sends all others a message at a barrier: one hop.
_DIRECT_BARRIER_RANKS = 8
_EMPTY = np.empty(0, np.uint8)


@dataclass(slots=True)
class TcpOptions:
    """Parameters of a network and all its backends; they change between two operations, on all ranks alike.

    Attributes:
        algorithm: of reductions.
        num_sockets: connections between two ranks that are used.
    """

    algorithm: str
    num_sockets: int


class TcpNetwork:
    """`reigen.backends.base.HostNetwork` over TCP.

    Args:
        mesh: pool of connections. It stays the caller's.
        failure: of ranks that others wait for.
        algorithm: of reductions, or ``auto``; see `reigen.backends.tcp.algorithm`.
        num_sockets: number of connections between two ranks; between two of a host as many for each direction. All
            ranks must have the same options.
        hosts: the name of every rank's host, for messages.
    """

    name = "tcp"

    def __init__(
        self,
        mesh: ConnectionPool,
        *,
        failure: FailureCheck,
        algorithm: str = "auto",
        num_sockets: int = 1,
        hosts: Sequence[str] = (),
    ) -> None:
        self._loop = TcpEventLoop(mesh, failure, num_sockets, dict(enumerate(hosts)))
        self._options = TcpOptions(algorithm, num_sockets)

    @property
    def num_sent_bytes(self) -> int:
        """Bytes that were sent, ever, by all backends of this network."""
        return self._loop.num_sent_bytes

    def among(self, ranks: Sequence[int], deadline: float) -> TcpBackend | NullBackend:
        if len(ranks) == 1:
            return NullBackend()
        backend = TcpBackend(self._loop, ranks, self._options)
        if len(ranks) <= _CONNECTED_RANKS:
            backend.connect(deadline)
        return backend

    def tune(self, algorithm: str, num_sockets: int) -> None:
        """Implement `reigen.backends.base.TunableNetwork`: for all backends of this network."""
        self._options.algorithm, self._options.num_sockets = algorithm, num_sockets
        self._loop.use_sockets(num_sockets)

    def close(self) -> None:
        self._loop.close()


class TcpBackend(FlatBackend):
    """`reigen.backends.base.Backend` over the connections of a `TcpNetwork`, which makes it."""

    name = "tcp"

    def __init__(self, loop: TcpEventLoop, ranks: Sequence[int], options: TcpOptions) -> None:
        self.rank, self.size = tuple(ranks).index(loop.rank), len(ranks)
        self.capabilities = BackendCapabilities(
            registered_memory=True, ordered_sums=adds_in_order(self.size, options.algorithm), abortable=True
        )
        self._loop, self._options = loop, options
        self._group = TcpGroup(loop, tuple(ranks), self.rank)
        self._members = {rank: member for member, rank in enumerate(ranks)}
        self._others = frozenset(ranks) - {loop.rank}
        #: of the last reduction: often the next one is alike
        self._reducer: BlockReducer | None = None

    def connect(self, deadline: float) -> None:
        """Connect to all. Collective; errors are those of an operation."""
        with self._operation(deadline, self._group.others):
            pass

    # -- reductions ---------------------------------------------------------------------------------------------------

    def allreduce(self, buffers: Sequence[ReduceBuffer], reduction: Reduction, deadline: float) -> None:
        source, target = BufferList([b.source for b in buffers]), BufferList([b.target for b in buffers])
        if not source.size:
            return
        algorithm, _ = choose_algorithm(source.size * reduction.dtype.itemsize, self.size, self._options.algorithm)
        others = self._group.others
        needed = (others[0], others[-1]) if algorithm == "ring" else others
        with self._operation(deadline, needed) as loop:
            reducer, itemsize = self._reducer_of(reduction), reduction.dtype.itemsize
            work: LatencyAllreduce | DirectAllreduce | RingAllreduce
            if algorithm == "direct":
                work = DirectAllreduce(
                    self._group, source, target, reducer, make_rows(source.size, itemsize, self.size)
                )
            elif algorithm == "ring":
                work = RingAllreduce(self._group, source, target, reducer)
            else:
                work = LatencyAllreduce(self._group, source, target, reducer)
            work.start()
            loop.run()
        self._ended("TCP_ALLREDUCE")

    def reduce_scatter(
        self, source: Array, counts: Sequence[int], target: Array, reduction: Reduction, deadline: float
    ) -> None:
        spans = list(itertools.pairwise(itertools.accumulate(counts, initial=0)))
        rows, origin = make_owner_rows(spans, source.itemsize), spans[self.rank][0]
        with self._operation(deadline, self._group.others) as loop:
            buffers, reducer = (BufferList([source]), BufferList([target])), self._reducer_of(reduction)
            DirectAllreduce(self._group, *buffers, reducer, rows, origin, is_shared=False).start()
            loop.run()
        self._ended("TCP_REDUCESCATTER")

    def _reducer_of(self, reduction: Reduction) -> BlockReducer:
        if self._reducer is None or self._reducer.reduction is not reduction:
            self._reducer = BlockReducer(reduction)
        return self._reducer

    # -- copying ------------------------------------------------------------------------------------------------------

    def allgather(self, source: Array, counts: Sequence[int], target: Array, deadline: float) -> None:
        self._exchange_parts([source] * self.size, split_array(target, counts), deadline)
        self._ended("TCP_ALLGATHER")

    def alltoall(self, source: Array, counts: Sequence[Sequence[int]], target: Array, deadline: float) -> None:
        received = split_array(target, [row[self.rank] for row in counts])
        self._exchange_parts(split_array(source, counts[self.rank]), received, deadline)
        self._ended("TCP_ALLTOALL")

    def _exchange_parts(self, sent: Sequence[Array], received: Sequence[Array], deadline: float) -> None:
        """Send each rank its part, and receive one from each; this rank's own is copied."""
        with self._operation(deadline, self._group.others) as loop:
            for member in self._group.others:
                for begin, end in self._stripes(sent[member]):
                    self._group.send(member, sent[member][begin:end])
            for member in self._group.others:
                for begin, end in self._stripes(received[member]):
                    self._group.receive(member, received[member][begin:end])
            loop.run()
        received[self.rank][:] = sent[self.rank]

    def _stripes(self, data: Array) -> list[tuple[int, int]]:
        return stripe_messages(data.size, data.itemsize, self._options.num_sockets)

    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        data = target if source is None else source
        route = plan_broadcast(data.size, data.itemsize, self.size, self.rank, root)
        parent = () if route.parent is None else (route.parent,)
        with self._operation(deadline, (*parent, *route.children)) as loop:
            for begin, end in route.chunks:
                piece = data[begin:end]
                if route.parent is None:
                    self._pass_on(piece, route.children)
                else:
                    self._group.receive(route.parent, piece, partial(self._pass_on, piece, route.children))
            loop.run()
        if source is not None and source is not target:
            target[:] = source
        self._ended("TCP_BROADCAST")

    def _pass_on(self, piece: Array, members: Sequence[int]) -> None:
        for member in members:
            self._group.send(member, piece)

    def barrier(self, deadline: float) -> None:
        """Implement `Backend.barrier`, among many ranks by dissemination (Hensgen, Finkel and Manber, 1988)."""
        if self.size <= _DIRECT_BARRIER_RANKS:
            with self._operation(deadline, self._group.others) as loop:
                for member in self._group.others:
                    self._group.send(member, _EMPTY)
                    self._group.receive(member, _EMPTY)
                loop.run()
        else:
            steps = [1 << k for k in range((self.size - 1).bit_length())]
            members = {(self.rank + step) % self.size for step in (*steps, *(-step for step in steps))}
            with self._operation(deadline, members) as loop:
                self._take_round(1)
                loop.run()
        self._ended("TCP_BARRIER")

    def _take_round(self, step: int) -> None:
        """Do one of a barrier's rounds: signal a rank ``step`` further on, and wait for one that far behind."""
        if step < self.size:
            self._group.send((self.rank + step) % self.size, _EMPTY)
            self._group.receive((self.rank - step) % self.size, _EMPTY, partial(self._take_round, 2 * step))

    # -- registered memory and some of the ranks ----------------------------------------------------------------------

    def allocate(self, nbytes: int, deadline: float) -> MemoryRegion:
        """Return ordinary memory, when all ranks have it."""
        region, is_missing = self._ordinary_memory(nbytes), np.empty(self.size, np.uint8)
        self.allgather(np.array([region is None], np.uint8), [1] * self.size, is_missing, deadline)
        if region is None or is_missing.any():
            failed = [self._group.ranks[member] for member in np.flatnonzero(is_missing)]
            raise SharedMemoryError.for_request(nbytes, None, f"registered memory on rank(s) {format_ranks(failed)}")
        return region

    def split(self, ranks: Sequence[int], deadline: float) -> TcpBackend | NullBackend | None:
        """Implement `Backend.split`: the new backend uses the same connections."""
        if self.rank not in ranks:
            return None
        if len(ranks) == 1:
            return NullBackend()
        members = [self._group.ranks[rank] for rank in ranks]
        return TcpBackend(self._loop, members, self._options)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def abort(self, error: CollectiveError) -> None:
        self._loop.abort(error)

    def close(self) -> None:
        """Release scratch; the connections are the network's."""
        self._group.scratch.clear()
        self._reducer = None

    def _operation(self, deadline: float, members: Iterable[int]) -> TcpEventLoop:
        """Begin an operation, in a ``with`` statement, for which this rank needs connections to these members."""
        ranks_missing = None if self.ranks_missing is None else self._report_missing
        ranks = self._others if members is self._group.others else {self._group.ranks[member] for member in members}
        return self._loop.operation(deadline, ranks_missing, self.progress_hook, ranks)

    def _report_missing(self, ranks: Sequence[int]) -> None:
        if self.ranks_missing is not None:
            self.ranks_missing([self._members[rank] for rank in ranks if rank in self._members])

    def _ended(self, phase: str) -> None:
        if self.phase_ended is not None:
            self.phase_ended(phase)
