"""Options of a job, and the listener to its events besides the user."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from reigen.errors import ConfigError
from reigen.launch.agent.agent_protocol import KEEPALIVE_SECONDS
from reigen.launch.elastic.options import MOST_RANKS, ElasticOptions
from reigen.launch.hosts import HostInfo
from reigen.launch.job_state import FinishJob, ProcessExited
from reigen.launch.local_plan import JobServices, ProcessOptions
from reigen.launch.metrics.options import MetricsOptions
from reigen.launch.payload import InheritedDescriptors
from reigen.launch.ps_processes import FIRST_ELASTIC_NUMBER, ServerOptions
from reigen.launch.ssh.command import SshOptions

if TYPE_CHECKING:
    from reigen.net.tls import TlsContext

_ON = frozenset({"1", "true", "yes", "on"})
_INTERFACES = ("REIGEN_NETWORK_INTERFACES", "HOROVOD_GLOO_IFACE", "DMLC_INTERFACE", "SM_NETWORK_INTERFACE_NAME")
_PEER_TIMEOUT_SECONDS = 20.0
_START_TIMEOUT_SECONDS = 30.0
_NOTICE_GRACE_SECONDS = 30.0
_LONGEST_SILENCE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """Options of the network between hosts: knobs of the ranks (`reigen.config`), for the launcher listens there, too.

    Attributes:
        interfaces: names of those that may be used; empty: the one that leads there.
        peer_timeout_seconds: how long a host may be silent before it counts as lost.
        tls: encrypt every connection.
        start_timeout_seconds: how long ranks wait for each other in the beginning, and the launcher for hosts, too.
    """

    interfaces: tuple[str, ...] = ()
    peer_timeout_seconds: float = _PEER_TIMEOUT_SECONDS
    tls: bool = False
    start_timeout_seconds: float = _START_TIMEOUT_SECONDS

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Read the ranks' environment; values that make no sense are left to the ranks to complain about."""
        listed = _first(environ, *_INTERFACES)
        start = _first(environ, "REIGEN_START_TIMEOUT", "HOROVOD_START_TIMEOUT", "HOROVOD_GLOO_TIMEOUT_SECONDS")
        return cls(
            tuple(name.strip() for name in listed.split(",") if name.strip()),
            _parse_seconds(_first(environ, "REIGEN_PEER_TIMEOUT"), _PEER_TIMEOUT_SECONDS),
            _first(environ, "REIGEN_TLS").strip().lower() in _ON,
            _parse_seconds(start, _START_TIMEOUT_SECONDS),
        )

    @property
    def silence_seconds(self) -> float:
        """Seconds that an agent may be silent: longer than for ranks, so that these get their errors first."""
        return min(max(1.25 * self.peer_timeout_seconds + 1, 3 * KEEPALIVE_SECONDS), _LONGEST_SILENCE_SECONDS)

    @property
    def last_silence_seconds(self) -> float:
        """The same when the job has failed, and no rank waits for an error any more."""
        return min(max(self.peer_timeout_seconds, 3 * KEEPALIVE_SECONDS), _LONGEST_SILENCE_SECONDS)

    def make_tls(self) -> TlsContext | None:
        """Make the TLS context of this process, where it is wanted; raises ConfigError where a package is missing."""
        if not self.tls:
            return None
        from reigen.net.tls import TlsContext  # loads OpenSSL

        return TlsContext()


def notice_grace_seconds(environ: Mapping[str, str]) -> float:
    """Return how long a rank of an elastic job may take from SIGTERM to its end, a knob of the ranks, too."""
    return _parse_seconds(_first(environ, "REIGEN_NOTICE_GRACE"), _NOTICE_GRACE_SECONDS)


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _parse_seconds(text: str, default: float) -> float:
    try:
        seconds = float(text or default)
    except ValueError:
        return default
    return seconds if 0 < seconds < float("inf") else default


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Options of `reigen run`.

    Attributes:
        command: the program and its arguments.
        num_ranks: the number of processes.
        bind, start_timeout_seconds: as in ``launch.local_plan.ProcessOptions``.
        grace_seconds: how long a process may take to stop before it is killed.
        prefix: whether output lines begin with their rank.
        timestamps: whether they begin with the time, before the rank.
        verbose: report which processes are started, where, and why there.
        output_directory: where to keep each rank's output, too: ``rank.N/stdout`` and ``rank.N/stderr``; or None.
        inherited: descriptors that the ranks inherit; see ``launch.payload``.
        hosts: where to run; empty: on this host.
        ssh: options of ssh.
        network: options of the network between hosts.
        exports: variables that go to other hosts although they usually do not.
        sync_directory: where the working directory is copied to on other hosts, and the ranks run; None: they run in
            the same directory as on this host.
        mpi_args: further options of mpirun, where that starts the ranks.
        binding_args: its options that place and bind ranks, instead of those that ``bind`` comes to.
        servers: parameter servers that run beside the ranks; None: none.
        gpus_per_rank: how many of its host's GPUs each rank sees; None: all of them.
        elastic: what makes the job elastic; None: its processes are the same from beginning to end.
        continues: an elastic job goes on when its launcher is lost.
        requeue_on_notice: when the job has ended after its engine had announced an end, have the engine run it again.
        metrics: of the job's processes, for whom.

    Raises:
        ConfigError: one of them makes no sense.
    """

    command: tuple[str, ...]
    num_ranks: int
    bind: str | None = None
    grace_seconds: float = 5.0
    start_timeout_seconds: float | None = None
    prefix: bool = True
    timestamps: bool = False
    verbose: bool = False
    output_directory: Path | None = None
    inherited: InheritedDescriptors | None = None
    hosts: tuple[HostInfo, ...] = ()
    ssh: SshOptions = field(default_factory=SshOptions)
    network: NetworkOptions = field(default_factory=NetworkOptions)
    exports: tuple[str, ...] = ()
    sync_directory: str | None = None
    mpi_args: tuple[str, ...] = ()
    binding_args: tuple[str, ...] = ()
    servers: ServerOptions | None = None
    gpus_per_rank: int | None = None
    elastic: ElasticOptions | None = None
    continues: bool = False
    requeue_on_notice: bool = False
    metrics: MetricsOptions = field(default_factory=MetricsOptions)

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("no command to run")
        if self.num_ranks < 1:
            raise ConfigError(f"the number of processes must be at least 1, not {self.num_ranks}")
        if self.gpus_per_rank is not None and self.gpus_per_rank < 1:
            raise ConfigError(f"--gpus-per-rank must be at least 1, not {self.gpus_per_rank}")
        if self.elastic is not None and self.servers is not None:
            self._check_elastic_servers(self.elastic, self.servers)
        if self.elastic is None and self.servers is not None and self.servers.max_num is not None:
            raise ConfigError(
                "--max-servers: only in elastic jobs can the number of server processes change: --min-np makes one"
            )
        if self.elastic is not None and self.sync_directory is not None:
            raise ConfigError("--sync-dst-dir: hosts come later to an elastic job; use a directory that all share")
        if self.continues and self.elastic is None:
            raise ConfigError("--on-launcher-loss continue: only elastic jobs can go on: --min-np makes one")
        if self.sync_directory == "":
            raise ConfigError("--sync-dst-dir names no directory: '' (~ is the home directory)")
        for what, seconds in (("grace", self.grace_seconds), ("start timeout", self.start_timeout_seconds)):
            if seconds is not None and not 0 <= seconds < float("inf"):
                raise ConfigError(f"the {what} must be a number of seconds, not {seconds:g}")

    def _check_elastic_servers(self, elastic: ElasticOptions, servers: ServerOptions) -> None:
        if elastic.max_ranks >= MOST_RANKS:
            raise ConfigError("-s: servers have to know how many workers an elastic job may have: --max-np, or -np")
        if servers.hosts:
            raise ConfigError("--server-hosts: the servers of an elastic job run on the launcher's host")
        if self.continues:
            raise ConfigError("--on-launcher-loss continue: the servers of an elastic job end with its launcher")
        if elastic.spares:
            raise ConfigError("--spares: a worker of parameter servers has no state that a spare could wait for")

    @property
    def first_ps_number(self) -> int:
        """Number of the first server: behind those of the ranks."""
        return self.num_ranks if self.elastic is None else FIRST_ELASTIC_NUMBER

    @property
    def processes(self) -> ProcessOptions:
        """The part that each host's processes are started with."""
        return ProcessOptions(self.command, self.bind, self.start_timeout_seconds, self.servers, self.gpus_per_rank)


def complain(message: str, command: str = "reigen run") -> None:
    """Write a message for the user to stderr."""
    with suppress(OSError):
        sys.stderr.write(f"{command}: {message}\n")
        sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class JobListener:
    """Listener to a job's events in the launcher's processes. No callback may block for long.

    Attributes:
        complain: something is wrong with the launcher itself, in one line.
        exited: a rank's process has ended.
        started: all processes were started, with these services.
        lost: these ranks are lost with their host, for this reason.
        members: slots of an elastic job's last view, by rank; told before ``finished``.
        finished: nothing of the job is left. None: the last message, about the first failure, goes to stderr.
        described: gets that message, before ``finished`` is told; where that is, only about a server or the scheduler.
    """

    complain: Callable[[str], None] = complain
    exited: Callable[[ProcessExited], None] = lambda event: None
    started: Callable[[JobServices], None] = lambda services: None
    lost: Callable[[Sequence[int], str], None] = lambda ranks, reason: None
    members: Callable[[Sequence[int]], None] = lambda slots: None
    finished: Callable[[FinishJob], None] | None = None
    described: Callable[[str], None] = lambda message: None
