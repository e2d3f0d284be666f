"""An engine for a job, put together from plane, transport, watch and coordinator."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reigen.cluster.layout import Layout
from reigen.cluster.lookout import Lookout
from reigen.cluster.membership import Membership
from reigen.cluster.mesh import Mesh
from reigen.cluster.mpi_world import world
from reigen.cluster.neighbours import Neighbours, meet
from reigen.cluster.rendezvous import Rendezvous, Room, split_address
from reigen.config import Config
from reigen.engine.engine import Engine
from reigen.engine.negotiation import Coordinator
from reigen.engine.transport import Solitude
from reigen.planes.base import DataPlane, Network
from reigen.planes.choice import Choice
from reigen.planes.device import DevicePlane
from reigen.planes.hierarchical import compose
from reigen.planes.nccl import NcclPlane
from reigen.planes.null import NullPlane
from reigen.planes.shm import ShmPlane, shm_plane_bytes
from reigen.planes.tcp import TcpNetwork
from reigen.wire.auth import Seal
from reigen.wire.interfaces import choose_address
from reigen.wire.mailbox import Mailbox, mailbox_bytes
from reigen.wire.star import Star

if TYPE_CHECKING:
    from reigen.wire.tls import Tls

_log = logging.getLogger(__name__)

#: How often a waiting caller looks for an answer before it sleeps, where every rank has a core of its own.
_LOOKS = 200
#: What the connections of the star are for.
_CONTROL = "control"

#: Releases what an engine stands on, after the engine is closed.
Release = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a job meet, and which share a host.

    Attributes:
        layout: who is where.
        rendezvous: where the ranks of this job meet. Jobs on several hosts keep it, and close it.
        generation: how often this process has been in this job before.
        address: ``host:port`` of the control service, for jobs on several hosts.
        secret: the job's 32 bytes.
        room: the name that this job has at the service, different for every job there.
        tls: encrypts every connection, if they are to be.
        launched: for each rank its number as the launcher gave it, where the job has only some of those; else empty.
    """

    layout: Layout
    rendezvous: Rendezvous
    generation: int = 0
    address: str = ""
    secret: bytes = field(default=b"", repr=False)
    room: str = ""
    tls: Tls | None = None
    launched: tuple[int, ...] = ()

    def seal(self) -> Seal:
        """For bytes that are to be unpickled on other hosts."""
        return Seal(self.secret, "objects")


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


def engine_on_host(meeting: Meeting, config: Config) -> tuple[Engine, Release]:
    """For a job whose ranks share the memory of this host. Collective.

    Raises:
        CollectiveError: as `reigen.cluster.neighbours.meet` tells.
    """
    rank, ranks = meeting.layout.rank, meeting.layout.local
    size = len(ranks)
    sizes = [mailbox_bytes(size), shm_plane_bytes()]
    timeout = config.start_timeout_seconds
    neighbours, (mail, part) = meet(meeting.rendezvous, rank, ranks, meeting.generation, timeout, sizes)
    looks = _looks(size)
    plane = ShmPlane(neighbours, part, looks)
    try:
        plane.try_direct(time.monotonic() + timeout)
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
    _watch_stalls(engine, config, neighbours)
    return engine, release


def engine_on_hosts(meeting: Meeting, choice: Choice, config: Config) -> tuple[Engine, Release]:
    """For a job whose ranks do not all share memory. Collective.

    Raises:
        CollectiveError: ranks did not come, or died.
        ConfigError: there is no such network interface.
        AuthenticationError: somebody who does not know the secret answers in a rank's place.
    """
    layout, until = meeting.layout, time.monotonic() + config.start_timeout_seconds
    rank, size = layout.rank, layout.size
    with ExitStack() as undo:
        undo.callback(meeting.rendezvous.close)  # connections are made when they are needed
        membership = undo.enter_context(closing(_membership(meeting, config)))
        neighbours, local = _share_memory(meeting, config) if choice.shares_memory else (None, NullPlane())
        if neighbours is not None:
            undo.callback(neighbours.close)
        star, mesh = _connect(meeting, config, membership, until)
        undo.callback(star.close)
        undo.callback(mesh.close)
        lookout = Lookout(membership, neighbours, star.lost)
        network = undo.enter_context(closing(_network(choice, meeting, mesh, lookout, config)))
        groups = layout.machines if choice.shares_memory else [(r,) for r in range(size)]
        plane = undo.enter_context(closing(compose(groups, rank, local, network, range(size), until)))
        coordinator = coordinator_of(config, size) if rank == 0 else None
        looks, device = _looks(len(layout.local)), device_plane_of(config, plane)
        engine = Engine(plane, star, lookout, coordinator, config.deadline_seconds, looks, device)
        _watch_stalls(engine, config, neighbours)
        resources = undo.pop_all()

    def release() -> None:
        lookout.leave()
        resources.close()

    return engine, release


def _membership(meeting: Meeting, config: Config) -> Membership:
    layout = meeting.layout
    return Membership(
        meeting.address,
        meeting.secret,
        f"{meeting.room} {meeting.generation}",
        layout.rank,
        layout.size,
        timeout_seconds=config.start_timeout_seconds,
        peer_timeout_seconds=config.peer_timeout_seconds,
        host_id=config.host_id or "",
        tls=meeting.tls,
    )


def _share_memory(meeting: Meeting, config: Config) -> tuple[Neighbours | None, ShmPlane | NullPlane]:
    """The other ranks of this host, if there are any, and the plane of all of them."""
    layout, timeout = meeting.layout, config.start_timeout_seconds
    if len(layout.local) == 1:
        return None, NullPlane()
    sizes = [shm_plane_bytes()]
    neighbours, (part,) = meet(meeting.rendezvous, layout.rank, layout.local, meeting.generation, timeout, sizes)
    neighbours.name_host(layout.hostnames[layout.rank])
    plane = ShmPlane(neighbours, part, _looks(neighbours.size))
    try:
        plane.try_direct(time.monotonic() + timeout)
    except BaseException:
        neighbours.close()
        raise
    return neighbours, plane


def _connect(meeting: Meeting, config: Config, membership: Membership, until: float) -> tuple[Star, Mesh]:
    """The way of control messages, and of all other connections."""
    layout = meeting.layout
    address, reason = choose_address(config.network_interfaces, split_address(meeting.address)[0])
    _log.debug("rank %d listens at %s: %s", layout.rank, address, reason)
    room = Room(meeting.rendezvous, str(meeting.generation))
    silence = config.peer_timeout_seconds
    mesh = Mesh(layout.rank, layout.size, room, meeting.secret, address, silence, tls=meeting.tls)
    others = [r for r in range(layout.size) if r != layout.rank]

    def waiting(missing: Sequence[int]) -> None:
        error = membership.failure(missing)
        if error is not None:
            raise error

    try:
        streams = mesh.open(others if layout.rank == 0 else [0], _CONTROL, until, waiting)
    except BaseException:
        mesh.close()
        raise
    return Star(streams), mesh


def _network(choice: Choice, meeting: Meeting, mesh: Mesh, lookout: Lookout, config: Config) -> Network:
    if choice.network == "mpi":
        from reigen.planes.mpi import MpiNetwork

        layout, room = meeting.layout, Room(meeting.rendezvous, str(meeting.generation))
        launched, looks = meeting.launched or range(layout.size), _looks(len(layout.local))
        return MpiNetwork(world(os.environ), launched, layout.rank, room, failure=lookout.end_of, looks=looks)
    return TcpNetwork(
        mesh,
        failure=lookout.end_of,
        algorithm=config.tcp_algorithm,
        num_sockets=config.tcp_sockets,
        hosts=meeting.layout.hostnames,
    )


def _looks(num_local: int) -> int:
    return _LOOKS if num_local <= (os.cpu_count() or 1) else 0


def _watch_stalls(engine: Engine, config: Config, neighbours: Neighbours | None) -> None:
    if not config.stall_check_disable:
        pids = {} if neighbours is None else dict(zip(neighbours.ranks, neighbours.pids, strict=True))
        engine.watch_stalls(config.stall_check_seconds, config.stall_shutdown_seconds, pids)
