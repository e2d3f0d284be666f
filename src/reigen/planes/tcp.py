"""The data plane of ranks that are connected by TCP, each of them on its own: nothing but connections is shared.

Connections lead from rank to rank (`cluster.mesh`), carry raw bytes (`wire.link`) and are driven by one event loop
(`planes.exchange`). All planes of a `TcpNetwork` share them: as no two ranks use two planes in different orders, the
messages between two ranks have one order, too.

Reductions have an algorithm (`planes.tcp_choice`, `planes.tcp_reduce`); in the other operations what one rank has for
another goes there at once, but for a large broadcast, which goes from rank to rank in a chain, chunk by chunk, and a
small one, which goes along a tree.

Registered memory is ordinary memory of this rank: it is sent from where it lies and reduced in place.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from reigen.cluster.mesh import Mesh
from reigen.cluster.told import listed
from reigen.errors import CollectiveError, SharedMemoryError
from reigen.kernels.reduce import Reducer, Reduction
from reigen.planes.base import Array, Buffer, Capabilities, Lacking, Meanwhile, PhaseEnded, Region
from reigen.planes.exchange import Exchange
from reigen.planes.faults import Failure
from reigen.planes.null import NullPlane
from reigen.planes.strung import Strung
from reigen.planes.tcp_choice import Algorithm, adds_in_order, choose, route, rows_between, rows_of, stripes
from reigen.planes.tcp_reduce import Direct, Everything, Ring, Team

_ALIGNMENT = 64
#: Up to so many ranks all connections are made with the plane; beyond, each when it is first needed.
_CONNECTED_RANKS = 32
#: Up to so many ranks everybody tells everybody that it has come to a barrier: one hop.
_ACQUAINTED_RANKS = 8
_NOTHING = np.empty(0, np.uint8)


class TcpNetwork:
    """`reigen.planes.base.Network` over TCP.

    Args:
        mesh: where connections come from. It stays the caller's.
        failure: what the job knows of ranks that others wait for.
        algorithm: how to reduce, or ``auto``; see `reigen.planes.tcp_choice`.
        num_sockets: how many connections to make between two ranks; between two of a machine as many for each
            direction. All ranks must have the same options.
        hosts: the name of every rank's host, for messages.
    """

    name = "tcp"

    def __init__(
        self,
        mesh: Mesh,
        *,
        failure: Failure,
        algorithm: str = "auto",
        num_sockets: int = 1,
        hosts: Sequence[str] = (),
    ) -> None:
        self._exchange = Exchange(mesh, failure, num_sockets, dict(enumerate(hosts)))
        self._algorithm, self._num_sockets = algorithm, num_sockets

    def among(self, ranks: Sequence[int], deadline: float) -> TcpPlane | NullPlane:
        """See `Network.among`."""
        if len(ranks) == 1:
            return NullPlane()
        plane = TcpPlane(self._exchange, ranks, self._algorithm, self._num_sockets)
        if len(ranks) <= _CONNECTED_RANKS:
            plane.connect(deadline)
        return plane

    def close(self) -> None:
        """See `Network.close`."""
        self._exchange.close()


class TcpPlane:
    """`reigen.planes.base.DataPlane` over the connections of a `TcpNetwork`, which makes it."""

    name = "tcp"

    def __init__(self, exchange: Exchange, ranks: Sequence[int], algorithm: str, num_sockets: int) -> None:
        self.rank, self.size = tuple(ranks).index(exchange.rank), len(ranks)
        self.phase_ended: PhaseEnded | None = None
        self.lacking: Lacking | None = None
        self.meanwhile: Meanwhile | None = None
        self.capabilities = Capabilities(
            registered_memory=True, ordered_sums=adds_in_order(self.size, algorithm), abortable=True
        )
        self._exchange, self._algorithm, self._num_sockets = exchange, algorithm, num_sockets
        self._team = Team(exchange, tuple(ranks), self.rank)
        self._members = {rank: member for member, rank in enumerate(ranks)}
        self._others = frozenset(ranks) - {exchange.rank}
        self._next_offset = 0
        #: of the last reduction: often the next one is alike
        self._reducer: Reducer | None = None

    def connect(self, deadline: float) -> None:
        """Connect to all. Collective; errors are those of an operation."""
        with self._operation(deadline, self._team.others):
            pass

    # -- reductions ---------------------------------------------------------------------------------------------------

    def allreduce(self, buffers: Sequence[Buffer], reduction: Reduction, deadline: float) -> None:
        """See `DataPlane.allreduce`."""
        source, target = Strung([b.source for b in buffers]), Strung([b.target for b in buffers])
        if not source.size:
            return
        algorithm, _ = choose(source.size * reduction.dtype.itemsize, self.size, self._algorithm)
        others = self._team.others
        needed = (others[0], others[-1]) if algorithm == "ring" else others
        with self._operation(deadline, needed) as exchange:
            reducer, itemsize = self._reducer_of(reduction), reduction.dtype.itemsize
            work: Everything | Direct | Ring
            if algorithm == "direct":
                work = Direct(self._team, source, target, reducer, rows_of(source.size, itemsize, self.size))
            else:
                work = _WORK[algorithm](self._team, source, target, reducer)
            work.start()
            exchange.run()
        self._ended("TCP_ALLREDUCE")

    def reduce_to_owners(self, buffer: Buffer, counts: Sequence[int], reduction: Reduction, deadline: float) -> None:
        """See `DataPlane.reduce_to_owners`. Every rank is on its own, and owns all."""
        self.allreduce([buffer], reduction, deadline)

    def reducescatter(
        self, source: Array, counts: Sequence[int], target: Array, reduction: Reduction, deadline: float
    ) -> None:
        """See `DataPlane.reducescatter`."""
        spans = list(itertools.pairwise(itertools.accumulate(counts, initial=0)))
        rows, origin = rows_between(spans, source.itemsize), spans[self.rank][0]
        with self._operation(deadline, self._team.others) as exchange:
            work = Direct(
                self._team,
                Strung([source]),
                Strung([target]),
                self._reducer_of(reduction),
                rows,
                origin,
                is_shared=False,
            )
            work.start()
            exchange.run()
        self._ended("TCP_REDUCESCATTER")

    def _reducer_of(self, reduction: Reduction) -> Reducer:
        if self._reducer is None or self._reducer.reduction is not reduction:
            self._reducer = Reducer(reduction)
        return self._reducer

    # -- copying ------------------------------------------------------------------------------------------------------

    def allgather(self, source: Array, counts: Sequence[int], target: Array, deadline: float) -> None:
        """See `DataPlane.allgather`."""
        starts = list(itertools.accumulate(counts, initial=0))
        with self._operation(deadline, self._team.others) as exchange:
            for member in self._team.others:
                self._send(member, source)
            for member in self._team.others:
                self._receive(member, target[starts[member] : starts[member + 1]])
            exchange.run()
        target[starts[self.rank] : starts[self.rank + 1]] = source
        self._ended("TCP_ALLGATHER")

    def alltoall(self, source: Array, counts: Sequence[Sequence[int]], target: Array, deadline: float) -> None:
        """See `DataPlane.alltoall`."""
        sent = list(itertools.accumulate(counts[self.rank], initial=0))
        received = list(itertools.accumulate((row[self.rank] for row in counts), initial=0))
        with self._operation(deadline, self._team.others) as exchange:
            for member in self._team.others:
                self._send(member, source[sent[member] : sent[member + 1]])
            for member in self._team.others:
                self._receive(member, target[received[member] : received[member + 1]])
            exchange.run()
        own = source[sent[self.rank] : sent[self.rank + 1]]
        target[received[self.rank] : received[self.rank + 1]] = own
        self._ended("TCP_ALLTOALL")

    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        """See `DataPlane.broadcast`."""
        data = target if source is None else source
        way = route(data.size, data.itemsize, self.size, self.rank, root)
        before = () if way.before is None else (way.before,)
        with self._operation(deadline, (*before, *way.behind)) as exchange:
            for begin, end in way.chunks:
                piece = data[begin:end]
                if way.before is None:
                    self._pass_on(piece, way.behind)
                else:
                    self._team.receive(way.before, piece, partial(self._pass_on, piece, way.behind))
            exchange.run()
        if source is not None and source is not target:
            target[:] = source
        self._ended("TCP_BROADCAST")

    def _pass_on(self, piece: Array, members: Sequence[int]) -> None:
        for member in members:
            self._team.send(member, piece)

    def barrier(self, deadline: float) -> None:
        """See `DataPlane.barrier`. Among many ranks by dissemination (Hensgen, Finkel and Manber, 1988)."""
        if self.size <= _ACQUAINTED_RANKS:
            with self._operation(deadline, self._team.others) as exchange:
                for member in self._team.others:
                    self._team.send(member, _NOTHING)
                    self._team.receive(member, _NOTHING)
                exchange.run()
        else:
            steps = [1 << k for k in range((self.size - 1).bit_length())]
            members = {(self.rank + step) % self.size for step in (*steps, *(-step for step in steps))}
            with self._operation(deadline, members) as exchange:
                self._take_round(1)
                exchange.run()
        self._ended("TCP_BARRIER")

    def _take_round(self, step: int) -> None:
        """One more of a barrier's rounds: tell a rank ``step`` further on, and hear of one that far behind."""
        if step < self.size:
            self._team.send((self.rank + step) % self.size, _NOTHING)
            self._team.receive((self.rank - step) % self.size, _NOTHING, partial(self._take_round, 2 * step))

    def _send(self, member: int, data: Array) -> None:
        for begin, end in stripes(data.size, data.itemsize, self._num_sockets):
            self._team.send(member, data[begin:end])

    def _receive(self, member: int, data: Array) -> None:
        for begin, end in stripes(data.size, data.itemsize, self._num_sockets):
            self._team.receive(member, data[begin:end])

    # -- registered memory and some of the ranks ----------------------------------------------------------------------

    def allocate(self, nbytes: int, deadline: float) -> Region:
        """See `DataPlane.allocate`."""
        raw: Array | None = None
        with contextlib.suppress(MemoryError):
            raw = np.zeros(nbytes + _ALIGNMENT, np.uint8)
        everybody = np.empty(self.size, np.uint8)
        self.allgather(np.array([raw is None], np.uint8), [1] * self.size, everybody, deadline)
        if raw is None or everybody.any():
            failed = [self._team.ranks[member] for member in np.flatnonzero(everybody)]
            raise SharedMemoryError.for_request(nbytes, None, f"registered memory on rank(s) {listed(failed)}")
        begin = -raw.ctypes.data % _ALIGNMENT
        offset = self._next_offset
        self._next_offset += nbytes + _ALIGNMENT
        array = raw[begin : begin + nbytes]
        return Region(offset, nbytes, array, (array,))

    def allocate_shared(self, nbytes: int, deadline: float) -> Region:
        """See `DataPlane.allocate_shared`. Every rank is on its own."""
        return self.allocate(nbytes, deadline)

    def free(self, offset: int) -> None:
        """Nothing to do: the memory goes with its last view."""

    def split(self, ranks: Sequence[int], deadline: float) -> TcpPlane | NullPlane | None:
        """See `DataPlane.split`. The new plane uses the connections that there are."""
        if self.rank not in ranks:
            return None
        if len(ranks) == 1:
            return NullPlane()
        members = [self._team.ranks[rank] for rank in ranks]
        return TcpPlane(self._exchange, members, self._algorithm, self._num_sockets)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def abort(self, error: CollectiveError) -> None:
        """See `DataPlane.abort`."""
        self._exchange.abort(error)

    def close(self) -> None:
        """The connections are the network's; scratch goes."""
        self._team.scratch.clear()
        self._reducer = None

    def _operation(self, deadline: float, members: Iterable[int]) -> Exchange:
        """For a ``with`` statement: an operation for which this rank needs connections to these members."""
        lacking = None if self.lacking is None else self._lacks
        ranks = self._others if members is self._team.others else {self._team.ranks[member] for member in members}
        return self._exchange.operation(deadline, lacking, self.meanwhile, ranks)

    def _lacks(self, ranks: Sequence[int]) -> None:
        if self.lacking is not None:
            self.lacking([self._members[rank] for rank in ranks if rank in self._members])

    def _ended(self, phase: str) -> None:
        if self.phase_ended is not None:
            self.phase_ended(phase)


_WORK: dict[Algorithm, type[Everything | Ring]] = {"latency": Everything, "ring": Ring}
