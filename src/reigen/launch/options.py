"""Options of a job, and the listener to its events besides the user."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from reigen.errors import ConfigError
from reigen.launch.hosts import HostInfo
from reigen.launch.job_state import FinishJob, ProcessExited
from reigen.launch.local_plan import ProcessOptions
from reigen.launch.network_options import NetworkOptions
from reigen.launch.payload import InheritedDescriptors
from reigen.launch.ps_processes import ServerOptions
from reigen.launch.ssh.command import SshOptions


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

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("no command to run")
        if self.num_ranks < 1:
            raise ConfigError(f"the number of processes must be at least 1, not {self.num_ranks}")
        if self.sync_directory == "":
            raise ConfigError("--sync-dst-dir names no directory: '' (~ is the home directory)")
        for what, seconds in (("grace", self.grace_seconds), ("start timeout", self.start_timeout_seconds)):
            if seconds is not None and not 0 <= seconds < float("inf"):
                raise ConfigError(f"the {what} must be a number of seconds, not {seconds:g}")

    @property
    def processes(self) -> ProcessOptions:
        """The part that each host's processes are started with."""
        return ProcessOptions(self.command, self.bind, self.start_timeout_seconds, self.servers)


def complain(message: str) -> None:
    """Write a message for the user to stderr."""
    with suppress(OSError):
        sys.stderr.write(f"reigen run: {message}\n")
        sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class JobListener:
    """Listener to a job's events in the launcher's processes. No callback may block for long.

    Attributes:
        complain: something is wrong with the launcher itself, in one line.
        exited: a rank's process has ended.
        lost: these ranks are lost with their host, for this reason.
        finished: nothing of the job is left. None: the last message, about the first failure, goes to stderr.
    """

    complain: Callable[[str], None] = complain
    exited: Callable[[ProcessExited], None] = lambda event: None
    lost: Callable[[Sequence[int], str], None] = lambda ranks, reason: None
    finished: Callable[[FinishJob], None] | None = None
