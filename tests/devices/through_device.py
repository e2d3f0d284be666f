"""The device backend seen as a backend for host memory: it goes through the conformance suite of all backends.

Every array is copied to a device behind the backend's back, and what comes out is copied back: both in the time of the
user's stream, which the backend does not see, so that a missing event shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from reigen.backends.base import (
    Array,
    Backend,
    BackendCapabilities,
    MemoryRegion,
    MissingRanksCallback,
    PhaseCallback,
    ProgressHook,
    ReduceBuffer,
)
from reigen.backends.device import DeviceBackend
from reigen.backends.shm.backend import ShmBackend, shm_backend_bytes
from reigen.cluster.local_peers import map_local_peers
from reigen.cluster.membership.rendezvous import Rendezvous
from reigen.errors import CollectiveError
from reigen.kernels.reduce import Reduction
from reigen.types import DTYPES, DType, ReduceOp, dtype_named
from tests.devices.gloo import Device, Network


def dtype_of(array: Array) -> DType:
    """uint16 stands for bfloat16, as in the suite."""
    return dtype_named("bfloat16" if array.dtype == np.uint16 else array.dtype.name)


def _compares_nan(buffers: Sequence[ReduceBuffer], reduction: Reduction) -> bool:
    """Whether that is a minimum or maximum of NaN, which no two libraries agree about (docs/gpu.md)."""
    is_compared = reduction.op in (ReduceOp.MIN, ReduceOp.MAX) and reduction.dtype.name == "float32"
    return is_compared and any(np.isnan(buffer.source).any() for buffer in buffers)


class ThroughDevice:
    """`reigen.backends.base.Backend`: what devices refuse takes the way over the host, as in a front end."""

    name = "device"
    capabilities = BackendCapabilities(registered_memory=False, ordered_sums=False, abortable=True)

    def __init__(self, host: Backend, backend: DeviceBackend, device: Device) -> None:
        self.host, self.backend, self.device = host, backend, device
        self.rank, self.size = host.rank, host.size
        self.phase_ended: PhaseCallback | None = None
        self.ranks_missing: MissingRanksCallback | None = None
        self.progress_hook: ProgressHook | None = None
        #: how many operations took which way
        self.num_on_device = self.num_on_host = 0
        assert backend.takes(device, DTYPES["uint8"])

    def _takes(self, reduction: Reduction) -> bool:
        how = reduction.op, reduction.prescale, reduction.postscale
        takes = self.backend.takes(self.device, reduction.dtype, how)
        self.num_on_device += takes
        self.num_on_host += not takes
        return takes

    def allreduce(self, buffers: Sequence[ReduceBuffer], reduction: Reduction, deadline: float) -> None:
        if not self._takes(reduction) or _compares_nan(buffers, reduction):
            self.host.allreduce(buffers, reduction, deadline)
            return
        pairs = []
        for buffer in buffers:
            source = self.device.lend(buffer.source, reduction.dtype)
            in_place = buffer.source is buffer.target
            target = source if in_place else self.device.lend(np.zeros_like(buffer.target), reduction.dtype)
            pairs.append((source, target))
        memory = [array for pair in pairs for array in pair]
        ended = self.backend.launch(memory, lambda group: group.allreduce(pairs, reduction), deadline)
        for buffer, (_, target) in zip(buffers, pairs, strict=True):
            buffer.target[:] = self.device.take(target, ended)

    def reduce_to_owners(
        self, buffer: ReduceBuffer, counts: Sequence[int], reduction: Reduction, deadline: float
    ) -> None:
        self.host.reduce_to_owners(buffer, counts, reduction, deadline)

    def reduce_scatter(
        self, source: Array, counts: Sequence[int], target: Array, reduction: Reduction, deadline: float
    ) -> None:
        if not self._takes(reduction):
            self.host.reduce_scatter(source, counts, target, reduction, deadline)
            return
        lent, into = self.device.lend(source, reduction.dtype), self.device.lend(np.zeros_like(target), reduction.dtype)
        work = lambda group: group.reduce_scatter(lent, counts, into, reduction)  # noqa: E731
        target[:] = self.device.take(into, self.backend.launch([lent, into], work, deadline))

    def allgather(self, source: Array, counts: Sequence[int], target: Array, deadline: float) -> None:
        lent, into = (
            self.device.lend(source, dtype_of(source)),
            self.device.lend(np.zeros_like(target), dtype_of(target)),
        )
        ended = self.backend.launch([lent, into], lambda group: group.allgather(lent, counts, into), deadline)
        target[:] = self.device.take(into, ended)

    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        into = self.device.lend(np.zeros_like(target), dtype_of(target))
        lent = into if source is None else self.device.lend(source, dtype_of(source))
        ended = self.backend.launch([lent, into], lambda group: group.broadcast(lent, into, root), deadline)
        target[:] = self.device.take(into, ended)

    def alltoall(self, source: Array, counts: Sequence[Sequence[int]], target: Array, deadline: float) -> None:
        lent, into = (
            self.device.lend(source, dtype_of(source)),
            self.device.lend(np.zeros_like(target), dtype_of(target)),
        )
        ended = self.backend.launch([lent, into], lambda group: group.alltoall(lent, counts, into), deadline)
        target[:] = self.device.take(into, ended)

    def barrier(self, deadline: float) -> None:
        self.host.ranks_missing, self.host.progress_hook = self.ranks_missing, self.progress_hook
        self.host.barrier(deadline)

    def allocate(self, nbytes: int, deadline: float) -> MemoryRegion:
        return self.host.allocate(nbytes, deadline)

    def allocate_shared(self, nbytes: int, deadline: float) -> MemoryRegion:
        return self.host.allocate_shared(nbytes, deadline)

    def free(self, offset: int) -> None:
        self.host.free(offset)

    def split(self, ranks: Sequence[int], deadline: float) -> Backend | None:
        return self.host.split(ranks, deadline)

    def abort(self, error: CollectiveError) -> None:
        self.host.abort(error)
        self.backend.abort(error)

    def close(self) -> None:
        self.backend.close()


@contextmanager
def host_backend(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[ShmBackend]:
    """A backend for host memory among threads."""
    neighbours, [part] = map_local_peers(rendezvous, rank, range(size), 0, 60.0, [shm_backend_bytes()])
    backend = ShmBackend(neighbours, part, looks=0)
    try:
        yield backend
    finally:
        backend.close()
        neighbours.close()


@contextmanager
def through_device(rank: int, size: int, rendezvous: Rendezvous, network: Network) -> Iterator[ThroughDevice]:
    """A GPU of its own for one rank that is a thread of the test."""
    device = Device("cuda:0", f"GPU-{rank}", network, rank)
    try:
        with host_backend(rank, size, rendezvous) as host:
            backend = DeviceBackend(host, range(size))
            try:
                yield ThroughDevice(host, backend, device)
            finally:
                backend.close()
    finally:
        device.close()
