"""An engine for a job, put together from backend, transport, watch and coordinator."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reigen.backends.base import Backend, HostNetwork
from reigen.backends.device import DeviceBackend
from reigen.backends.hierarchical.backend import compose_backend
from reigen.backends.null import NullBackend
from reigen.backends.selection import BackendChoice
from reigen.backends.shm.backend import ShmBackend, shm_backend_bytes
from reigen.backends.shm.region_cache import RegionCache
from reigen.backends.tcp.backend import TcpNetwork
from reigen.cluster.bootstrap.mpi_library import mpi_comm_world
from reigen.cluster.connection_pool import ConnectionPool
from reigen.cluster.host_discovery import HostLayout
from reigen.cluster.local_peers import LocalPeers, map_local_peers
from reigen.cluster.membership.client import MembershipClient
from reigen.cluster.membership.failure_detector import FailureDetector
from reigen.cluster.membership.rendezvous import PrefixRendezvous, Rendezvous, split_address
from reigen.config import Config
from reigen.engine.control_tree import ControlTree
from reigen.engine.coordinator import Coordinator
from reigen.engine.engine import Engine
from reigen.engine.relay_transport import RelayTransport
from reigen.engine.transport import SingleRankTransport
from reigen.net.interfaces import choose_address
from reigen.net.shm_ring import ShmTransport, shm_transport_bytes
from reigen.net.tcp_star import TcpStarTransport

if TYPE_CHECKING:
    from reigen.net.tls import TlsContext

_log = logging.getLogger(__name__)

#: How often a waiting rank that has a core to itself looks before it sleeps: at a word of shared memory, for about two
#: hundred microseconds, and through the kernel. A wake-up takes 50 to 100 of them on a virtual machine.
_SHM_LOOKS, _SYSCALL_LOOKS = 4000, 200
#: Purpose of the star's connections.
_CONTROL_PURPOSE = "control"

#: Releases an engine's resources, after the engine is closed.
ReleaseCallback = Callable[[], None]


@dataclass(frozen=True, slots=True)
class JobRendezvous:
    """Rendezvous of the ranks of a job, and their hosts.

    Attributes:
        layout: the ranks by host.
        rendezvous: of this job's ranks. Jobs on several hosts keep it, and close it.
        generation: how often this process has been in this job before.
        address: ``host:port`` of the control service, for jobs on several hosts.
        secret: the job's 32 bytes.
        namespace: the name that this job has at the service, different for every job there.
        tls: encrypts every connection; None: they are not encrypted.
        launched: for each rank its number as the launcher gave it, where the job has only some of those; else empty.
        region_cache: in an elastic job, of registered memory that outlives its views.
    """

    layout: HostLayout
    rendezvous: Rendezvous
    generation: int = 0
    address: str = ""
    secret: bytes = field(default=b"", repr=False)
    namespace: str = ""
    tls: TlsContext | None = None
    launched: tuple[int, ...] = ()
    region_cache: RegionCache | None = None


def create_single_rank_engine(config: Config) -> Engine:
    """Create the engine of a job of one rank."""
    transport, backend = SingleRankTransport(), NullBackend()
    coordinator, device = create_coordinator(config, 1), create_device_backend(config, backend)
    return Engine(backend, transport, transport, coordinator, config.deadline_seconds, looks=0, device=device)


def create_device_backend(config: Config, backend: Backend) -> DeviceBackend | None:
    """Create the backend for devices beside that of all ranks. It costs nothing until its first operation."""
    return DeviceBackend(backend, range(backend.size)) if config.nccl else None


def create_coordinator(config: Config, size: int, tree: ControlTree | None = None) -> Coordinator:
    """Create the coordinator, on rank 0 of a job of ``size`` ranks; they report to it directly, or through a tree."""
    return Coordinator(
        size,
        config.cache_capacity,
        config.fusion_threshold_bytes,
        config.deadline_seconds,
        fuse_groups=not config.disable_group_fusion,
        warn=_log.warning,
        tree=tree,
    )


def create_single_host_engine(job: JobRendezvous, config: Config) -> tuple[Engine, ReleaseCallback]:
    """Create the engine of a job whose ranks share the memory of this host. Collective; errors of `map_local_peers`."""
    rank, ranks = job.layout.rank, job.layout.local
    size = len(ranks)
    sizes = [shm_transport_bytes(size), shm_backend_bytes()]
    timeout = config.start_timeout_seconds
    peers, (transport_memory, part) = map_local_peers(job.rendezvous, rank, ranks, job.generation, timeout, sizes)
    looks = _spin_count(_SHM_LOOKS, size, peers.pids)
    backend = ShmBackend(peers, part, looks)
    _use_region_cache(backend, job, peers)
    try:
        backend.try_cross_memory(time.monotonic() + timeout)
    except BaseException:
        peers.close()
        raise
    targets = [r for r in range(size) if r != rank]
    transport = ShmTransport(
        transport_memory.arrays, rank, targets if rank == 0 else [0], targets if rank == 0 else [0]
    )
    coordinator = create_coordinator(config, size) if rank == 0 else None

    def release() -> None:
        peers.leave()
        backend.close()
        peers.close()

    device = create_device_backend(config, backend)
    engine = Engine(backend, transport, peers, coordinator, config.deadline_seconds, looks, device)
    engine.segment = peers
    _enable_stall_check(engine, config, peers)
    return engine, release


def create_multi_host_engine(
    job: JobRendezvous, choice: BackendChoice, config: Config
) -> tuple[Engine, ReleaseCallback]:
    """Create the engine of a job whose ranks do not all share memory. Collective.

    Raises:
        CollectiveError: ranks did not come, or died.
        ConfigError: there is no such network interface.
        AuthenticationError: a process that does not know the secret answers in a rank's place.
    """
    layout, until = job.layout, time.monotonic() + config.start_timeout_seconds
    rank, size = layout.rank, layout.size
    with ExitStack() as undo:
        undo.callback(job.rendezvous.close)  # connections are made when they are needed
        membership = undo.enter_context(closing(_create_membership(job, config)))
        peers, local = _connect_local_peers(job, config) if choice.shares_memory else (None, NullBackend())
        if peers is not None:
            undo.callback(peers.close)
        star, mesh = _connect_transport(job, config, membership, until)
        undo.callback(star.close)
        undo.callback(mesh.close)
        detector = FailureDetector(membership, peers, star.lost)
        network = undo.enter_context(closing(_create_network(choice, job, mesh, detector, config)))
        groups = layout.hosts if choice.shares_memory else [(r,) for r in range(size)]
        backend = undo.enter_context(closing(compose_backend(groups, rank, local, network, range(size), until)))
        coordinator = create_coordinator(config, size, choose_control_tree(job, config)) if rank == 0 else None
        looks, device = _spin_count(_SYSCALL_LOOKS, len(layout.local)), create_device_backend(config, backend)
        engine = Engine(backend, star, detector, coordinator, config.deadline_seconds, looks, device)
        if isinstance(network, TcpNetwork):
            engine.traffic = engine.tunable = network
        if peers is not None:
            engine.segment = peers
        _enable_stall_check(engine, config, peers)
        resources = undo.pop_all()

    def release() -> None:
        detector.leave()
        resources.close()

    return engine, release


def _create_membership(job: JobRendezvous, config: Config) -> MembershipClient:
    layout = job.layout
    return MembershipClient(
        job.address,
        job.secret,
        f"{job.namespace} {job.generation}",
        layout.rank,
        layout.size,
        timeout_seconds=config.start_timeout_seconds,
        peer_timeout_seconds=config.peer_timeout_seconds,
        host_id=config.host_id or "",
        tls=job.tls,
    )


def _connect_local_peers(job: JobRendezvous, config: Config) -> tuple[LocalPeers | None, ShmBackend | NullBackend]:
    """Connect the other ranks of this host, if there are any; return them with the backend of all of them."""
    layout, timeout = job.layout, config.start_timeout_seconds
    if len(layout.local) == 1:
        return None, NullBackend()
    sizes = [shm_backend_bytes()]
    peers, (part,) = map_local_peers(job.rendezvous, layout.rank, layout.local, job.generation, timeout, sizes)
    peers.name_host(layout.hostnames[layout.rank])
    backend = ShmBackend(peers, part, _spin_count(_SHM_LOOKS, peers.size, peers.pids))
    _use_region_cache(backend, job, peers)
    try:
        backend.try_cross_memory(time.monotonic() + timeout)
    except BaseException:
        peers.close()
        raise
    return peers, backend


def _use_region_cache(backend: ShmBackend, job: JobRendezvous, peers: LocalPeers) -> None:
    if job.region_cache is not None:
        job.region_cache.enter_view(peers.pids)
        backend.region_cache = job.region_cache


def _connect_transport(
    job: JobRendezvous, config: Config, membership: MembershipClient, until: float
) -> tuple[TcpStarTransport, ConnectionPool]:
    """Connect the transport of control messages, and make the pool of all other connections."""
    layout = job.layout
    address, reason = choose_address(config.network_interfaces, split_address(job.address)[0])
    _log.debug("rank %d listens at %s: %s", layout.rank, address, reason)
    rendezvous = PrefixRendezvous(job.rendezvous, str(job.generation))
    silence = config.peer_timeout_seconds
    mesh = ConnectionPool(layout.rank, layout.size, rendezvous, job.secret, address, silence, tls=job.tls)
    tree = choose_control_tree(job, config)
    peers = [r for r in range(layout.size) if r != layout.rank] if layout.rank == 0 else [0]
    if tree is not None:
        peers = list(tree.neighbors(layout.rank))

    def waiting(missing: Sequence[int]) -> None:
        error = membership.failure(missing)
        if error is not None:
            raise error

    try:
        streams = mesh.open(peers, _CONTROL_PURPOSE, until, waiting)
    except BaseException:
        mesh.close()
        raise
    if tree is not None and layout.rank and tree.children(layout.rank):
        return RelayTransport(streams, layout.rank, tree), mesh
    return TcpStarTransport(streams), mesh


def choose_control_tree(job: JobRendezvous, config: Config) -> ControlTree | None:
    """Return the tree on which control messages travel between hosts; None: each rank has a connection to rank 0.

    An elastic job has none: the ranks that a collective has waited for until its deadline leave its view, and of those
    below a relay that is stopped nobody could say whether they are missing.
    """
    layout, least = job.layout, config.control_tree_ranks
    if not least or layout.size < max(least, 3) or job.region_cache is not None:
        return None
    return ControlTree(layout.hosts)


def _create_network(
    choice: BackendChoice, job: JobRendezvous, mesh: ConnectionPool, detector: FailureDetector, config: Config
) -> HostNetwork:
    if choice.network == "mpi":
        from reigen.backends.mpi.network import MpiNetwork

        layout, rendezvous = job.layout, PrefixRendezvous(job.rendezvous, str(job.generation))
        launched, looks = job.launched or range(layout.size), _spin_count(_SYSCALL_LOOKS, len(layout.local))
        return MpiNetwork(
            mpi_comm_world(os.environ), launched, layout.rank, rendezvous, failure=detector.exit_error, looks=looks
        )
    if choice.network != "tcp":
        raise AssertionError(f"nothing creates the network {choice.network!r}")
    algorithm, num_sockets = config.network_parameters()
    network = TcpNetwork(
        mesh, failure=detector.exit_error, algorithm=algorithm, num_sockets=num_sockets, hosts=job.layout.hostnames
    )
    if num_sockets != config.tcp_sockets:
        network.tune(algorithm, config.tcp_sockets)
    return network


def _spin_count(looks: int, num_local: int, pids: Sequence[int] = ()) -> int:
    """Return ``looks``, or 0 with more ranks on this host than processors for them, where it would take others' cores.

    ``pids`` are the ranks' process ids, as far as they are known: each may be bound to processors of its own.
    """
    cpus = os.sched_getaffinity(0)
    for pid in pids:
        with suppress(OSError):  # it has ended: ranks that wait for it will get an error
            cpus |= os.sched_getaffinity(pid)
    return looks if num_local <= len(cpus) else 0


def _enable_stall_check(engine: Engine, config: Config, peers: LocalPeers | None) -> None:
    if not config.stall_check_disable:
        pids = {} if peers is None else dict(zip(peers.ranks, peers.pids, strict=True))
        engine.enable_stall_check(config.stall_check_seconds, config.stall_shutdown_seconds, pids)
