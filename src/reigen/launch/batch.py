"""Jobs of batch systems that name their hosts with slots, and have a remote shell: what their launchers share."""

from __future__ import annotations

import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reigen.errors import ConfigError
from reigen.launch.base import AgentStarter, DialBackStarter, JobPlan, assign_processes
from reigen.launch.engines import EngineJob
from reigen.launch.hosts import HostInfo, is_this_host
from reigen.launch.options import LaunchOptions

#: Exit code by which a job asks to be put into the queue again: Grid Engine's, and LSF's with ``bsub -Q 99``.
REQUEUE_EXIT_CODE = 99


@dataclass(frozen=True, slots=True)
class BatchJob:
    """Job of a batch system, in which this process is.

    Attributes:
        launcher: name of the launcher.
        engine: the batch system, for messages: ``Grid Engine``.
        job_id: the job's number.
        variable: where that is.
        hosts: the job's hosts with their slots, in the order of ranks.
        advice: how to ask for ``N`` slots: ``qsub -pe NAME N``.
        remark: more about the job, in words: ``task 3 of an array``.
    """

    launcher: str
    engine: str
    job_id: str
    variable: str
    hosts: tuple[HostInfo, ...]
    advice: str
    remark: str = ""

    @property
    def num_slots(self) -> int:
        """Slots of all hosts."""
        return sum(host.slots for host in self.hosts)

    @property
    def description(self) -> str:
        """Description in words: ``Grid Engine job 17 (JOB_ID) with 5 slots on 2 hosts (h1:3,h2:2)``."""
        remark = f", {self.remark}" if self.remark else ""
        return f"{self.engine} job {self.job_id} ({self.variable}) with {self._slots}{remark}"

    @property
    def engine_job(self) -> EngineJob:
        """The job for `launch.engines`."""
        return EngineJob(self.launcher, self.description, self.hosts)

    def check_size(self, num_ranks: int) -> None:
        """Raise ConfigError where there are more ranks than slots."""
        if num_ranks > self.num_slots:
            raise ConfigError(
                f"{self.engine} gave this job {self._slots}; -np {num_ranks} is more. Ask for more slots "
                f"({self.advice.replace('N', str(num_ranks))}), or say which host takes how many: "
                f"--launcher {self.launcher} -H HOST:N,HOST:N"
            )

    def is_this_host(self, name: str) -> bool:
        """Return whether a name is this host's; short and long names are the same, where only one host has the name."""
        own, names = socket.gethostname(), {host.name for host in self.hosts}
        if own in names:
            return name == own or (name not in names and is_this_host(name))
        return short_name(name) == short_name(own) or is_this_host(name)

    def find_name(self, name: str) -> str | None:
        """Return the job's name of a host that the user names; None: it is not one of the job's."""
        names = [host.name for host in self.hosts]
        alike = [each for each in names if short_name(each) == short_name(name)]
        if name in names or len(alike) != 1:
            return name if name in names else None
        return alike[0]

    @property
    def _slots(self) -> str:
        slots, hosts = self.num_slots, len(self.hosts)
        listed = ",".join(f"{host.name}:{host.slots}" for host in self.hosts[:8]) + (",..." if hosts > 8 else "")
        return f"{slots} slot{'s' * (slots > 1)} on {hosts} host{'s' * (hosts > 1)} ({listed})"


def parse_host_lines(text: str, file: str) -> tuple[HostInfo, ...]:
    r"""Parse a list with a host on each line, once for each of its slots; raises ConfigError, with the line's number.

    Example:
        >>> parse_host_lines("h2\nh2\nh1\n", "nodes")
        (HostInfo(name='h2', slots=2), HostInfo(name='h1', slots=1))
    """
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if len(words) > 1:
            raise ConfigError(f"line {number} of {file} is {line!r}, not one host")
        for name in words:
            slots[name] = slots.get(name, 0) + 1
    if not slots:
        raise ConfigError(f"{file} names no host")
    return tuple(HostInfo(name, num) for name, num in slots.items())


def read_host_file(file: str, variable: str) -> str:
    """Read a list of hosts that a variable names; raises ConfigError."""
    try:
        return Path(file).read_text()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{variable}, {file}, cannot be read: {reason}") from None


def check_program(program: str, environ: Mapping[str, str], engine: str, advice: str) -> None:
    """Raise ConfigError where a remote shell is not in PATH."""
    if shutil.which(program, path=environ.get("PATH")) is None:
        raise ConfigError(
            f"this is a job of {engine}, but there is no {program} in PATH here, which starts processes on its other "
            f"hosts: add it to PATH ({advice}), or --launcher ssh"
        )


def short_name(name: str) -> str:
    """Return a host's name up to the first dot; an address as it is."""
    return name if name.replace(".", "").isdigit() else name.partition(".")[0]


def deal_slots(hosts: Sequence[HostInfo]) -> list[HostInfo]:
    """Return single slots of the hosts in turn, as long as each has some: h1:3,h2:1 give h1, h2, h1, h1.

    Processes that are dealt out to this list, one by one, take no host's slots twice.
    """
    rounds = range(max(host.slots for host in hosts))
    return [HostInfo(host.name, 1) for each in rounds for host in hosts if host.slots > each]


class BatchLauncher(ABC):
    """Launcher in a job of a batch system.

    The hosts are the job's, or those that the user names, if they are among them; this one is used without agent.

    Args:
        options: of the job.
        environ: of the launcher.
        job: see there.

    Attributes:
        kept_variables: beginnings of names of variables whose values on a host are that host's, where it has them.
        removed_variables: those of an agent, or of the job's script, that are not a rank's.

    Raises:
        ConfigError: the job has too few slots, or not those hosts.
    """

    kept_variables: tuple[str, ...] = ()
    removed_variables: tuple[str, ...] = ()

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str], job: BatchJob) -> None:
        self.job, self.environ = job, environ
        self.options = options = self._with_names_of_job(options)
        if not options.hosts:
            job.check_size(options.num_ranks)
        is_dealt = options.servers is not None and options.servers.round_robin_workers and not options.hosts
        hosts = deal_slots(job.hosts) if is_dealt else options.hosts or job.hosts
        assignments = assign_processes(options, hosts, job.is_this_host)
        removed = dict.fromkeys(self.removed_variables)
        self._assignments = [replace(each, rank_environs=(removed,) * len(each.ranks)) for each in assignments]
        if not all(each.is_local for each in self._assignments):
            self.check_tools()

    @abstractmethod
    def check_tools(self) -> None:
        """Raise ConfigError where the remote shell is missing."""

    @property
    @abstractmethod
    def agents(self) -> AgentStarter | DialBackStarter:
        """Starter of agents on the job's other hosts."""

    def allocate(self, wait: Callable[[float], None]) -> JobPlan:
        """Return the plan: the batch system has granted the hosts before."""
        return JobPlan(
            self._assignments, self.agents, kept_variables=self.kept_variables, is_local=self.job.is_this_host
        )

    def close(self) -> tuple[str, ...]:
        """Give nothing back: the job is the user's."""
        return ()

    def _with_names_of_job(self, options: LaunchOptions) -> LaunchOptions:
        """Return the options with the job's names of the hosts; raises ConfigError for those that it does not have."""
        of_servers = () if options.servers is None else options.servers.hosts
        named = dict.fromkeys([*(host.name for host in options.hosts), *of_servers])
        found = {name: self.job.find_name(name) or (name if self.job.is_this_host(name) else None) for name in named}
        if foreign := [name for name, own in found.items() if own is None]:
            hosts = ", ".join(host.name for host in self.job.hosts)
            raise ConfigError(
                f"{', '.join(foreign)}: not among the hosts of {self.job.engine} job {self.job.job_id}, {hosts}; "
                "to start by ssh all the same: --launcher ssh"
            )
        own_hosts = tuple(HostInfo(found[host.name] or host.name, host.slots) for host in options.hosts)
        servers = options.servers
        if servers is not None:
            servers = replace(servers, hosts=tuple(found[name] or name for name in of_servers))
        return replace(options, hosts=own_hosts, servers=servers)
