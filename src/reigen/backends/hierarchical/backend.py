"""Backend of ranks on several hosts: shared memory inside each host, a network between them.

Every operation has up to three steps (see `backends.hierarchical.cross_groups` for cross groups,
`backends.hierarchical.intra_host` for the ranks of a host):

a. inside the host: the slice of cross group c comes to the rank of that group, reduced if it is a reduction;
b. between hosts: cross group c does the operation on its slice, among one rank of each host;
c. inside the host: the result comes to all ranks.

So of a tensor of S bytes on H hosts each host sends 2 (H-1)/H S for an allreduce if the network's own algorithm does,
and the minimum for the others, too, whatever the number of ranks is. Registered memory is reduced where it lies, and
(c) is a copy to the other ranks' copies. alltoall has no cross groups: data for another host goes from rank to rank,
through one more backend of the network that all ranks join when it is first used.

Sums: inside a host in the order of its ranks, then in the order of hosts if the network adds in order. Bits depend on
the layout (the host of each rank) and on nothing else then: not on sizes, fusion or the number of cross groups. Where
only the first host has several ranks, that is rank order (`CrossGroups.adds_in_rank_order`).

Partial sums of float16 and bfloat16 travel as float32: a host's sum that was rounded to the type would lose bits that
one host keeps, and could overflow where an average does not. It costs half as many bytes again, not twice as many: only
the way to the owner of a slice is float32, the results come back in the type. MIN and MAX lose nothing and travel
unchanged, and so does everything where each host has one rank.

Waiting: a rank that waits for another host, or for a rank that does, gets a second more than the deadline for each of
these steps, so that the rank that knows best which one is missing is the first to report it. A rank that fails reports
it to the others, on this host and in its cross group. A rank that waits in a cross group learns of failures on its own
host from the network's ``failure``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

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
from reigen.backends.hierarchical.inter_host import GRACE_SECONDS, InterHost, reports_failures
from reigen.backends.hierarchical.intra_host import IntraHost
from reigen.backends.null import NullBackend
from reigen.backends.shm.backend import ShmBackend
from reigen.errors import CollectiveError, SharedMemoryError
from reigen.kernels.reduce import Reduction
from reigen.types import DTYPES, ReduceOp

#: Scratch of a rank for operations that cannot be done in the caller's arrays.
CHUNK_BYTES = 1 << 25

_NO_RANK = np.iinfo(np.int64).max
_LINE = 64
_Made = TypeVar("_Made")


def compose_backend(
    groups: Sequence[Sequence[int]],
    rank: int,
    local: ShmBackend | NullBackend,
    network: HostNetwork,
    ranks: Sequence[int],
    deadline: float,
    chunk_bytes: int = CHUNK_BYTES,
) -> Backend:
    """Make the backend of ranks that may be on several hosts. Collective among them.

    Args:
        groups: the backend's ranks by host, numbered from 0; in any order, of any sizes.
        rank: this rank.
        local: the backend of this rank's host, in the order of ranks. The result takes it over.
        network: between hosts.
        ranks: for each rank of the backend its number in the job, ascending.
        deadline: for the connections between hosts.
        chunk_bytes: about how much scratch a rank may use.

    Returns:
        ``local`` where all ranks are on one host, a backend of the network alone where no two are.

    Raises:
        PeerLostError, DeadlineError, CollectiveError: as told in `reigen.backends.base`; ``local`` is closed.
    """
    cross = CrossGroups.of(groups)
    if len(cross.hosts) == 1:
        return local
    if len(cross.hosts) == cross.size:
        local.close()
        return network.among(ranks, deadline)
    backend = HierarchicalBackend(cross, rank, local, network, ranks, chunk_bytes)
    try:
        backend.connect(deadline)
    except BaseException:
        backend.close()
        raise
    return backend


class HierarchicalBackend(InterHost):
    """`reigen.backends.base.Backend` of several hosts, some of which have several ranks. Made by `compose_backend`.

    ``cross`` holds the ranks by host and cross group; the other arguments are those of `compose_backend`.
    """

    name = "hierarchical"

    def __init__(
        self,
        cross: CrossGroups,
        rank: int,
        local: ShmBackend | NullBackend,
        network: HostNetwork,
        ranks: Sequence[int],
        chunk_bytes: int,
    ) -> None:
        super().__init__(cross, rank, IntraHost(local), chunk_bytes)
        self.capabilities = BackendCapabilities(registered_memory=True, ordered_sums=False, abortable=False)
        self._network, self._ranks = network, tuple(ranks)
        #: backends of the network that this rank has joined: of its cross group, if it has one, and of all ranks
        self._joined: list[Backend] = []
        self._flat: Backend | None = None
        #: registered memory: its offset, and the local backend's region
        self._regions: dict[int, MemoryRegion] = {}
        self._next_offset = 0
        self._phase_ended: PhaseCallback | None = None
        self._progress_hook: ProgressHook | None = None
        self.ranks_missing: MissingRanksCallback | None = None
        local.ranks_missing = self._translated(self._own)

    @reports_failures
    def connect(self, deadline: float) -> None:
        """Join this rank's cross group, and learn the network's capabilities. Collective; to be called first."""
        if self._index is not None:
            self._group = self._join(self._cross.groups[self._index], deadline)
        ordered, abortable = self._learn(deadline + GRACE_SECONDS)
        self.capabilities = BackendCapabilities(
            registered_memory=True, ordered_sums=ordered and self._cross.adds_in_rank_order, abortable=abortable
        )

    # -- collectives --------------------------------------------------------------------------------------------------

    @reports_failures
    def allreduce(self, buffers: Sequence[ReduceBuffer], reduction: Reduction, deadline: float) -> None:
        stages = two_stage_reduction(reduction)
        if buffers and buffers[0].offset >= 0:
            each = [self._copies(buffer, reduction.dtype.storage) for buffer in buffers]
            copies = [BufferList([own[rank] for own in each]) for rank in range(self._local.size)]
            self._reduce_registered(copies, None, stages, deadline)
        else:
            source, target = BufferList([b.source for b in buffers]), BufferList([b.target for b in buffers])
            self._allreduce(source, target, stages, deadline)

    @reports_failures
    def reduce_to_owners(
        self, buffer: ReduceBuffer, counts: Sequence[int], reduction: Reduction, deadline: float
    ) -> None:
        """Implement `Backend.reduce_to_owners`: the slice of a cross group stays with its rank."""
        copies = [BufferList([copy]) for copy in self._copies(buffer, reduction.dtype.storage)]
        self._reduce_registered(copies, counts, two_stage_reduction(reduction), deadline)

    @reports_failures
    def alltoall(self, source: Array, counts: Sequence[Sequence[int]], target: Array, deadline: float) -> None:
        """Implement `Backend.alltoall`: in memory to ranks of this host, straight over the network to others."""
        table = np.array(counts, np.int64).reshape(self.size, self.size)
        near = np.zeros_like(table, bool)
        for host in self._cross.hosts:
            near[np.ix_(host, host)] = True
        remote_ranks = [rank for rank in range(self.size) if rank not in self._own]
        sent = np.cumsum(table[self.rank]) - table[self.rank]
        received = np.cumsum(table[:, self.rank]) - table[:, self.rank]
        step = max(1, self._chunk_bytes // target.itemsize // self.size)
        if self._flat is None and table[~near].any():
            self._flat = self._join(range(self.size), deadline)
        for begin in range(0, int(table.max()), step):
            now = np.clip(table - begin, 0, step)
            local, remote = now[np.ix_(self._own, self._own)], np.where(near, 0, now)
            sources = _split_array(source, sent + begin, now[self.rank])
            targets = _split_array(target, received + begin, now[:, self.rank])
            for backend, numbers, ranks, limit in (
                (self._local.backend, local, self._own, deadline),
                (self._flat, remote, remote_ranks, deadline + GRACE_SECONDS),
            ):
                if backend is not None and numbers.any():
                    outgoing = BufferList([sources[rank] for rank in ranks]).joined()
                    pieces = BufferList([targets[rank] for rank in ranks])
                    incoming = np.empty(pieces.size, outgoing.dtype)
                    backend.alltoall(outgoing, numbers.tolist(), incoming, limit)
                    pieces.write(0, incoming)

    # -- registered memory --------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, deadline: float) -> MemoryRegion:
        return self._allocated(self._local.backend.allocate, nbytes, deadline)

    def allocate_shared(self, nbytes: int, deadline: float) -> MemoryRegion:
        return self._allocated(self._local.backend.allocate_shared, nbytes, deadline)

    @reports_failures
    def _allocated(self, allocate: Callable[[int, float], MemoryRegion], nbytes: int, deadline: float) -> MemoryRegion:
        region = self._on_all(lambda: allocate(nbytes, deadline), self._local.backend.undo, deadline)
        offset = self._next_offset
        self._next_offset += -(-max(1, nbytes) // _LINE) * _LINE
        self._regions[offset] = region
        return MemoryRegion(offset, nbytes, region.array, self._owned(region.owned))

    def free(self, offset: int) -> None:
        self._local.backend.free(self._regions.pop(offset).offset)

    def _copies(self, buffer: ReduceBuffer, storage: np.dtype[np.generic]) -> list[Array]:
        nbytes = buffer.target.nbytes
        for start, region in self._regions.items():
            if start <= buffer.offset and buffer.offset + nbytes <= start + region.nbytes:
                return self._local.copies(region, buffer.offset - start, nbytes, storage)
        raise AssertionError(f"no registered memory at offset {buffer.offset}, {nbytes} bytes")

    def _on_all(self, make: Callable[[], _Made], undo: Callable[[_Made], None], deadline: float) -> _Made:
        """Make something of shared memory on all ranks, or on none: then all raise SharedMemoryError."""
        number = np.array([_NO_RANK], np.int64)
        made: list[_Made] = []
        failure = None
        try:
            made.append(make())
        except SharedMemoryError as error:
            failure, number[0] = error, self._ranks[self.rank]
        self.allreduce([ReduceBuffer(number, number)], Reduction(DTYPES["int64"], ReduceOp.MIN, self.size), deadline)
        if (lowest := int(number[0])) == _NO_RANK:
            return made[0]
        for one in made:
            undo(one)
        raise failure or SharedMemoryError(
            f"not enough shared memory on the host of rank {lowest}, which says how much", ranks=(lowest,)
        )

    # -- some of the ranks --------------------------------------------------------------------------------------------

    @reports_failures
    def split(self, ranks: Sequence[int], deadline: float) -> Backend | None:
        local, local_members = self._local.backend, [index for index, rank in enumerate(self._own) if rank in ranks]
        part = self._on_all(
            lambda: local.split(local_members, deadline) if local_members else None,
            lambda part: None if part is None else part.close(),
            deadline,
        )
        if part is None:
            return None
        numbers = [self._ranks[rank] for rank in ranks]
        groups = self._cross.among(ranks)
        member = list(ranks).index(self.rank)
        return compose_backend(groups, member, part, self._network, numbers, deadline, self._chunk_bytes)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def abort(self, error: CollectiveError) -> None:
        self._local.backend.abort(error)
        for backend in self._joined:
            backend.abort(error)

    def close(self) -> None:
        for backend in (*self._joined, self._local.backend):
            backend.close()
            backend.ranks_missing = None  # it was this backend's
        self._joined.clear()
        self._regions.clear()

    # -- listeners ----------------------------------------------------------------------------------------------------

    @property
    def progress_hook(self) -> ProgressHook | None:
        return self._progress_hook

    @progress_hook.setter
    def progress_hook(self, hook: ProgressHook | None) -> None:
        self._progress_hook = hook
        for backend in (self._local.backend, *self._joined):
            backend.progress_hook = hook

    @property
    def phase_ended(self) -> PhaseCallback | None:
        """Implement `Backend`; phases are those of the backends that this one is made of."""
        return self._phase_ended

    @phase_ended.setter
    def phase_ended(self, listener: PhaseCallback | None) -> None:
        self._phase_ended = listener
        for backend in (self._local.backend, *self._joined):
            backend.phase_ended = listener

    def _translated(self, members: Sequence[int]) -> MissingRanksCallback:
        """Return a callback that translates missing ranks of a backend of some of the ranks."""

        def ranks_missing(indices: Sequence[int]) -> None:
            if self.ranks_missing is not None:
                self.ranks_missing([members[index] for index in indices])

        return ranks_missing

    def _join(self, members: Sequence[int], deadline: float) -> Backend:
        """Make a backend of the network among some of the ranks."""
        backend = self._network.among([self._ranks[member] for member in members], deadline)
        self._joined.append(backend)
        backend.ranks_missing = self._translated(members)
        backend.phase_ended, backend.progress_hook = self._phase_ended, self._progress_hook
        return backend


def _split_array(array: Array, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> list[Array]:
    return [array[start : start + count] for start, count in zip(starts.tolist(), counts.tolist(), strict=True)]
