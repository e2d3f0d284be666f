"""Backend of a job of one rank: scaling, copying and sizes are as everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from reigen.backends.base import Array, BackendCapabilities, FlatBackend, MemoryRegion, ReduceBuffer
from reigen.errors import CollectiveError
from reigen.kernels.reduce import BlockReducer, Reduction


class NullBackend(FlatBackend):
    """`reigen.backends.base.Backend` for one rank."""

    name = "null"
    rank = 0
    size = 1
    capabilities = BackendCapabilities(registered_memory=True, ordered_sums=True, abortable=True)

    def allreduce(self, buffers: Sequence[ReduceBuffer], reduction: Reduction, deadline: float) -> None:
        reducer = BlockReducer(reduction)
        for buffer in buffers:
            reducer.reduce([buffer.source], buffer.target)

    def reduce_scatter(
        self, source: Array, counts: Sequence[int], target: Array, reduction: Reduction, deadline: float
    ) -> None:
        BlockReducer(reduction).reduce([source], target)

    def allgather(self, source: Array, counts: Sequence[int], target: Array, deadline: float) -> None:
        target[:] = source

    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        if source is not None and source is not target:
            target[:] = source

    def alltoall(self, source: Array, counts: Sequence[Sequence[int]], target: Array, deadline: float) -> None:
        target[:] = source[: counts[0][0]]

    def barrier(self, deadline: float) -> None:
        """Return at once."""

    def undo(self, region: MemoryRegion) -> None:
        """Do nothing: the memory goes with its last view. `ShmBackend.undo`, on a host with one rank."""

    def split(self, ranks: Sequence[int], deadline: float) -> NullBackend:
        """Return another one: there is only one rank."""
        return NullBackend()

    def abort(self, error: CollectiveError) -> None:
        """Do nothing: no other rank waits."""

    def close(self) -> None:
        """Release nothing."""
