"""The backend of a job of one rank: nothing travels, but scaling, copying and sizes are as everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reigen.backends.base import (
    Array,
    BackendCapabilities,
    MemoryRegion,
    MissingRanksCallback,
    PhaseCallback,
    ProgressHook,
    ReduceBuffer,
)
from reigen.errors import CollectiveError, SharedMemoryError
from reigen.kernels.reduce import BlockReducer, Reduction

_ALIGNMENT = 64


class NullBackend:
    """`reigen.backends.base.Backend` for one rank."""

    name = "null"
    rank = 0
    size = 1
    capabilities = BackendCapabilities(registered_memory=True, ordered_sums=True, abortable=True)

    def __init__(self) -> None:
        self.phase_ended: PhaseCallback | None = None
        self.lacking: MissingRanksCallback | None = None
        self.progress_hook: ProgressHook | None = None
        self._next_offset = 0

    def allreduce(self, buffers: Sequence[ReduceBuffer], reduction: Reduction, deadline: float) -> None:
        """See `Backend.allreduce`."""
        reducer = BlockReducer(reduction)
        for buffer in buffers:
            reducer.reduce([buffer.source], buffer.target)

    def reduce_to_owners(
        self, buffer: ReduceBuffer, counts: Sequence[int], reduction: Reduction, deadline: float
    ) -> None:
        """See `Backend.reduce_to_owners`."""
        self.allreduce([buffer], reduction, deadline)

    def reduce_scatter(
        self, source: Array, counts: Sequence[int], target: Array, reduction: Reduction, deadline: float
    ) -> None:
        """See `Backend.reduce_scatter`."""
        BlockReducer(reduction).reduce([source], target)

    def allgather(self, source: Array, counts: Sequence[int], target: Array, deadline: float) -> None:
        """See `Backend.allgather`."""
        target[:] = source

    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        """See `Backend.broadcast`."""
        if source is not None and source is not target:
            target[:] = source

    def alltoall(self, source: Array, counts: Sequence[Sequence[int]], target: Array, deadline: float) -> None:
        """See `Backend.alltoall`."""
        target[:] = source[: counts[0][0]]

    def barrier(self, deadline: float) -> None:
        """See `Backend.barrier`."""

    def allocate(self, nbytes: int, deadline: float) -> MemoryRegion:
        """Ordinary memory, aligned as everywhere."""
        try:
            raw = np.zeros(nbytes + _ALIGNMENT, np.uint8)
        except MemoryError as error:
            raise SharedMemoryError.for_request(nbytes, None, "registered memory (gradient buckets)") from error
        begin = -raw.ctypes.data % _ALIGNMENT
        offset = self._next_offset
        self._next_offset += nbytes + _ALIGNMENT
        array = raw[begin : begin + nbytes]
        return MemoryRegion(offset, nbytes, array, (array,))

    def allocate_shared(self, nbytes: int, deadline: float) -> MemoryRegion:
        """See `Backend.allocate_shared`. There is nobody to share it with."""
        return self.allocate(nbytes, deadline)

    def free(self, offset: int) -> None:
        """Nothing to do: the memory goes with its last view."""

    def undo(self, region: MemoryRegion) -> None:
        """Nothing to do, either."""

    def split(self, ranks: Sequence[int], deadline: float) -> NullBackend:
        """There is only one rank to split off."""
        return NullBackend()

    def abort(self, error: CollectiveError) -> None:
        """Nobody else waits."""

    def close(self) -> None:
        """Nothing to release."""
