"""An engine for a job, put together from plane, transport and coordinator."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from reigen.cluster.neighbours import meet
from reigen.cluster.rendezvous import Rendezvous
from reigen.cluster.topology import Topology
from reigen.config import Config
from reigen.engine.engine import Engine
from reigen.engine.negotiation import Coordinator
from reigen.engine.transport import Solitude
from reigen.planes.base import DataPlane
from reigen.planes.device import DevicePlane
from reigen.planes.nccl import NcclPlane
from reigen.planes.null import NullPlane
from reigen.planes.shm import ShmPlane, shm_plane_bytes
from reigen.wire.mailbox import Mailbox, mailbox_bytes

_log = logging.getLogger(__name__)

#: How often a waiting caller looks for an answer before it sleeps, where every rank has a core of its own.
_LOOKS = 200


def engine_alone(config: Config) -> Engine:
    """For a job of one rank."""
    solitude, plane = Solitude(), NullPlane()
    coordinator, device = coordinator_of(config, 1), device_plane_of(config, plane)
    return Engine(plane, solitude, solitude, coordinator, config.deadline_seconds, looks=0, device=device)


def device_plane_of(config: Config, plane: DataPlane) -> DevicePlane | None:
    """What may stand beside the data plane of all ranks. It costs nothing until its first operation."""
    return NcclPlane(plane, range(plane.size)) if config.nccl else None


def coordinator_of(config: Config, size: int) -> Coordinator:
    """For rank 0 of a job of ``size`` ranks."""
    return Coordinator(
        size,
        config.cache_capacity,
        config.fusion_threshold_bytes,
        config.deadline_seconds,
        fuse_groups=not config.disable_group_fusion,
        warn=_log.warning,
    )


def engine_on_host(
    topology: Topology, config: Config, rendezvous: Rendezvous, generation: int
) -> tuple[Engine, Callable[[], None]]:
    """For a job whose ranks are all on this host, and what releases its resources after it is closed. Collective.

    Args:
        topology: this process's place.
        config: the knobs.
        rendezvous: where the ranks meet.
        generation: how often this process has been in this job before.

    Raises:
        CollectiveError: as `reigen.cluster.neighbours.meet` tells.
    """
    rank, size = topology.rank, topology.size
    sizes = [mailbox_bytes(size), shm_plane_bytes()]
    neighbours, (mail, part) = meet(rendezvous, rank, range(size), generation, config.start_timeout_seconds, sizes)
    looks = _LOOKS if size <= (os.cpu_count() or 1) else 0
    plane = ShmPlane(neighbours, part, looks)
    try:
        plane.try_direct(time.monotonic() + config.start_timeout_seconds)
    except BaseException:
        neighbours.close()
        raise
    others = [r for r in range(size) if r != rank]
    mailbox = Mailbox(mail.arrays, rank, others if rank == 0 else [0], others if rank == 0 else [0])
    coordinator = coordinator_of(config, size) if rank == 0 else None

    def release() -> None:
        neighbours.leave()
        plane.close()
        neighbours.close()

    device = device_plane_of(config, plane)
    engine = Engine(plane, mailbox, neighbours, coordinator, config.deadline_seconds, looks, device)
    if not config.stall_check_disable:
        engine.watch_stalls(config.stall_check_seconds, config.stall_shutdown_seconds, dict(enumerate(neighbours.pids)))
    return engine, release
