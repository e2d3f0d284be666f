"""Discovery of a job's control service, for ranks of any launcher.

`reigen run` hosts the service and tells the ranks where it is. Where another launcher has started them, rank 0 hosts
it, and the others have to learn two things before they can trust it: where, and which secret. How, is one decision
(`choose_discovery_method`):

HANDOVER  All ranks are on one host: rank 0 hands both over through a Unix socket, to processes that the kernel lets
          read each other's memory, or that have been given one secret.
KNOWN     All ranks have been given one secret (REIGEN_SECRET, REIGEN_SECRET_FILE), and the launcher names the host of
          rank 0. The ports follow from the secret: several, tried in turn, since one may be taken.
MPI       An MPI launcher has started the ranks, and mpi4py is there: rank 0 tells all others over MPI.

The secret that authenticates connections is not the given one, but made from it and the job's name, so that a file may
serve many jobs and none of them takes another for itself.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

import msgspec

from reigen.cluster.addresses import choose_listen_address, is_local_address
from reigen.cluster.bootstrap.job_credentials import (
    PORT_VARIABLE,
    SECRET_FILE_VARIABLE,
    JobCredentials,
    derive_job_secret,
    derive_ports,
)
from reigen.cluster.bootstrap.local import LocalBootstrapServer, ServiceEndpoint, bootstrap_socket_name, fetch_endpoints
from reigen.cluster.bootstrap.mpi_library import can_use_mpi
from reigen.cluster.bootstrap.rank_lock import claim_rank
from reigen.cluster.environ import SECRET_VARIABLE, JobInfo
from reigen.cluster.membership.control_service import ControlService
from reigen.cluster.membership.rendezvous import RendezvousClient
from reigen.errors import AuthenticationError, ConfigError, DeadlineError, PeerLostError
from reigen.net.auth import SECRET_BYTES, Identity, ProcessRole
from reigen.net.listener import join_address

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext

_log = logging.getLogger(__name__)

_AGAIN_SECONDS = 0.1
#: A host that does not even refuse may be asked that long before another of its ports is tried.
_TRY_SECONDS = 2.0
#: Characters of what rank 0 tells over MPI when it cannot host the service.
_MAX_REASON = 200


@dataclass(frozen=True)
class ServiceAccess:
    """Access to the job's control service. On rank 0 it may hold the service itself.

    Attributes:
        address: ``host:port``.
        secret: the job's 32 bytes. Not shown in ``repr``.
        reason: how they were learnt, in words.
        close: ends this process's service, behind its last use of the job: `init` may follow `shutdown`. Repeatable.
    """

    address: str
    secret: bytes = field(repr=False)
    reason: str
    close: Callable[[], None] = field(default=lambda: None, repr=False)


class DiscoveryMethod(Enum):
    """Method by which ranks find the service: see the module."""

    GIVEN = auto()
    HANDOVER = auto()
    KNOWN = auto()
    MPI = auto()


@dataclass(frozen=True)
class ServiceOptions:
    """Addresses, timeouts and encryption of the service.

    Attributes:
        timeout_seconds: how long to wait for rank 0.
        interfaces: where rank 0 may listen, by preference; none: whichever leads to the others.
        peer_timeout_seconds: after so much silence a host counts as lost.
        tls: encrypt everything that is said to the service; the same on all ranks.
    """

    timeout_seconds: float = 30.0
    interfaces: tuple[str, ...] = ()
    peer_timeout_seconds: float = 20.0
    tls: TlsContext | None = None


def locate_service(job: JobInfo, environ: Mapping[str, str], options: ServiceOptions) -> ServiceAccess:
    """Locate the control service of a job of several processes; rank 0 starts one where the launcher has none.

    Args:
        job: as `reigen.cluster.environ.detect_job` found it.
        environ: where REIGEN_SECRET, REIGEN_SECRET_FILE and REIGEN_RENDEZVOUS_PORT are.
        options: how.

    Returns:
        The access. It must be kept for as long as a rank may want to join.

    Raises:
        ConfigError: the ranks have no way to prove to each other that they belong together, says what to set; or
            another process is this rank, or no port is free.
        DeadlineError: rank 0 did not come, or cannot be reached; says what was tried.
        AuthenticationError: rank 0 has another secret, or is in another container and there is none; or somebody else
            has taken its place.
    """
    given = JobCredentials.of(environ)
    coordinator_is_here = job.coordinator is not None and is_local_address(job.coordinator)
    mpi = can_use_mpi(environ) if job.by_mpi else (False, "")
    method, reason = choose_discovery_method(
        job, has_secret=given.secret is not None, coordinator_is_here=coordinator_is_here, mpi=mpi
    )
    if job.rendezvous is not None and job.secret is not None:
        return ServiceAccess(job.rendezvous, job.secret, reason)
    if method is DiscoveryMethod.MPI:
        return _locate_by_mpi(job, environ, reason, options)
    if method is DiscoveryMethod.HANDOVER or given.secret is None or job.coordinator is None:
        return _locate_by_handover(job, given.secret, reason, options)
    return _locate_by_secret(job, given.secret, given.port or job.port, job.coordinator, reason, options)


def choose_discovery_method(
    job: JobInfo, *, has_secret: bool, coordinator_is_here: bool, mpi: tuple[bool, str]
) -> tuple[DiscoveryMethod, str]:
    """Choose how the ranks find the service; returns the reason, too.

    Args:
        job: the job.
        has_secret: all ranks have been given one.
        coordinator_is_here: the host of rank 0 is known, and it is this one.
        mpi: whether the ranks can talk over MPI, and why or why not.

    Raises:
        ConfigError: there is no way.
    """
    if job.rendezvous is not None and job.secret is not None:
        return DiscoveryMethod.GIVEN, "the launcher hosts the control service"
    if job.is_on_one_host:
        return DiscoveryMethod.HANDOVER, f"all {job.size} ranks are on one host: rank 0 hosts the control service"
    if has_secret and job.coordinator is not None:
        return DiscoveryMethod.KNOWN, f"rank 0 hosts the control service on {job.coordinator}; the secret was given"
    if mpi[0]:
        return DiscoveryMethod.MPI, f"rank 0 hosts the control service and tells the others over MPI: {mpi[1]}"
    if not has_secret and job.local is None and coordinator_is_here:
        return DiscoveryMethod.HANDOVER, f"rank 0 hosts the control service on {job.coordinator}, which is this host"
    raise ConfigError(_explain_missing_settings(job, has_secret, mpi[1]))


def _explain_missing_settings(job: JobInfo, has_secret: bool, no_mpi: str) -> str:
    beginning = f"{job.launcher} started this process as rank {job.rank} of {job.size} ({job.reason})"
    lines = [f"{beginning}, but the ranks cannot find and authenticate each other. Set, for all of them:"]
    if not has_secret:
        lines.append(
            f"  {SECRET_VARIABLE}: 64 hexadecimal digits, generated anew for each job (export "
            f"{SECRET_VARIABLE}=$(openssl rand -hex 32)), if the launcher passes it on; or {SECRET_FILE_VARIABLE}: the "
            "path, on every host, of a file that holds them (umask 077; openssl rand -hex 32 > FILE)"
        )
    if job.coordinator is None:
        lines.append("  MASTER_ADDR: name or address of the host where rank 0 runs")
    if no_mpi:
        lines.append(f"Or let them talk over MPI, which needs none of this; now they cannot: {no_mpi}.")
    lines.append("Or start the job with `reigen run -np N -H HOST:RANKS,... command`, which needs none of this.")
    return "\n".join(lines)


def _start_service(secret: bytes, host: str, port: int, options: ServiceOptions) -> ControlService:
    """Start the service and claim rank 0: no other process is rank 0 of this job any more."""
    me = Identity(ProcessRole.RANK, 0)
    server = ControlService(
        secret, host, port, me=me, peer_timeout_seconds=options.peer_timeout_seconds, tls=options.tls
    )
    server.start()
    try:
        with closing(RendezvousClient(server.address, secret, 0, options.timeout_seconds, options.tls)) as client:
            claim_rank(client, 0)
    except BaseException:
        server.close()
        raise
    return server


def _locate_by_handover(job: JobInfo, given: bytes | None, reason: str, options: ServiceOptions) -> ServiceAccess:
    until = time.monotonic() + options.timeout_seconds
    name = bootstrap_socket_name(job.launcher, job.job_id, job.size)
    key = None if given is None else derive_job_secret(given, job.job_id)
    if job.rank != 0:
        endpoint = _find_service(lambda: fetch_endpoints(name, key), job.rank, until, options, is_certain=True)
        return ServiceAccess(endpoint.address, endpoint.secret, reason)
    secret = secrets.token_bytes(SECRET_BYTES)
    server = _start_service(secret, "127.0.0.1", 0, options)
    with ExitStack() as held:
        held.callback(server.close)
        held.callback(_serve_local_ranks(name, ServiceEndpoint(server.address, secret), key, until, options).close)
        return ServiceAccess(server.address, secret, reason, held.pop_all().close)


def _serve_local_ranks(
    name: bytes, endpoint: ServiceEndpoint, given: bytes | None, until: float, options: ServiceOptions
) -> LocalBootstrapServer:
    """Take the name, waited for: its last owner may just be ending."""
    while True:
        try:
            return LocalBootstrapServer(name, endpoint, given)
        except OSError as error:
            for other in fetch_endpoints(name, given):
                _check_service(other, 0, until, options.tls)  # says which process is rank 0 already
            if time.monotonic() >= until:
                raise ConfigError(
                    "another process is already rank 0 of a job like this one, on this host (abstract socket "
                    f"{name[1:].decode()}: {error.strerror}). Two jobs whose launchers call them the same need "
                    "different MASTER_PORTs"
                ) from None
        time.sleep(_AGAIN_SECONDS)


def _locate_by_secret(
    job: JobInfo, given: bytes, port: int | None, coordinator: str, reason: str, options: ServiceOptions
) -> ServiceAccess:
    secret = derive_job_secret(given, job.job_id)
    ports = derive_ports(secret) if port is None else [port]
    if job.rank == 0:
        return _start_public_service(secret, coordinator, ports, reason, options)
    until = time.monotonic() + options.timeout_seconds
    endpoints = [ServiceEndpoint(join_address(coordinator, one), secret) for one in ports]
    endpoint = _find_service(lambda: endpoints, job.rank, until, options, is_certain=port is not None)
    return ServiceAccess(endpoint.address, secret, reason)


def _locate_by_mpi(job: JobInfo, environ: Mapping[str, str], reason: str, options: ServiceOptions) -> ServiceAccess:
    from reigen.cluster.bootstrap.mpi import broadcast_over_mpi

    until = time.monotonic() + options.timeout_seconds
    if job.rank != 0:
        endpoint = msgspec.msgpack.decode(broadcast_over_mpi(None, until, environ), type=ServiceEndpoint)
        if not endpoint.secret:  # the address is none, but the reason
            raise ConfigError(f"{endpoint.address} (told by rank 0)")
        return ServiceAccess(endpoint.address, endpoint.secret, reason)
    secret = secrets.token_bytes(SECRET_BYTES)
    try:
        host, why = choose_listen_address(options.interfaces, job.coordinator)
        server = _start_service(secret, host, 0, options)
    except ConfigError as error:
        broadcast_over_mpi(msgspec.msgpack.encode(ServiceEndpoint(str(error)[:_MAX_REASON], b"")), until, environ)
        raise
    try:
        broadcast_over_mpi(msgspec.msgpack.encode(ServiceEndpoint(server.address, secret)), until, environ)
    except BaseException:
        server.close()
        raise
    return ServiceAccess(server.address, secret, f"{reason}; it listens on {server.address}: {why}", server.close)


def _start_public_service(
    secret: bytes, coordinator: str, ports: Sequence[int], reason: str, options: ServiceOptions
) -> ServiceAccess:
    if not is_local_address(coordinator):  # behind another address, or it is not here that rank 0 was meant to be
        for port in ports:
            _check_taken(coordinator, port, secret, options)
        _log.warning(
            "rank 0 runs on %s, but the others look for it at %s (MASTER_ADDR, or what the launcher says), which is no "
            "address of this host: unless that leads here, they do not find it",
            os.uname().nodename,
            coordinator,
        )
    host, why = choose_listen_address(options.interfaces, coordinator)
    problems = []
    for port in ports:
        try:
            server = _start_service(secret, host, port, options)
        except OSError as error:
            problems.append(f"{port}: {os.strerror(error.errno) if error.errno else error}")
            _check_taken(host, port, secret, options)
            continue
        return ServiceAccess(server.address, secret, f"{reason}; it listens on {server.address}: {why}", server.close)
    raise ConfigError(
        f"rank 0 can host the job's control service on none of its ports at {host} ({'; '.join(problems)}); "
        f"{PORT_VARIABLE}, set for all ranks, names another one"
    )


def _find_service(
    candidates: Callable[[], list[ServiceEndpoint]],
    rank: int,
    until: float,
    options: ServiceOptions,
    *,
    is_certain: bool,
) -> ServiceEndpoint:
    """Find the service of this life of the job, waited for; ``is_certain``: a listener there must be it."""
    outcomes: dict[str, str] = {}  # by address
    while True:
        for endpoint in candidates():
            try:
                problem = _check_service(endpoint, rank, until, options.tls)
            except AuthenticationError as error:
                if is_certain:
                    raise
                outcomes[endpoint.address] = problem = str(error)
            if not problem:
                return endpoint
            outcomes.setdefault(endpoint.address, problem)  # later it may have gone
        if time.monotonic() >= until:
            break
        time.sleep(_AGAIN_SECONDS)
    lines = [
        f"  {', '.join(address for address, each in outcomes.items() if each == outcome)}: {outcome}"
        for outcome in dict.fromkeys(outcomes.values())
    ]
    hint = "; is its secret the same, and does a firewall let these ports through?" if lines else ""
    raise DeadlineError(
        f"rank 0 did not call init() within {options.timeout_seconds:g} s (REIGEN_START_TIMEOUT sets how long to "
        "wait), or its control service cannot be reached" + hint + "".join(f"\n{line}" for line in lines),
        ranks=(0,),
    )


def _check_taken(host: str, port: int, secret: bytes, options: ServiceOptions) -> None:
    """Raise ConfigError if rank 0 of this job serves there already; a stranger's port is just taken."""
    endpoint, until = ServiceEndpoint(join_address(host, port), secret), time.monotonic() + _TRY_SECONDS
    with suppress(AuthenticationError):
        _check_service(endpoint, 0, until, options.tls)


def _check_service(endpoint: ServiceEndpoint, rank: int, until: float, tls: TlsContext | None) -> str:
    """Return why a service is not the one to join; empty if it is.

    A rank whose process has ended, and whose next one this is, meets the service of the job's last life as long as rank
    0 lives on there. That service goes with rank 0's process, so the next one must be waited for.
    """
    left = max(0.2, min(_TRY_SECONDS, until - time.monotonic()))
    try:
        with closing(RendezvousClient(endpoint.address, endpoint.secret, rank, left, tls)) as client:
            return "rank 0 has not ended yet, and this process follows one that has" if claim_rank(client, rank) else ""
    except TimeoutError:
        return "no answer"
    except PeerLostError as error:
        cause = error.__context__  # who looks for a service need not hear that it has gone
        return cause.strerror if isinstance(cause, OSError) and cause.strerror else str(error)
