"""What a backend is: the thing that moves and reduces the bytes of a group of ranks.

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from reigen.errors import CollectiveError
from reigen.kernels.reduce import Reduction

#: A flat array in a storage dtype.
Array = NDArray[Any]

#: Told, with its name, when a part of a collective is over. A part begins where the one before it ended, the first one
#: where the collective was called; so one call at the end of each part tells everything. The names are those of a
#: timeline: MEMCPY_IN_FUSION_BUFFER, WAIT_FOR_OTHER_RANKS, SHM_ALLREDUCE, MEMCPY_OUT_FUSION_BUFFER.
PhaseCallback = Callable[[str], None]

#: Told, again and again, while a call waits for other ranks of the group for longer than a moment, which ones have not
#: come. Called about ten times a second on the thread that waits. What it raises ends the call.
MissingRanksCallback = Callable[[Sequence[int]], None]

#: Why what waits for these ranks of the job will never succeed; None while it may.
FailureCheck = Callable[[Sequence[int]], CollectiveError | None]


@dataclass(frozen=True, slots=True)
class ProgressHook:
    """What else there is to do for the thread that waits in a backend.

    Attributes:
        descriptor: readable when there is something.
        work: does it, quickly. What it raises ends the call.
    """

    descriptor: int
    work: Callable[[], None]


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Registered memory: as many bytes of every local rank's segment.

    Attributes:
        offset: where it begins, in an order of the backend's own; the same on every rank, so it serves as its name.
        nbytes: its length.
        array: this rank's copy, uint8, ``nbytes`` long, zeroed when fresh and 64-byte aligned. Of shared memory, the
            one that all ranks of the machine have.
        owned: the copy of every owner of this machine, by owner, for this rank to read. Owners are the ranks that
            `Backend.reduce_to_owners` gives something to: as many on every machine.
    """

    offset: int
    nbytes: int
    array: NDArray[np.uint8]
    owned: tuple[NDArray[np.uint8], ...] = ()

    @property
    def owner(self) -> int | None:
        """Which owner this rank is, of a region that is not shared; None for a rank that is none."""
        own = self.array.ctypes.data
        return next((owner for owner, array in enumerate(self.owned) if array.ctypes.data == own), None)


class ReduceBuffer(msgspec.Struct, frozen=True):
    """One tensor of an allreduce.

    Attributes:
        source: what this rank contributes.
        target: where the result goes, of the same size; may be ``source``.
        offset: position in registered memory if source and target are that memory, on every rank; else -1.
    """

    source: Array
    target: Array
    offset: int = -1


@dataclass(frozen=True, slots=True)
class BackendCapabilities:
    """What a backend can do beyond the methods that all have.

    Attributes:
        registered_memory: allocate() gives memory that is reduced in place, without copies.
        ordered_sums: floating-point sums are taken in rank order for every element, whatever the sizes.
        abortable: abort() ends the waiting of the other ranks.
    """

    registered_memory: bool
    ordered_sums: bool
    abortable: bool


class Backend(Protocol):
    """The operations of a group of ``size`` ranks, seen from ``rank``."""

    name: str
    rank: int
    size: int
    capabilities: BackendCapabilities
    #: who wants to be told, if anybody
    phase_ended: PhaseCallback | None
    lacking: MissingRanksCallback | None
    #: what its caller has to do besides, if anything
    progress_hook: ProgressHook | None

    def allreduce(self, buffers: Sequence[ReduceBuffer], reduction: Reduction, deadline: float) -> None:
        """Reduce each buffer over all ranks; every rank gets the result. All or no buffers are registered memory.

        Registered memory must have been written on all ranks before the first of them calls: the backend does not wait
        for that. (The engine calls when every rank has submitted.)
        """
        ...

    def reduce_to_owners(
        self, buffer: ReduceBuffer, counts: Sequence[int], reduction: Reduction, deadline: float
    ) -> None:
        """Reduce registered memory; of the result each owner gets a part, and keeps it.

        Args:
            buffer: registered memory on all ranks, written before the first of them calls, as for `allreduce`. On
                every machine owner o's copy has the result in elements ``sum(counts[:o])`` to ``sum(counts[: o + 1])``
                then, the bits of `allreduce`. All other elements are undefined.
            counts: for each owner, how many elements it gets; together all.
            reduction: as for `allreduce`.
            deadline: as everywhere.
        """
        ...

    def reduce_scatter(
        self, source: Array, counts: Sequence[int], target: Array, reduction: Reduction, deadline: float
    ) -> None:
        """Reduce ``source`` (sum(counts) elements); rank r gets the r-th part, of ``counts[r]`` elements."""
        ...

    def allgather(self, source: Array, counts: Sequence[int], target: Array, deadline: float) -> None:
        """Concatenate the ranks' sources (``counts[r]`` elements each) in rank order into every target."""
        ...

    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        """Copy the root's source into every target, the root's own too. ``source`` is None except on the root."""
        ...

    def alltoall(self, source: Array, counts: Sequence[Sequence[int]], target: Array, deadline: float) -> None:
        """``counts[i][j]`` elements go from rank i to rank j; targets hold them in the order of senders."""
        ...

    def barrier(self, deadline: float) -> None:
        """Return when every rank has called it."""
        ...

    def allocate(self, nbytes: int, deadline: float) -> MemoryRegion:
        """Registered memory, on every rank at the same offset.

        Raises:
            SharedMemoryError: on every rank, when one has not enough; the backend stays usable.
        """
        ...

    def allocate_shared(self, nbytes: int, deadline: float) -> MemoryRegion:
        """Memory that exists once on every machine: what one of its ranks writes, the others see.

        It cannot be reduced in place. For a rank without others on its machine, and where the backend does not know who
        shares a machine, it is memory of its own.

        Raises:
            SharedMemoryError: as `allocate`.
        """
        ...

    def free(self, offset: int) -> None:
        """Give a region back for later allocations. Views of it must not be used any more."""
        ...

    def split(self, ranks: Sequence[int], deadline: float) -> Backend | None:
        """Return a backend for some of the ranks, ascending, renumbered from 0; None on a rank that is not one of them.

        Every rank of this backend calls it. The backends work independently as long as no two ranks use two of them in
        different orders. A backend that was split off is closed by all its ranks, at the same point of that order.

        Raises:
            SharedMemoryError: on every rank, when one has not enough; this backend stays usable.
        """
        ...

    def abort(self, error: CollectiveError) -> None:
        """Tell the other ranks that this one cannot go on, so that they stop waiting."""
        ...

    def close(self) -> None:
        """Release descriptors. Existing views of registered memory stay valid."""
        ...


class HostNetwork(Protocol):
    """What connects machines: makes flat backends, in which every rank is on its own, among any ranks of the job."""

    name: str

    def among(self, ranks: Sequence[int], deadline: float) -> Backend:
        """A backend of some ranks of the job, ascending, which number themselves anew. Called by exactly these ranks.

        Several such backends work side by side, as those of `Backend.split` do. Their errors name ranks of the job.
        While a rank waits in one of them, it also learns what the job knows of failures elsewhere.

        Raises:
            PeerLostError, DeadlineError, CollectiveError: as every operation.
        """
        ...

    def close(self) -> None:
        """Release what the backends share. They have been closed before."""
        ...
