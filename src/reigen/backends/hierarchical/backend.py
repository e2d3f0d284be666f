"""The backend of ranks on several machines: shared memory inside each machine, a network between them.

Every operation has up to three steps (`backends.hierarchical.cross_groups` tells what a lane is,
`backends.hierarchical.intra_host` what a machine's ranks do):

a. inside the machine: what lane c carries comes to the rank of lane c, reduced if it is a reduction;
b. between machines: lane c does the operation on its slice, among one rank of each machine;
c. inside the machine: the result comes to all ranks.

So of a tensor of S bytes on H machines each machine sends 2 (H-1)/H S for an allreduce if the network's own algorithm
does, and as little as can be for the others, too, whatever the number of ranks is. Registered memory is reduced where
it lies, and (c) is a copy to the other ranks' copies. alltoall knows no lanes: what goes to another machine goes from
rank to rank, through one more backend of the network that all ranks join when it is first used.

Sums: inside a machine in the order of its ranks, then in the order of machines if the network adds in order. Bits
depend on the layout (who is on which machine) and on nothing else then: not on sizes, fusion or the number of lanes.
Where only the first machine has several ranks, that is rank order (`CrossGroups.adds_in_rank_order`).

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

from reigen.backends.base import (
    Array,
    Backend,
    BackendCapabilities,
    HostNetwork,
    MemoryRegion,
    MissingRanksCallback,
    PhaseCallback,
    ProgressHook,
    ReduceBuffer,
)
from reigen.backends.buffer_list import BufferList
from reigen.backends.hierarchical.cross_groups import CrossGroups, two_stage_reduction
from reigen.backends.hierarchical.inter_host import GRACE_SECONDS, InterHost
from reigen.backends.hierarchical.intra_host import IntraHost
from reigen.backends.null import NullBackend
from reigen.backends.shm.backend import ShmBackend
from reigen.errors import CollectiveError, SharedMemoryError
from reigen.kernels.reduce import Reduction
from reigen.types import DTYPES, ReduceOp

#: Scratch of a rank for what cannot be done in the caller's arrays.
CHUNK_BYTES = 1 << 25

_NO_RANK = np.iinfo(np.int64).max
_LINE = 64


def compose_backend(
    groups: Sequence[Sequence[int]],
    rank: int,
    local: ShmBackend | NullBackend,
    network: HostNetwork,
    ranks: Sequence[int],
    deadline: float,
    chunk_bytes: int = CHUNK_BYTES,
) -> Backend:
    """The backend of ranks that may be on several machines. Collective among them.

    Args:
        groups: the backend's ranks by machine, numbered from 0; in any order, of any sizes.
        rank: this rank.
        local: the backend of this rank's group, in the order of ranks. The result takes it over.
        network: between machines.
        ranks: for each rank of the backend its number in the job, ascending.
        deadline: for the connections between machines.
        chunk_bytes: about how much scratch a rank may use.

    Returns:
        ``local`` where all ranks are on one machine, a backend of the network alone where no two are.

    Raises:
        PeerLostError, DeadlineError, CollectiveError: as told in `reigen.backends.base`; ``local`` is closed.
    """
    lanes = CrossGroups.of(groups)
    if len(lanes.machines) == 1:
        return local
    if len(lanes.machines) == lanes.size:
        local.close()
        return network.among(ranks, deadline)
    backend = HierarchicalBackend(lanes, rank, local, network, ranks, chunk_bytes)
    try:
        backend.connect(deadline)
    except BaseException:
        backend.close()
        raise
    return backend


class HierarchicalBackend:
    """`reigen.backends.base.Backend` of several machines, some of which have several ranks. Made by `compose_backend`.

    Args:
        lanes: who is where.
        rank: this rank.
        local: the backend of this machine's ranks.
        network: between machines.
        ranks: for each rank of the backend its number in the job.
        chunk_bytes: about how much scratch this rank may use.
    """

    name = "hierarchical"

    def __init__(
        self,
        lanes: CrossGroups,
        rank: int,
        local: ShmBackend | NullBackend,
        network: HostNetwork,
        ranks: Sequence[int],
        chunk_bytes: int,
    ) -> None:
        self.rank, self.size = rank, lanes.size
        self.capabilities = BackendCapabilities(registered_memory=True, ordered_sums=False, abortable=False)
        self._lanes, self._network, self._ranks = lanes, network, tuple(ranks)
        self._chunk_bytes = chunk_bytes
        #: the ranks of this machine
        self._own = lanes.machines[lanes.host_of(rank)]
        self._local = IntraHost(local)
        self._inter_host = InterHost(lanes, rank, self._local, chunk_bytes)
        #: backends of the network that this rank has joined: of its lane, if it has one, and of all ranks
        self._joined: list[Backend] = []
        self._flat: Backend | None = None
        #: registered memory: where it begins here, and the local backend's region
        self._regions: dict[int, MemoryRegion] = {}
        self._next_offset = 0
        self._phase_ended: PhaseCallback | None = None
        self._meanwhile: ProgressHook | None = None
        self.lacking: MissingRanksCallback | None = None
        local.lacking = self._translated(self._own)

    def connect(self, deadline: float) -> None:
        """Join this rank's lane, and learn what the network can do. Collective; once, before anything else."""
        with self._telling():
            if self._inter_host.index is not None:
                self._inter_host.lane = self._join(self._lanes.lanes[self._inter_host.index], deadline)
            ordered, abortable = self._inter_host.learn(deadline + GRACE_SECONDS)
        self.capabilities = BackendCapabilities(
            registered_memory=True, ordered_sums=ordered and self._lanes.adds_in_rank_order, abortable=abortable
        )

    # -- collectives --------------------------------------------------------------------------------------------------

    def allreduce(self, buffers: Sequence[ReduceBuffer], reduction: Reduction, deadline: float) -> None:
        """See `Backend.allreduce`."""
        stages = two_stage_reduction(reduction)
        with self._telling():
            if buffers and buffers[0].offset >= 0:
                each = [self._copies(buffer, reduction.dtype.storage) for buffer in buffers]
                copies = [BufferList([own[rank] for own in each]) for rank in range(self._local.size)]
                self._inter_host.allreduce_registered(copies, stages, deadline)
            else:
                source, target = BufferList([b.source for b in buffers]), BufferList([b.target for b in buffers])
                self._inter_host.allreduce(source, target, stages, deadline)

    def reduce_to_owners(
        self, buffer: ReduceBuffer, counts: Sequence[int], reduction: Reduction, deadline: float
    ) -> None:
        """See `Backend.reduce_to_owners`. What a lane carries stays with the rank that carries it."""
        with self._telling():
            copies = [BufferList([copy]) for copy in self._copies(buffer, reduction.dtype.storage)]
            self._inter_host.reduce_to_owners(copies, counts, two_stage_reduction(reduction), deadline)

    def reduce_scatter(
        self, source: Array, counts: Sequence[int], target: Array, reduction: Reduction, deadline: float
    ) -> None:
        """See `Backend.reduce_scatter`."""
        with self._telling():
            self._inter_host.reduce_scatter(source, counts, target, two_stage_reduction(reduction), deadline)

    def allgather(self, source: Array, counts: Sequence[int], target: Array, deadline: float) -> None:
        """See `Backend.allgather`."""
        with self._telling():
            self._inter_host.allgather(source, counts, target, deadline)

    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        """See `Backend.broadcast`."""
        with self._telling():
            self._inter_host.broadcast(source, target, root, deadline)

    def barrier(self, deadline: float) -> None:
        """See `Backend.barrier`."""
        with self._telling():
            self._inter_host.barrier(deadline)

    def alltoall(self, source: Array, counts: Sequence[Sequence[int]], target: Array, deadline: float) -> None:
        """See `Backend.alltoall`. To ranks of this machine in its memory, to others straight over the network."""
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
                    _split_array(source, sent + begin, now[self.rank]),
                    _split_array(target, received + begin, now[:, self.rank]),
                )
                if here.any():
                    _alltoall_pieces(
                        self._local.backend,
                        _select_arrays(out, self._own),
                        here,
                        _select_arrays(into, self._own),
                        deadline,
                    )
                if self._flat is not None and away.any():
                    _alltoall_pieces(
                        self._flat,
                        _select_arrays(out, others),
                        away,
                        _select_arrays(into, others),
                        deadline + GRACE_SECONDS,
                    )

    # -- registered memory --------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, deadline: float) -> MemoryRegion:
        """See `Backend.allocate`."""
        return self._allocated(self._local.backend.allocate, nbytes, deadline)

    def allocate_shared(self, nbytes: int, deadline: float) -> MemoryRegion:
        """See `Backend.allocate_shared`."""
        return self._allocated(self._local.backend.allocate_shared, nbytes, deadline)

    def _allocated(self, allocate: Callable[[int, float], MemoryRegion], nbytes: int, deadline: float) -> MemoryRegion:
        region, failure = None, None
        with self._telling():
            try:
                region = allocate(nbytes, deadline)
            except SharedMemoryError as error:
                failure = error
            lost = self._lowest_that_failed(failure, deadline)
            if lost is not None:
                if region is not None:
                    self._local.backend.undo(region)
                raise failure or _shared_memory_error(lost)
        assert region is not None
        offset = self._next_offset
        self._next_offset += -(-max(1, nbytes) // _LINE) * _LINE
        self._regions[offset] = region
        return MemoryRegion(offset, nbytes, region.array, self._inter_host.owned(region.owned))

    def free(self, offset: int) -> None:
        """See `Backend.free`."""
        self._local.backend.free(self._regions.pop(offset).offset)

    def _copies(self, buffer: ReduceBuffer, storage: np.dtype[np.generic]) -> list[Array]:
        nbytes = buffer.target.nbytes
        for start, region in self._regions.items():
            if start <= buffer.offset and buffer.offset + nbytes <= start + region.nbytes:
                return self._local.copies(region, buffer.offset - start, nbytes, storage)
        raise AssertionError(f"no registered memory at offset {buffer.offset}, {nbytes} bytes")

    def _lowest_that_failed(self, failure: SharedMemoryError | None, deadline: float) -> int | None:
        """The lowest rank of the job, if any, that has a failure."""
        number = np.array([_NO_RANK if failure is None else self._ranks[self.rank]], np.int64)
        self.allreduce([ReduceBuffer(number, number)], Reduction(DTYPES["int64"], ReduceOp.MIN, self.size), deadline)
        return None if number[0] == _NO_RANK else int(number[0])

    # -- some of the ranks --------------------------------------------------------------------------------------------

    def split(self, ranks: Sequence[int], deadline: float) -> Backend | None:
        """See `Backend.split`."""
        here = [index for index, rank in enumerate(self._own) if rank in ranks]
        part, failure = None, None
        with self._telling():
            try:
                part = self._local.backend.split(here, deadline) if here else None
            except SharedMemoryError as error:
                failure = error
            lost = self._lowest_that_failed(failure, deadline)
            if lost is not None:
                if part is not None:
                    part.close()
                raise failure or _shared_memory_error(lost)
            if part is None:
                return None
            numbers = [self._ranks[rank] for rank in ranks]
            groups = self._lanes.among(ranks)
            member = list(ranks).index(self.rank)
            return compose_backend(groups, member, part, self._network, numbers, deadline, self._chunk_bytes)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def abort(self, error: CollectiveError) -> None:
        """See `Backend.abort`."""
        self._local.backend.abort(error)
        for backend in self._joined:
            backend.abort(error)

    def close(self) -> None:
        """See `Backend.close`."""
        for backend in (*self._joined, self._local.backend):
            backend.close()
            backend.lacking = None  # it was this backend's
        self._joined.clear()
        self._regions.clear()

    # -- who is told --------------------------------------------------------------------------------------------------

    @property
    def progress_hook(self) -> ProgressHook | None:
        """See `Backend`."""
        return self._meanwhile

    @progress_hook.setter
    def progress_hook(self, what: ProgressHook | None) -> None:
        self._meanwhile = what
        for backend in (self._local.backend, *self._joined):
            backend.progress_hook = what

    @property
    def phase_ended(self) -> PhaseCallback | None:
        """See `Backend`. The phases are those of the backends that this one is made of."""
        return self._phase_ended

    @phase_ended.setter
    def phase_ended(self, listener: PhaseCallback | None) -> None:
        self._phase_ended = listener
        for backend in (self._local.backend, *self._joined):
            backend.phase_ended = listener

    def _translated(self, members: Sequence[int]) -> MissingRanksCallback:
        """Hands on who is lacking in a backend of some of the ranks."""

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

    def _join(self, members: Sequence[int], deadline: float) -> Backend:
        """A backend of the network among some of the ranks."""
        backend = self._network.among([self._ranks[member] for member in members], deadline)
        self._joined.append(backend)
        backend.lacking = self._translated(members)
        backend.phase_ended, backend.progress_hook = self._phase_ended, self._meanwhile
        return backend


def _split_array(array: Array, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> list[Array]:
    return [array[start : start + count] for start, count in zip(starts.tolist(), counts.tolist(), strict=True)]


def _select_arrays(arrays: Sequence[Array], indices: Sequence[int]) -> BufferList:
    return BufferList([arrays[index] for index in indices])


def _alltoall_pieces(
    backend: Backend, sent: BufferList, counts: NDArray[np.int64], received: BufferList, deadline: float
) -> None:
    """alltoall of arrays that lie in pieces."""
    outgoing = sent.joined()
    incoming = np.empty(received.size, outgoing.dtype)
    backend.alltoall(outgoing, counts.tolist(), incoming, deadline)
    received.write(0, incoming)


def _shared_memory_error(rank: int) -> SharedMemoryError:
    return SharedMemoryError(f"not enough shared memory on the host of rank {rank}, which says how much", ranks=(rank,))
