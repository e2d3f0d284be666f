"""The NCCL plane seen as a plane for host memory, so that it can be put through the conformance suite of all planes.

Every array is copied to a device behind the plane's back, and what comes out is copied back: both in the time of the
user's stream, which the plane does not see, so that a missing event shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from tests.devices.cuda import Device
from tests.devices.nccl import Fabric, FakeNccl

from reigen.cluster.neighbours import meet
from reigen.cluster.rendezvous import Rendezvous
from reigen.errors import CollectiveError
from reigen.kernels.reduce import Reduction
from reigen.planes.base import Array, Buffer, Capabilities, DataPlane, Lacking, Meanwhile, PhaseEnded, Region
from reigen.planes.nccl import NcclPlane
from reigen.planes.shm import ShmPlane, shm_plane_bytes
from reigen.types import DTYPES, DType, dtype_named


def dtype_of(array: Array) -> DType:
    """uint16 stands for bfloat16, as in the suite."""
    return dtype_named("bfloat16" if array.dtype == np.uint16 else array.dtype.name)


class ThroughDevice:
    """`reigen.planes.base.DataPlane`: what NCCL refuses takes the way over the host, as in a front end."""

    name = "nccl"
    capabilities = Capabilities(registered_memory=False, ordered_sums=False, abortable=True)

    def __init__(self, host: DataPlane, plane: NcclPlane, device: Device, fake: FakeNccl) -> None:
        self.host, self.plane, self.device, self.fake = host, plane, device, fake
        self.rank, self.size = host.rank, host.size
        self.phase_ended: PhaseEnded | None = None
        self.lacking: Lacking | None = None
        self.meanwhile: Meanwhile | None = None
        #: how many operations took which way
        self.num_on_device = self.num_on_host = 0
        assert plane.takes(device, DTYPES["uint8"])

    def _takes(self, reduction: Reduction) -> bool:
        how = reduction.op, reduction.prescale, reduction.postscale
        takes = self.plane.takes(self.device, reduction.dtype, how)
        self.num_on_device += takes
        self.num_on_host += not takes
        return takes

    def allreduce(self, buffers: Sequence[Buffer], reduction: Reduction, deadline: float) -> None:
        if not self._takes(reduction):
            self.host.allreduce(buffers, reduction, deadline)
            return
        pairs = []
        for buffer in buffers:
            source = self.device.lend(buffer.source, reduction.dtype)
            in_place = buffer.source is buffer.target
            target = source if in_place else self.device.lend(np.zeros_like(buffer.target), reduction.dtype)
            pairs.append((source, target))
        ended = self.plane.allreduce(pairs, reduction, deadline)
        for buffer, (_, target) in zip(buffers, pairs, strict=True):
            buffer.target[:] = self.device.take(target, ended)

    def reduce_to_owners(self, buffer: Buffer, counts: Sequence[int], reduction: Reduction, deadline: float) -> None:
        self.host.reduce_to_owners(buffer, counts, reduction, deadline)

    def reducescatter(
        self, source: Array, counts: Sequence[int], target: Array, reduction: Reduction, deadline: float
    ) -> None:
        if not self._takes(reduction):
            self.host.reducescatter(source, counts, target, reduction, deadline)
            return
        lent, into = self.device.lend(source, reduction.dtype), self.device.lend(np.zeros_like(target), reduction.dtype)
        target[:] = self.device.take(into, self.plane.reducescatter(lent, counts, into, reduction, deadline))

    def allgather(self, source: Array, counts: Sequence[int], target: Array, deadline: float) -> None:
        lent, into = (
            self.device.lend(source, dtype_of(source)),
            self.device.lend(np.zeros_like(target), dtype_of(target)),
        )
        target[:] = self.device.take(into, self.plane.allgather(lent, counts, into, deadline))

    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        into = self.device.lend(np.zeros_like(target), dtype_of(target))
        lent = into if source is None else self.device.lend(source, dtype_of(source))
        target[:] = self.device.take(into, self.plane.broadcast(lent, into, root, deadline))

    def alltoall(self, source: Array, counts: Sequence[Sequence[int]], target: Array, deadline: float) -> None:
        lent, into = (
            self.device.lend(source, dtype_of(source)),
            self.device.lend(np.zeros_like(target), dtype_of(target)),
        )
        target[:] = self.device.take(into, self.plane.alltoall(lent, counts, into, deadline))

    def barrier(self, deadline: float) -> None:
        self.host.barrier(deadline)

    def allocate(self, nbytes: int, deadline: float) -> Region:
        return self.host.allocate(nbytes, deadline)

    def allocate_shared(self, nbytes: int, deadline: float) -> Region:
        return self.host.allocate_shared(nbytes, deadline)

    def free(self, offset: int) -> None:
        self.host.free(offset)

    def split(self, ranks: Sequence[int], deadline: float) -> DataPlane | None:
        return self.host.split(ranks, deadline)

    def abort(self, error: CollectiveError) -> None:
        self.host.abort(error)
        self.plane.abort(error)

    def close(self) -> None:
        self.plane.close()


@contextmanager
def host_plane(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[ShmPlane]:
    """A plane for host memory among threads."""
    neighbours, [part] = meet(rendezvous, rank, range(size), 0, 60.0, [shm_plane_bytes()])
    plane = ShmPlane(neighbours, part, looks=0)
    try:
        yield plane
    finally:
        plane.close()
        neighbours.close()


@contextmanager
def through_device(
    rank: int, size: int, rendezvous: Rendezvous, fabric: Fabric, lag: int = 3
) -> Iterator[ThroughDevice]:
    """A GPU and an NCCL of its own for one rank that is a thread of the test."""
    fake = FakeNccl(fabric, lag)
    device = Device("cuda:0", f"GPU-{rank}")
    try:
        with host_plane(rank, size, rendezvous) as host:
            plane = NcclPlane(host, range(size), lambda: (fake.library(), "a stand-in"))
            try:
                yield ThroughDevice(host, plane, device, fake)
            finally:
                plane.close()
    finally:
        device.close()
