"""Interface of backends, which move and reduce the bytes of a group of ranks.

A backend knows nothing of names, negotiation, fusion or frameworks. Its caller makes sure that every rank of the group
calls the same operations, with the same sizes, dtype and reduction, in the same order; one call at a time.

Arrays are flat, C-contiguous and of the dtype's storage type (bfloat16 is uint16). ``deadline`` is a value of
``time.monotonic()``. Every call returns when this rank's outputs are complete and its inputs may be overwritten, or
raises

* `PeerLostError` - a rank died; within a second of its death;
* `DeadlineError` - ranks did not come by the deadline; names them;
* `CollectiveError` - a rank gave up (``abort``).

After such an error the backend is broken for every rank of the group: only ``close`` may follow.
"""

from __future__ import annotations

import select
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from reigen.errors import CollectiveError, SharedMemoryError
from reigen.kernels.reduce import BlockReducer, Reduction

#: A flat array in a storage dtype.
Array = NDArray[Any]
_ALIGNMENT = 64

#: Called with the name of a collective's part when it is over. A part begins where the one before it ended, the first
#: one where the collective was called; so one call at the end of each part is enough. The names are those of a
#: timeline: MEMCPY_IN_FUSION_BUFFER, WAIT_FOR_OTHER_RANKS, SHM_ALLREDUCE, MEMCPY_OUT_FUSION_BUFFER. A backend whose
#: collectives have no parts does not call it.
PhaseCallback = Callable[[str], None]

#: Called with the ranks of the group that have not come, again and again, while a call waits for longer than a moment:
#: about ten times a second on the thread that waits. An exception ends the call.
MissingRanksCallback = Callable[[Sequence[int]], None]

#: Returns the reason why these ranks of the job will never answer; None while they may.
FailureCheck = Callable[[Sequence[int]], CollectiveError | None]


@dataclass(frozen=True, slots=True)
class ProgressHook:
    """Hook of the thread that waits in a backend: ``work`` is called when ``descriptor`` is readable."""

    descriptor: int
    work: Callable[[], None]

    def work_if_readable(self) -> None:
        """Call ``work`` if the descriptor is readable now."""
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        if poll.poll(0):
            self.work()


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Registered memory: as many bytes of every local rank's segment.

    Attributes:
        offset: where it begins, in an order of the backend's own; the same on every rank, so it serves as its name.
        nbytes: its length.
        array: this rank's copy, uint8, ``nbytes`` long, zeroed when fresh and 64-byte aligned. Of shared memory, the
            one that all ranks of the host have.
        owned: the copy of every owner of this host, by owner, for this rank to read. Owners are the ranks that
            get a part from `Backend.reduce_to_owners`: as many on every host.
    """

    offset: int
    nbytes: int
    array: NDArray[np.uint8]
    owned: tuple[NDArray[np.uint8], ...] = ()

    @property
    def owner(self) -> int | None:
        """Index of this rank among the owners of a region that is not shared; None for a rank that is none."""
        own = self.array.ctypes.data
        return next((owner for owner, array in enumerate(self.owned) if array.ctypes.data == own), None)


class BlockJournal(Protocol):
    """Account of how far a reduction in registered memory has come, by which others can finish it."""

    def reduce(self, reducer: BlockReducer) -> None:
        """Reduce this rank's slice of all ranks' copies."""


class SharedUpdate(Protocol):
    """Update of weights that exist once a host, which those who are left finish when an owner has died in it.

    Attributes:
        owner: number of this rank among the owners of the host; None: it owns nothing.
        is_begun: some owner has begun the update of the step that was begun last.
    """

    @property
    def owner(self) -> int | None: ...
    @property
    def is_begun(self) -> bool: ...

    def begin_step(self) -> None:
        """A step begins: no update is under way."""

    def finish(self, owners: Sequence[int | None], place: int) -> None:
        """Finish this rank's slice, and its share of those of the dead; the update is made when all have.

        Args:
            owners: numbers of those who do this, one for each; all others are dead.
            place: of this rank among them.
        """


class ReduceBuffer(msgspec.Struct, frozen=True):
    """Tensor of an allreduce.

    Attributes:
        source: this rank's contribution.
        target: array for the result, of the same size; may be ``source``.
        offset: position in registered memory if source and target are that memory, on every rank; else -1.
        journal: reduces this rank's slice there, and keeps account of it; None: without any.
    """

    source: Array
    target: Array
    offset: int = -1
    journal: BlockJournal | None = None


@dataclass(frozen=True, slots=True)
class BackendCapabilities:
    """Capabilities of a backend beyond the methods that all have.

    Attributes:
        registered_memory: allocate() gives memory that is reduced in place, without copies.
        ordered_sums: floating-point sums are taken in rank order for every element, whatever the sizes.
        abortable: abort() ends the waiting of the other ranks.
    """

    registered_memory: bool
    ordered_sums: bool
    abortable: bool


class Backend(Protocol):
    """Operations of a group of ``size`` ranks, seen from ``rank``. A class that inherits it must have all methods."""

    name: str
    rank: int
    size: int
    capabilities: BackendCapabilities
    #: listeners, if there are any: the caller sets them between operations, and every operation calls them
    phase_ended: PhaseCallback | None
    ranks_missing: MissingRanksCallback | None
    #: further work, if there is any: every operation that waits does it
    progress_hook: ProgressHook | None

    @abstractmethod
    def allreduce(self, buffers: Sequence[ReduceBuffer], reduction: Reduction, deadline: float) -> None:
        """Reduce each buffer over all ranks; every rank gets the result. All or no buffers are registered memory.

        Registered memory must have been written on all ranks before the first of them calls: the backend does not wait
        for that. (The engine calls when every rank has submitted.)
        """

    @abstractmethod
    def reduce_to_owners(
        self, buffer: ReduceBuffer, counts: Sequence[int], reduction: Reduction, deadline: float
    ) -> None:
        """Reduce registered memory; of the result each owner gets a part, and keeps it.

        Args:
            buffer: registered memory on all ranks, written before the first of them calls, as for `allreduce`. On
                every host owner o's copy has the result in elements ``sum(counts[:o])`` to ``sum(counts[: o + 1])``
                then, the bits of `allreduce`. All other elements are undefined.
            counts: for each owner, how many elements it gets; together all.
            reduction: as for `allreduce`.
            deadline: as everywhere.
        """

    @abstractmethod
    def reduce_scatter(
        self, source: Array, counts: Sequence[int], target: Array, reduction: Reduction, deadline: float
    ) -> None:
        """Reduce ``source`` (sum(counts) elements); rank r gets the r-th part, of ``counts[r]`` elements."""

    @abstractmethod
    def allgather(self, source: Array, counts: Sequence[int], target: Array, deadline: float) -> None:
        """Concatenate the ranks' sources (``counts[r]`` elements each) in rank order into every target."""

    @abstractmethod
    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        """Copy the root's source into every target, the root's own too. ``source`` is None except on the root."""

    @abstractmethod
    def alltoall(self, source: Array, counts: Sequence[Sequence[int]], target: Array, deadline: float) -> None:
        """``counts[i][j]`` elements go from rank i to rank j; targets hold them in the order of senders."""

    @abstractmethod
    def barrier(self, deadline: float) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def allocate(self, nbytes: int, deadline: float) -> MemoryRegion:
        """Allocate registered memory, at the same offset on all ranks. SharedMemoryError, on all, breaks nothing."""

    @abstractmethod
    def allocate_shared(self, nbytes: int, deadline: float) -> MemoryRegion:
        """Allocate memory that exists once on every host: one rank's writing is visible to the others there.

        It cannot be reduced in place. For a rank without others on its host, and where the backend does not know which
        ranks share a host, it is memory of its own. Errors as for `allocate`.
        """

    @abstractmethod
    def free(self, offset: int) -> None:
        """Give a region back for later allocations. Views of it must not be used any more."""

    @abstractmethod
    def split(self, ranks: Sequence[int], deadline: float) -> Backend | None:
        """Return a backend for some of the ranks, ascending, renumbered from 0; None on a rank that is not one of them.

        Every rank of this backend calls it. The backends work independently as long as no two ranks use two of them in
        different orders. A backend that was split off is closed by all its ranks, at the same point of that order.

        Raises:
            SharedMemoryError: on every rank, when one has not enough; this backend stays usable.
        """

    @abstractmethod
    def abort(self, error: CollectiveError) -> None:
        """Report to the other ranks that this one cannot go on, so that they stop waiting."""

    @abstractmethod
    def close(self) -> None:
        """Release descriptors. Existing views of registered memory stay valid."""


class FlatBackend(Backend):
    """Defaults of a backend whose ranks share no memory: each owns all, and registered memory is ordinary memory."""

    phase_ended: PhaseCallback | None = None
    ranks_missing: MissingRanksCallback | None = None
    progress_hook: ProgressHook | None = None
    _next_offset = 0

    def reduce_to_owners(
        self, buffer: ReduceBuffer, counts: Sequence[int], reduction: Reduction, deadline: float
    ) -> None:
        """Give every rank the result."""
        self.allreduce([buffer], reduction, deadline)

    def allocate(self, nbytes: int, deadline: float) -> MemoryRegion:
        """Return ordinary memory; its lack is an error of this rank alone."""
        if (region := self._ordinary_memory(nbytes)) is None:
            raise SharedMemoryError.for_request(nbytes, None, "registered memory (gradient buckets)")
        return region

    def _ordinary_memory(self, nbytes: int) -> MemoryRegion | None:
        try:
            raw = np.zeros(nbytes + _ALIGNMENT, np.uint8)
        except MemoryError:
            return None
        begin, offset = -raw.ctypes.data % _ALIGNMENT, self._next_offset
        self._next_offset += nbytes + _ALIGNMENT
        array = raw[begin : begin + nbytes]
        return MemoryRegion(offset, nbytes, array, (array,))

    def allocate_shared(self, nbytes: int, deadline: float) -> MemoryRegion:
        """Return memory of this rank alone."""
        return self.allocate(nbytes, deadline)

    def free(self, offset: int) -> None:
        """Do nothing: the memory goes with its last view."""


class TunableNetwork(Protocol):
    """Network whose parameters change while it is in use."""

    def tune(self, algorithm: str, num_sockets: int) -> None:
        """Change parameters between two operations, the same ones on all ranks.

        Args:
            algorithm: of reductions, as in the configuration.
            num_sockets: connections between two ranks that are used; no more than were made.
        """


class HostNetwork(Protocol):
    """Network between hosts: makes flat backends, in which every rank is on its own, among any ranks of the job."""

    name: str

    def among(self, ranks: Sequence[int], deadline: float) -> Backend:
        """Make a backend of some ranks of the job, ascending, renumbered from 0. Called by exactly these ranks.

        Several such backends work side by side, as those of `Backend.split` do. Their errors name ranks of the job.
        While a rank waits in one of them, failures elsewhere in the job also end its waiting. Errors are those of every
        operation.
        """

    def close(self) -> None:
        """Release resources that the backends share. They have been closed before."""
