"""The data plane of ranks on several machines: shared memory inside each machine, a network between them.

Every operation has up to three steps (`planes.lanes` tells what a lane is, `planes.local` what a machine's ranks do):

a. inside the machine: what lane c carries comes to the rank of lane c, reduced if it is a reduction;
b. between machines: lane c does the operation on its slice, among one rank of each machine;
c. inside the machine: the result comes to all ranks.

So of a tensor of S bytes on H machines each machine sends 2 (H-1)/H S for an allreduce if the network's own algorithm
does, and as little as can be for the others, too, whatever the number of ranks is. Registered memory is reduced where
it lies, and (c) is a copy to the other ranks' copies. alltoall knows no lanes: what goes to another machine goes from
rank to rank, through one more plane of the network that all ranks join when it is first used.

Sums: inside a machine in the order of its ranks, then in the order of machines if the network adds in order. Bits
depend on the layout (who is on which machine) and on nothing else then: not on sizes, fusion or the number of lanes.
Where only the first machine has several ranks, that is rank order (`Lanes.adds_in_rank_order`).

Partial sums of float16 and bfloat16 travel as float32: a machine's sum that was rounded to the type would lose what one
host keeps, and could overflow where an average does not. It costs half as many bytes again, not twice as many: only the
way to the owner of a slice is float32, the results come back in the type. MIN and MAX lose nothing and travel as they
are, and so does everything where each machine has one rank.

Waiting: who waits for another machine, or for a rank that does, gets a second more than the deadline for each of these
steps, so that who knows best whom it waits for in vain is the first to tell. Whoever fails tells the others, on this
machine and in its lane. Whoever waits in a lane learns what fails on its own machine from the network's ``failure``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from reigen.errors import CollectiveError, SharedMemoryError
from reigen.kernels.reduce import Reduction
from reigen.planes.base import (
    Array,
    Buffer,
    Capabilities,
    DataPlane,
    Lacking,
    Meanwhile,
    Network,
    PhaseEnded,
    Region,
)
from reigen.planes.crossing import GRACE_SECONDS, Crossing
from reigen.planes.lanes import Lanes, stages_of
from reigen.planes.local import Local
from reigen.planes.null import NullPlane
from reigen.planes.shm import ShmPlane
from reigen.planes.strung import Strung
from reigen.types import DTYPES, ReduceOp

#: Scratch of a rank for what cannot be done in the caller's arrays.
CHUNK_BYTES = 1 << 25

_NO_RANK = np.iinfo(np.int64).max
_LINE = 64


def compose(
    groups: Sequence[Sequence[int]],
    rank: int,
    local: ShmPlane | NullPlane,
    network: Network,
    ranks: Sequence[int],
    deadline: float,
    chunk_bytes: int = CHUNK_BYTES,
) -> DataPlane:
    """The plane of ranks that may be on several machines. Collective among them.

    Args:
        groups: the plane's ranks by machine, numbered from 0; in any order, of any sizes.
        rank: this rank.
        local: the plane of this rank's group, in the order of ranks. The result takes it over.
        network: between machines.
        ranks: for each rank of the plane its number in the job, ascending.
        deadline: for the connections between machines.
        chunk_bytes: about how much scratch a rank may use.

    Returns:
        ``local`` where all ranks are on one machine, a plane of the network alone where no two are.

    Raises:
        PeerLostError, DeadlineError, CollectiveError: as told in `reigen.planes.base`; ``local`` is closed.
    """
    lanes = Lanes.of(groups)
    if len(lanes.machines) == 1:
        return local
    if len(lanes.machines) == lanes.size:
        local.close()
        return network.among(ranks, deadline)
    plane = HierarchicalPlane(lanes, rank, local, network, ranks, chunk_bytes)
    try:
        plane.connect(deadline)
    except BaseException:
        plane.close()
        raise
    return plane


class HierarchicalPlane:
    """`reigen.planes.base.DataPlane` of several machines, some of which have several ranks. Made by `compose`.

    Args:
        lanes: who is where.
        rank: this rank.
        local: the plane of this machine's ranks.
        network: between machines.
        ranks: for each rank of the plane its number in the job.
        chunk_bytes: about how much scratch this rank may use.
    """

    name = "hierarchical"

    def __init__(
        self,
        lanes: Lanes,
        rank: int,
        local: ShmPlane | NullPlane,
        network: Network,
        ranks: Sequence[int],
        chunk_bytes: int,
    ) -> None:
        self.rank, self.size = rank, lanes.size
        self.capabilities = Capabilities(registered_memory=True, ordered_sums=False, abortable=False)
        self._lanes, self._network, self._ranks = lanes, network, tuple(ranks)
        self._chunk_bytes = chunk_bytes
        #: the ranks of this machine
        self._own = lanes.machines[lanes.machine_of(rank)]
        self._local = Local(local)
        self._crossing = Crossing(lanes, rank, self._local, chunk_bytes)
        #: planes of the network that this rank has joined: of its lane, if it has one, and of all ranks
        self._joined: list[DataPlane] = []
        self._flat: DataPlane | None = None
        #: registered memory: where it begins here, and the local plane's region
        self._regions: dict[int, Region] = {}
        self._next_offset = 0
        self._phase_ended: PhaseEnded | None = None
        self._meanwhile: Meanwhile | None = None
        self.lacking: Lacking | None = None
        local.lacking = self._translated(self._own)

    def connect(self, deadline: float) -> None:
        """Join this rank's lane, and learn what the network can do. Collective; once, before anything else."""
        with self._telling():
            if self._crossing.index is not None:
                self._crossing.lane = self._join(self._lanes.lanes[self._crossing.index], deadline)
            ordered, abortable = self._crossing.learn(deadline + GRACE_SECONDS)
        self.capabilities = Capabilities(
            registered_memory=True, ordered_sums=ordered and self._lanes.adds_in_rank_order, abortable=abortable
        )

    # -- collectives --------------------------------------------------------------------------------------------------

    def allreduce(self, buffers: Sequence[Buffer], reduction: Reduction, deadline: float) -> None:
        """See `DataPlane.allreduce`."""
        stages = stages_of(reduction)
        with self._telling():
            if buffers and buffers[0].offset >= 0:
                each = [self._copies(buffer, reduction.dtype.storage) for buffer in buffers]
                copies = [Strung([own[rank] for own in each]) for rank in range(self._local.size)]
                self._crossing.allreduce_registered(copies, stages, deadline)
            else:
                source, target = Strung([b.source for b in buffers]), Strung([b.target for b in buffers])
                self._crossing.allreduce(source, target, stages, deadline)

    def reduce_to_owners(self, buffer: Buffer, counts: Sequence[int], reduction: Reduction, deadline: float) -> None:
        """See `DataPlane.reduce_to_owners`. What a lane carries stays with the rank that carries it."""
        with self._telling():
            copies = [Strung([copy]) for copy in self._copies(buffer, reduction.dtype.storage)]
            self._crossing.reduce_to_owners(copies, counts, stages_of(reduction), deadline)

    def reducescatter(
        self, source: Array, counts: Sequence[int], target: Array, reduction: Reduction, deadline: float
    ) -> None:
        """See `DataPlane.reducescatter`."""
        with self._telling():
            self._crossing.reducescatter(source, counts, target, stages_of(reduction), deadline)

    def allgather(self, source: Array, counts: Sequence[int], target: Array, deadline: float) -> None:
        """See `DataPlane.allgather`."""
        with self._telling():
            self._crossing.allgather(source, counts, target, deadline)

    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        """See `DataPlane.broadcast`."""
        with self._telling():
            self._crossing.broadcast(source, target, root, deadline)

    def barrier(self, deadline: float) -> None:
        """See `DataPlane.barrier`."""
        with self._telling():
            self._crossing.barrier(deadline)

    def alltoall(self, source: Array, counts: Sequence[Sequence[int]], target: Array, deadline: float) -> None:
        """See `DataPlane.alltoall`. To ranks of this machine in its memory, to others straight over the network."""
        table = np.array(counts, np.int64).reshape(self.size, self.size)
        near = np.zeros_like(table, bool)
        for machine in self._lanes.machines:
            near[np.ix_(machine, machine)] = True
        others = [rank for rank in range(self.size) if rank not in self._own]
        sent = np.cumsum(table[self.rank]) - table[self.rank]
        received = np.cumsum(table[:, self.rank]) - table[:, self.rank]
        step = max(1, self._chunk_bytes // target.itemsize // self.size)
        with self._telling():
            if self._flat is None and table[~near].any():
                self._flat = self._join(range(self.size), deadline)
            for begin in range(0, int(table.max()), step):
                now = np.clip(table - begin, 0, step)
                here, away = now[np.ix_(self._own, self._own)], np.where(near, 0, now)
                out, into = (
                    _cuts(source, sent + begin, now[self.rank]),
                    _cuts(target, received + begin, now[:, self.rank]),
                )
                if here.any():
                    _swap(self._local.plane, _picked(out, self._own), here, _picked(into, self._own), deadline)
                if self._flat is not None and away.any():
                    _swap(self._flat, _picked(out, others), away, _picked(into, others), deadline + GRACE_SECONDS)

    # -- registered memory --------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, deadline: float) -> Region:
        """See `DataPlane.allocate`."""
        return self._allocated(self._local.plane.allocate, nbytes, deadline)

    def allocate_shared(self, nbytes: int, deadline: float) -> Region:
        """See `DataPlane.allocate_shared`."""
        return self._allocated(self._local.plane.allocate_shared, nbytes, deadline)

    def _allocated(self, allocate: Callable[[int, float], Region], nbytes: int, deadline: float) -> Region:
        region, failure = None, None
        with self._telling():
            try:
                region = allocate(nbytes, deadline)
            except SharedMemoryError as error:
                failure = error
            lost = self._lowest_that_failed(failure, deadline)
            if lost is not None:
                if region is not None:
                    self._local.plane.undo(region)
                raise failure or _shortage(lost)
        assert region is not None
        offset = self._next_offset
        self._next_offset += -(-max(1, nbytes) // _LINE) * _LINE
        self._regions[offset] = region
        return Region(offset, nbytes, region.array, self._crossing.owned(region.owned))

    def free(self, offset: int) -> None:
        """See `DataPlane.free`."""
        self._local.plane.free(self._regions.pop(offset).offset)

    def _copies(self, buffer: Buffer, storage: np.dtype[np.generic]) -> list[Array]:
        nbytes = buffer.target.nbytes
        for start, region in self._regions.items():
            if start <= buffer.offset and buffer.offset + nbytes <= start + region.nbytes:
                return self._local.copies(region, buffer.offset - start, nbytes, storage)
        raise AssertionError(f"no registered memory at offset {buffer.offset}, {nbytes} bytes")

    def _lowest_that_failed(self, failure: SharedMemoryError | None, deadline: float) -> int | None:
        """The lowest rank of the job, if any, that has a failure."""
        number = np.array([_NO_RANK if failure is None else self._ranks[self.rank]], np.int64)
        self.allreduce([Buffer(number, number)], Reduction(DTYPES["int64"], ReduceOp.MIN, self.size), deadline)
        return None if number[0] == _NO_RANK else int(number[0])

    # -- some of the ranks --------------------------------------------------------------------------------------------

    def split(self, ranks: Sequence[int], deadline: float) -> DataPlane | None:
        """See `DataPlane.split`."""
        here = [index for index, rank in enumerate(self._own) if rank in ranks]
        part, failure = None, None
        with self._telling():
            try:
                part = self._local.plane.split(here, deadline) if here else None
            except SharedMemoryError as error:
                failure = error
            lost = self._lowest_that_failed(failure, deadline)
            if lost is not None:
                if part is not None:
                    part.close()
                raise failure or _shortage(lost)
            if part is None:
                return None
            numbers = [self._ranks[rank] for rank in ranks]
            groups = self._lanes.among(ranks)
            member = list(ranks).index(self.rank)
            return compose(groups, member, part, self._network, numbers, deadline, self._chunk_bytes)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def abort(self, error: CollectiveError) -> None:
        """See `DataPlane.abort`."""
        self._local.plane.abort(error)
        for plane in self._joined:
            plane.abort(error)

    def close(self) -> None:
        """See `DataPlane.close`."""
        for plane in (*self._joined, self._local.plane):
            plane.close()
        self._joined.clear()
        self._regions.clear()

    # -- who is told --------------------------------------------------------------------------------------------------

    @property
    def meanwhile(self) -> Meanwhile | None:
        """See `DataPlane`."""
        return self._meanwhile

    @meanwhile.setter
    def meanwhile(self, what: Meanwhile | None) -> None:
        self._meanwhile = what
        for plane in (self._local.plane, *self._joined):
            plane.meanwhile = what

    @property
    def phase_ended(self) -> PhaseEnded | None:
        """See `DataPlane`. The phases are those of the planes that this one is made of."""
        return self._phase_ended

    @phase_ended.setter
    def phase_ended(self, listener: PhaseEnded | None) -> None:
        self._phase_ended = listener
        for plane in (self._local.plane, *self._joined):
            plane.phase_ended = listener

    def _translated(self, members: Sequence[int]) -> Lacking:
        """Hands on who is lacking in a plane of some of the ranks."""

        def lacking(indices: Sequence[int]) -> None:
            if self.lacking is not None:
                self.lacking([members[index] for index in indices])

        return lacking

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Other machines cannot see what failed here: they are told."""
        try:
            yield
        except SharedMemoryError:
            raise  # all know it, and nothing is broken
        except CollectiveError as error:
            self.abort(error)
            raise

    def _join(self, members: Sequence[int], deadline: float) -> DataPlane:
        """A plane of the network among some of the ranks."""
        plane = self._network.among([self._ranks[member] for member in members], deadline)
        self._joined.append(plane)
        plane.lacking = self._translated(members)
        plane.phase_ended, plane.meanwhile = self._phase_ended, self._meanwhile
        return plane


def _cuts(array: Array, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> list[Array]:
    return [array[start : start + count] for start, count in zip(starts.tolist(), counts.tolist(), strict=True)]


def _picked(arrays: Sequence[Array], indices: Sequence[int]) -> Strung:
    return Strung([arrays[index] for index in indices])


def _swap(plane: DataPlane, sent: Strung, counts: NDArray[np.int64], received: Strung, deadline: float) -> None:
    """alltoall of arrays that lie in pieces."""
    outgoing = sent.joined()
    incoming = np.empty(received.size, outgoing.dtype)
    plane.alltoall(outgoing, counts.tolist(), incoming, deadline)
    received.write(0, incoming)


def _shortage(rank: int) -> SharedMemoryError:
    return SharedMemoryError(f"not enough shared memory on the host of rank {rank}, which says how much", ranks=(rank,))
