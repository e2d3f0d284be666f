"""Discovery of a job's scheduler and secret; choice of this process's own address.

Without a secret in the environment, all processes of a job are on one host. The scheduler makes a secret and hands it,
with its address, through a Unix socket with an abstract name to processes that could read its memory as well
(`cluster.bootstrap.local`). The name follows from DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, so several jobs of a host
meet apart. A scheduler that is started again must find the secret of its job, or no node could talk to it: one of the
workers and servers, whichever comes first to a second abstract name, keeps it there.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from reigen.cluster.addresses import choose_listen_address, is_local_address
from reigen.cluster.bootstrap.local import (
    LocalBootstrapServer,
    ServiceEndpoint,
    bootstrap_socket_name,
    fetch_endpoints,
    is_served,
)
from reigen.errors import ConfigError
from reigen.kv.membership.environment import ProcessConfig
from reigen.net.auth import SECRET_BYTES
from reigen.net.interfaces import choose_address, local_addresses
from reigen.net.listener import join_address

_log = logging.getLogger(__name__)


class SchedulerLocator:
    """Locator of the job's scheduler for one process.

    Raises:
        ConfigError: the scheduler is on another host, and there is no secret.
    """

    def __init__(self, settings: ProcessConfig) -> None:
        self._settings = settings
        self._secret_server: LocalBootstrapServer | None = None
        if settings.secret is None and not is_local_address(settings.scheduler[0]):
            raise ConfigError(_explain_missing_secret(settings))

    @property
    def description(self) -> str:
        """Describe the scheduler's place, for errors."""
        return f"the scheduler at {join_address(*self._settings.scheduler)} (DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT)"

    def candidates(self) -> list[ServiceEndpoint]:
        """Return where the scheduler may be now, most likely place first; nothing while that is not known.

        Raises:
            AuthenticationError: another user, or a process of another container, offers to be the scheduler.
        """
        settings = self._settings
        if settings.secret is None:
            return fetch_endpoints(_socket_name(settings, "scheduler"))
        host, port = settings.scheduler
        hosts = _resolve(host) or [host]  # a connection to the name fails with an error that it means nothing
        if is_local_address(host):  # its name may mean a loopback address here, and another one to all others
            with suppress(ConfigError):
                hosts.append(scheduler_host(settings))
        return [ServiceEndpoint(join_address(one, port), settings.secret) for one in dict.fromkeys(hosts)]

    def keep(self, secret: bytes) -> None:
        """Keep the job's secret for a scheduler that is started again, unless another does, or it is not needed."""
        if self._settings.secret is None and self._secret_server is None:
            with suppress(OSError):
                self._secret_server = LocalBootstrapServer(
                    _socket_name(self._settings, "keeper"), ServiceEndpoint("", secret)
                )

    def close(self) -> None:
        """Keep nothing any more. May be called twice."""
        if self._secret_server is not None:
            self._secret_server.close()


def choose_listen_host(settings: ProcessConfig) -> tuple[str, str]:
    """Choose the address at which a server listens for workers; returns the reason, too.

    Raises:
        ConfigError: DMLC_NODE_HOST is none of this host's, there is no such interface, or no way to the scheduler.
    """
    if settings.node_host is not None:
        return _local_address(settings.node_host, "DMLC_NODE_HOST"), f"DMLC_NODE_HOST is {settings.node_host}"
    return _choose_address(settings)


def expand_interfaces(names: Sequence[str]) -> tuple[str, ...]:
    """Names of interfaces; one that there is not stands for those that begin with it, as DMLC_INTERFACE does."""
    there = local_addresses() if names else {}
    return tuple(
        full
        for name in names
        for full in ([name] if name in there else sorted(one for one in there if one.startswith(name)) or [name])
    )


def scheduler_secret(settings: ProcessConfig) -> tuple[bytes, bool]:
    """Return the job's secret: given, kept by a node of the job, or a new one; and whether a node has kept it.

    Raises:
        ConfigError: the node that keeps it is stopped. With a new secret, the job's processes could not come back.
    """
    if settings.secret is not None:
        return settings.secret, False
    name = _socket_name(settings, "keeper")
    until = time.monotonic() + settings.config.start_timeout_seconds
    while True:
        for pointer in fetch_endpoints(name):
            _log.info("the job's secret was kept by one of its processes: this scheduler follows one that has ended")
            return pointer.secret, True
        if not is_served(name):
            return secrets.token_bytes(SECRET_BYTES), False
        if time.monotonic() > until:
            raise ConfigError(
                f"a process of this host keeps the secret of a job with DMLC_PS_ROOT_PORT {settings.scheduler[1]}, and "
                f"has not answered for {settings.config.start_timeout_seconds:g} s (REIGEN_START_TIMEOUT): let it go "
                "on, or end it, if it was stopped; or give the new job its own port"
            )
        _log.warning("the process that keeps the job's secret does not answer: is it stopped? Asking it again")


def publish_scheduler(settings: ProcessConfig, pointer: ServiceEndpoint, until: float) -> LocalBootstrapServer | None:
    """Hand address and secret to the processes of this host that need it; None: they have been given the secret.

    Raises:
        ConfigError: another scheduler does so for a job of the same name.
    """
    if settings.secret is not None:
        return None
    name = _socket_name(settings, "scheduler")
    while True:
        try:
            return LocalBootstrapServer(name, pointer)
        except OSError as error:
            if time.monotonic() > until:
                raise ConfigError(
                    f"another scheduler on this host uses DMLC_PS_ROOT_PORT {settings.scheduler[1]} (abstract socket "
                    f"{name[1:].decode()}: {error.strerror}): give each job its own port"
                ) from None
        time.sleep(0.05)


def scheduler_host(settings: ProcessConfig) -> str:
    """Return the address on which the scheduler of DMLC_PS_ROOT_URI listens.

    Raises:
        ConfigError: not on this host, as it seems.
    """
    host, _ = settings.scheduler
    if settings.role == "scheduler" and settings.node_host is not None:
        return _local_address(settings.node_host, "DMLC_NODE_HOST")
    if _is_address(host):
        return _local_address(host, "DMLC_PS_ROOT_URI")
    if not is_local_address(host):
        _local_address(host, "DMLC_PS_ROOT_URI")  # raises
    return _choose_address(settings)[0]


def _choose_address(settings: ProcessConfig) -> tuple[str, str]:
    """Choose an address of this host at which other nodes can reach it; returns the reason, too."""
    names, towards = expand_interfaces(settings.config.network_interfaces), settings.scheduler[0]
    if settings.secret is None:  # they are all here
        return choose_address(names, towards)
    return choose_listen_address(names, towards)  # what is a loopback address here means another host elsewhere


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _local_address(host: str, variable: str) -> str:
    """Return an address of this host that a name or an address means."""
    found = _resolve(host)
    for address in found:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
            probe.bind((address, 0))
            if not ipaddress.ip_address(address).is_unspecified:
                return address
    there = ", ".join(address for some in local_addresses().values() for address in some)
    means = f", which means {', '.join(dict.fromkeys(found))}," if found and found != [host] else ""
    raise ConfigError(
        f"{variable} is {host}{means} and that is no address of this host, {socket.gethostname()} ({there}). "
        + (
            "Start the scheduler on the host that it names; or set DMLC_NODE_HOST, for the scheduler alone, to the "
            "address to which that one leads"
            if variable == "DMLC_PS_ROOT_URI"
            else "It names the address at which this process is to be found"
        )
    )


def _resolve(host: str) -> list[str]:
    """Resolve a name or an address, most likely result first; nothing if it means nothing."""
    with suppress(OSError, UnicodeError):
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)]
    return []


def _explain_missing_secret(settings: ProcessConfig) -> str:
    host, port = settings.scheduler
    return (
        f"this {settings.name} is to find its scheduler on {host} (DMLC_PS_ROOT_URI), which is another host, and they "
        "have no secret by which to know each other. Set for the scheduler, the servers and the workers REIGEN_SECRET "
        "(64 hexadecimal digits: export REIGEN_SECRET=$(openssl rand -hex 32)), or REIGEN_SECRET_FILE, the path of a "
        f"file on every host that holds them (mode 0600). Or is {host} not where the scheduler of port {port} runs?"
    )


def _socket_name(settings: ProcessConfig, what: str) -> bytes:
    host, port = settings.scheduler
    host = next(iter(_resolve(host)), host)
    if host == "::1":
        host = "127.0.0.1"  # localhost may mean either
    return bootstrap_socket_name("kv", f"{what} {host} {port}", 1)
