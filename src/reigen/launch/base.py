"""Interface between a job and the engine that runs it on hosts: launchers, their agents, and their registry.

A launcher says which processes run on which hosts, and gets one agent process onto each host that is not this one. It
starts no rank, decides nothing about the job's end, retries nothing and prints nothing. The supervisor
(``launch.supervision.supervisor``), the same for all launchers, and its agents do that:

a. The factory is called in the process that the user has started, before it forks. It checks what can be checked
   without asking anybody, and raises ConfigError. It starts no thread and connects to nothing.
b. ``allocate`` is called in the supervisor. It waits, if it has to, by the function that it is given.
c. ``start_agent`` is called for every other host of the plan, one after the other, without waiting for any of them.
   The agent speaks through stdin and stdout of the client process (``launch.agent.agent_protocol``), which carries
   bytes as they are; the job's secret goes that way, and in no other. Nothing starts unless all agents are ready.
   Where an engine gives a process but no stream of bytes, ``start_agents`` of a ``DialBackStarter`` is called once, for
   all of them: it brings each agent a dial text, by which it connects to the supervisor (``launch.agent.dial_back``).
   In an elastic job both are called again for hosts that come later, and for those whose agent has gone.
d. Agents end when their stdin is closed, and client processes with them; one that does not, or whose job cannot be
   started, is killed. ``explain_exit`` is asked about agents that end by themselves.
e. ``close`` is called when nothing of the job runs any more: in the supervisor, and in the process of step a, where it
   is the only call if the supervisor was killed.

Hosts of an elastic job may come and go. An engine that knows of that has a ``poll`` in its plan, which says which hosts
there are now. It is asked each second, and says all of it each time, so that no word can be missed. A launcher that can
get more hosts from its engine does that by itself: the job wants ``max_ranks`` slots from beginning to end.

A launcher whose engine starts the ranks itself, as mpirun does, has a plan whose ``processes`` are commands of the
engine for this host, and no agents.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol, cast

from reigen.errors import ConfigError, LaunchError
from reigen.launch.hosts import HostAssignment, HostInfo, assign_ranks, assign_ranks_and_servers, is_this_host
from reigen.launch.job_state import FinishJob
from reigen.launch.local_plan import ProcessSpec
from reigen.launch.options import LaunchOptions
from reigen.launch.supervision.event_loop import LauncherLoop

#: Where the factories of Reigen's own launchers are; a module is imported when its launcher is chosen.
BUILT_IN_LAUNCHERS: Mapping[str, str] = {
    "local": "reigen.launch.local:local_launcher",
    "lsf": "reigen.launch.lsf:LsfLauncher",
    "mpi": "reigen.launch.mpi.launcher:MpiLauncher",
    "pbs": "reigen.launch.pbs:PbsLauncher",
    "sge": "reigen.launch.sge.launcher:SgeLauncher",
    "slurm": "reigen.launch.slurm.launcher:SlurmLauncher",
    "ssh": "reigen.launch.ssh.launcher:ssh_launcher",
    "yarn": "reigen.launch.yarn.launcher:YarnLauncher",
}
#: Entry points of this group, in other packages, are launchers, too.
ENTRY_POINT_GROUP = "reigen.launchers"
#: Used where hosts are named and no launcher is. With this host alone, no ssh is needed.
DEFAULT_LAUNCHER = "ssh"

_PYTHON_PROBLEMS = (
    (r"unknown option:? -P|no such option: -P", "its Python is older than 3.11", "name another: --remote-python"),
    (r"No module named '?reigen\.", "another Reigen is installed there", "install the same version on all hosts"),
    (r"No module named '?reigen'?", "Reigen is not installed there", "install the same version on all hosts"),
    (r"No module named '?(\w+)'?", "a library that Reigen needs is not installed there", "install Reigen with pip"),
)


@dataclass(frozen=True, slots=True)
class HostProblem:
    """Reason why a host cannot take part: ``what`` is wrong, and ``advice``, which may be empty."""

    host: str
    what: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class AgentCommand:
    """Program that an engine runs on a host, whose users can read it: it holds no secret.

    ``environ`` has the variables without which ``python`` does not find Reigen; all others go through its stdin.
    """

    python: str
    environ: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def with_modules_of(cls, python: str, environ: Mapping[str, str]) -> AgentCommand:
        """Make the command for hosts that find modules where a process with this environment would."""
        # absolute: the agent begins in another directory
        path = [str(Path(entry).absolute()) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        return cls(python, {"PYTHONPATH": os.pathsep.join(path)} if path else {})

    @property
    def argv(self) -> list[str]:
        """Program and arguments, without blanks and quotes of their own."""
        # -P: a module of the directory where the agent begins, the user's home, is nobody's joke.
        return [self.python, "-P", "-m", "reigen.launch.agent"]

    def argv_dialing(self, file: str = "") -> list[str]:
        """Return the words for an agent that dials back, by a dial text in ``file``, or on the first line of stdin.

        The file must be this user's alone (mode 0600). The end of stdin ends the agent.
        """
        return [*self.argv, "--dial", *([file] if file else [])]

    @property
    def argv_with_environ(self) -> list[str]:
        """Return ``argv`` for engines that carry no variables: they are set by ``env``."""
        variables = [f"{name}={text}" for name, text in self.environ.items()]
        return ["env", *variables, *self.argv] if variables else self.argv


@dataclass(frozen=True, slots=True)
class DialCall:
    """Call for the agent of a host: its dial text is one line, for its stdin or a file of this user's alone.

    The text holds a ticket: it must not be in a command line or an environment. It is not shown in ``repr``.
    """

    host: str
    text: str = field(repr=False)


class ExitExplainer(Protocol):
    """Explainer of the ends of agents."""

    def explain_exit(self, host: str, exit_code: int | None, output: str) -> HostProblem:
        """Explain why an agent has not come, or has gone, from the engine's output; as in ``AgentStarter``."""


class AgentCaller(Protocol):
    """Supervisor, as a ``DialBackStarter`` sees it."""

    loop: LauncherLoop

    def exclude_child(self, pid: int) -> None:
        """Exclude a child of this process, and its descendants, from the job's processes."""

    def agent_ended(self, host: str, problem: HostProblem) -> None:
        """Take note that an agent cannot come, or has ended, as its engine says; called from the loop."""

    def has_agent(self, host: str) -> bool:
        """Return whether an agent of this host is awaited, or there."""

    def agent_printed(self, host: str, line: str) -> None:
        """Keep a line of an agent's, or of its engine about it, to be shown where the agent does not come."""


class DialBackStarter(Protocol):
    """Starter of agents that connect to the supervisor by themselves."""

    @property
    def remote_shell(self) -> Sequence[str]:
        """Command line before a host's name for rsync; empty where there is none."""

    def start_agents(self, calls: Sequence[DialCall], agent: AgentCommand, caller: AgentCaller) -> None:
        """Have an agent started for each call, and return at once.

        Called again in an elastic job, for hosts that have come, or whose agent has gone.
        The agents run ``agent.argv_dialing()``, or that with a file's name. Where the engine says that one cannot come
        or has ended, ``caller.agent_ended`` is told; ``caller.loop`` may be used to hear of it.

        Raises:
            LaunchError: the engine cannot be asked.
        """

    def explain_exit(self, host: str, exit_code: int | None, output: str) -> HostProblem:
        """Explain why an agent has gone; the exit code is None, the output as of ``agent_printed``."""

    def close_agents(self) -> None:
        """End what ``start_agents`` has started on this host. May be called twice, and without a start."""


class AgentStarter(Protocol):
    """Starter of agents on other hosts."""

    @property
    def remote_shell(self) -> Sequence[str]:
        """Command line before a host's name for rsync (``rsync -e``); empty where there is none."""

    def start_agent(self, host: str, agent: AgentCommand) -> subprocess.Popen[bytes]:
        """Start the agent of a host (its name is the plan's) and return at once.

        Returns:
            The client process of this host whose stdin and stdout are the agent's (``spawn_client``).

        Raises:
            LaunchError: the client process cannot be started.
        """

    def explain_exit(self, host: str, exit_code: int | None, output: str) -> HostProblem:
        """Explain why an agent has not come, or has gone, from the engine's output.

        Args:
            host: its host.
            exit_code: of the client process; None: it had to be killed.
            output: the client's stderr, and its stdout before the agent's greeting.
        """


@dataclass(frozen=True, slots=True)
class PolledHost:
    """Host that an engine has for an elastic job now.

    Attributes:
        name: unique in the job; the same each time that the host is named.
        slots: processes that it may have.
        address: where the other hosts reach it; empty: at its name.
        environ: variables of its ranks, above all others; None removes one.
    """

    name: str
    slots: int
    address: str = ""
    environ: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The processes of a job, by host.

    Attributes:
        assignments: hosts with their processes, in the order of ranks.
        agents: starts the agents of other hosts; None where all are this one.
        exports_environ: ranks elsewhere get this process's variables; else only Reigen's, Horovod's, and exported ones.
        directory: where the ranks run; None: in this process's working directory, empty: where their agents run.
        addresses: of hosts whose names this one cannot resolve, by name.
        processes: the engine's own commands on this host that start the ranks; None: the ranks are started one by one.
        report_address: own address at which the ranks of such a job can report their metrics.
        describe_end: makes the last message of such a job; None: the supervisor names the rank that failed first.
        kept_variables: beginnings of names of variables that a host keeps where it has them, against the launcher's.
        describe_notice: explains a signal that asks an agent to stop, from its client's output; None: nothing does.
        hint: what the engine may have to do with a failure, for the last message; may be empty. None: nothing.
        requeue: has the engine run the job again when it has ended after a notice, and returns the exit code for that;
            None: it cannot.
        poll: returns the hosts that an elastic job may use now, without waiting; it gets the supervisor's loop, by
            which it may hear of them. None: they stay as they are in ``assignments``.
        is_local: says whether a name is this host's, of hosts that are found later.
        listen_towards: a host, or its address, from which agents dial; empty: the first of the others.
    """

    assignments: Sequence[HostAssignment]
    agents: AgentStarter | DialBackStarter | None = None
    addresses: Mapping[str, str] = field(default_factory=dict)
    processes: Sequence[ProcessSpec] | None = None
    report_address: str = "127.0.0.1"
    describe_end: Callable[[FinishJob], str] | None = None
    kept_variables: tuple[str, ...] = ()
    describe_notice: Callable[[str], str] | None = None
    directory: str | None = None
    exports_environ: bool = True
    hint: Callable[[FinishJob], str] | None = None
    requeue: Callable[[], int] | None = None
    poll: Callable[[LauncherLoop], Sequence[PolledHost]] | None = None
    is_local: Callable[[str], bool] = is_this_host
    listen_towards: str = ""


class Launcher(Protocol):
    """Launcher of a job: gets its processes onto hosts."""

    @property
    def options(self) -> LaunchOptions:
        """Options of the job for its supervisor."""

    def allocate(self, wait: Callable[[float], None]) -> JobPlan:
        """Decide which processes run on which hosts; ``wait`` sleeps so many seconds at most.

        Raises:
            LaunchError: the engine does not give what the job needs (the message says all), or the user stopped it.
        """

    def close(self) -> Sequence[str]:
        """Give back everything that the engine holds for the job; may be called again, and before ``allocate``.

        Returns:
            Whatever could not be given back, each with the command that removes it, for the user.
        """


def assign_processes(
    options: LaunchOptions, hosts: Sequence[HostInfo] | None = None, is_local: Callable[[str], bool] = is_this_host
) -> list[HostAssignment]:
    """Place ranks, servers and scheduler on the given hosts, in the order of ranks; None: those that the user named.

    ``is_local`` says whether a name is this host's.

    Raises:
        ConfigError: too few slots.
    """
    if hosts is None:
        hosts = options.hosts or (HostInfo("localhost", options.num_ranks),)
    if options.servers is None:
        return assign_ranks(hosts, options.num_ranks, is_local)
    return assign_ranks_and_servers(hosts, options.num_ranks, options.servers, is_local)


LauncherFactory = Callable[[LaunchOptions, Mapping[str, str]], Launcher]


def find_launcher(name: str) -> LauncherFactory:
    """Import a launcher's factory by the name of a built-in one, of an entry point, or as ``module:factory``.

    Raises:
        ConfigError: there is no such launcher, or it cannot be imported.
        LaunchError: its module raises an error.
    """
    target = name if ":" in name else BUILT_IN_LAUNCHERS.get(name)
    if target is None:
        added = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
        target = added.get(name)
        if target is None:
            known = ", ".join(sorted({*BUILT_IN_LAUNCHERS, *added}))
            raise ConfigError(f"--launcher {name}: there is no such launcher; there are {known}, and MODULE:FACTORY")
    module, _, attribute = target.partition(":")
    try:
        return cast(LauncherFactory, getattr(import_module(module), attribute))
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--launcher {name}: {target} cannot be imported: {error}") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise LaunchError(f"--launcher {name}: {target} raised an error when it was imported: {reason}") from error


def explain_agent_exit(host: str, exit_code: int | None, output: str, python: str) -> HostProblem:
    """Explain the end of an agent whose client did its part: by Python's or Reigen's output (`AgentStarter`)."""
    last = last_line(output)
    for pattern, what, advice in _PYTHON_PROBLEMS:
        if re.search(pattern, output, re.IGNORECASE):
            return HostProblem(host, f"{what} ({last})", advice)
    if exit_code in {126, 127}:
        return HostProblem(host, f"there is no {python} ({last})", "name the Python there: --remote-python")
    return HostProblem(host, f"the agent ended with exit code {exit_code}: {last or 'it did not say why'}")


def find_problem(
    host: str, output: str, problems: Sequence[tuple[str, str, str]], begin: str = ""
) -> HostProblem | None:
    """Find the first known problem in the words of an engine's client; None: there is none.

    Args:
        host: that it is about.
        output: the client's.
        problems: pattern of a line, its meaning and advice each; the first that matches holds.
        begin: pattern by which such lines begin.
    """
    for pattern, what, advice in problems:
        if match := re.search(rf"^{begin}.*({pattern}).*$", output, re.MULTILINE | re.IGNORECASE):
            return HostProblem(host, f"{what} ({match[0].strip()})", advice)
    return None


def last_line(output: str) -> str:
    """Return the last line that holds something, or an empty text."""
    return next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
