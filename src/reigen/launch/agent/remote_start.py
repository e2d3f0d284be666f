"""Start of the agents before a job starts: all at once, and nothing starts unless all of them are ready."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeGuard, cast

from reigen.cluster.environ import SECRET_VARIABLE
from reigen.errors import LaunchError
from reigen.launch.agent import agent_protocol, rsync
from reigen.launch.agent.agent_client import AgentPhase
from reigen.launch.agent.agent_protocol import KEEPALIVE_SECONDS
from reigen.launch.agent.dial_calls import DialCalls, DialingOwner
from reigen.launch.agent.rsync import ChildWaiter
from reigen.launch.base import AgentCommand, AgentStarter, DialBackStarter, HostProblem, JobPlan
from reigen.launch.env_export import PACKAGE_DIRECTORY, select_exported
from reigen.launch.hosts import HostAssignment, choose_own_address
from reigen.launch.local_plan import JobServices
from reigen.launch.options import LaunchOptions, complain
from reigen.launch.payload import PAYLOAD_CHUNK_BYTES

#: Least time in seconds for a host to log in, to start Python, and to answer.
_CONNECT_SECONDS = 30.0
_PREPARE_SECONDS = 20.0
#: Variables of the launcher's host that always go to others.
_OWN_VARIABLES = ("REIGEN_", "HOROVOD_")
#: Seconds between lines about what is waited for, and most names in one.
_NOTICE_SECONDS = 30.0
_MOST_NAMES = 8
#: Options of Python behind which no script follows: -c and -m, also as the last of several (-Sc).
_NO_SCRIPT = re.compile(r"-[^-XW]*[cm]")


class AgentOwner(ChildWaiter, DialingOwner, Protocol):
    """Owner of the agents, which waits for them, and for processes of this host."""

    def add_agent(self, host: str, process: subprocess.Popen[bytes]) -> None:
        """Talk to an agent through this client process."""


class RemoteStart:
    """Agents of a job's other hosts, until their ranks start. Where there are none, nothing happens.

    Attributes:
        reason: why this host is reached at the address that ``call`` found.
        master: address and port for rank 0's own server, where rank 0 is on another host.
    """

    def __init__(self, options: LaunchOptions, plan: JobPlan, environ: Mapping[str, str], caller: AgentOwner) -> None:
        self._options, self._environ, self._caller = options, environ, caller
        self._plan, self._assignments = plan, plan.assignments
        self.reason = ""
        self.master: tuple[str, int] | None = None
        self._calls: DialCalls | None = None
        self._is_starting = True

    def call(self) -> str:
        """Start the agents; returns the address at which they reach this host, empty where there are none.

        Raises:
            LaunchError: hosts cannot take part: a table of them.
            ConfigError: this host has none of the interfaces that were asked for.
        """
        timeout_seconds = max(self._options.network.start_timeout_seconds, self._options.start_timeout_seconds or 0.0)
        timeout_seconds = max(_CONNECT_SECONDS, timeout_seconds)
        hosts = [each.host for each in self._assignments if not each.is_local]
        if not hosts:
            return ""
        if is_dial_back(self._plan.agents):
            address = self._dial(hosts, timeout_seconds)
            self._gather(AgentPhase.CONNECTED, timeout_seconds)
            return address
        command = AgentCommand.with_modules_of(self._options.ssh.python, self._environ)
        for host in hosts:
            self._caller.add_agent(host, self._pipe_starter.start_agent(host, command))
        self._gather(AgentPhase.CONNECTED, timeout_seconds)
        agents = self._caller.agents
        clients = [each.hello.client for each in agents.values() if each.hello is not None]
        first = next(iter(agents))
        towards = self._plan.addresses.get(first, first)
        address, self.reason = choose_own_address(self._options.network.interfaces, towards, clients)
        return address

    def _dial(self, hosts: Sequence[str], timeout_seconds: float) -> str:
        """Have the agents dial back; returns the address at which they are awaited."""
        assert is_dial_back(self._plan.agents), "asked before"
        network = self._options.network
        address, self.reason = choose_own_address(network.interfaces, self._plan.addresses.get(hosts[0], hosts[0]), [])
        command = AgentCommand.with_modules_of(self._options.ssh.python, self._environ)
        self._calls = DialCalls(self._plan.agents, command, address, network, self._caller, self._on_conflict)
        self._calls.call(hosts, timeout_seconds)
        return address

    def close(self) -> None:
        """Wait for no more agents, and end what has started them on this host. May be called twice."""
        if self._calls is not None:
            self._calls.close()

    def _on_conflict(self, reason: str) -> None:
        if self._is_starting:
            raise LaunchError(f"{reason}: nothing was started; who else has the ticket?")
        complain(f"{reason}; the second one was refused")

    def prepare(self, launcher: str) -> None:
        """Have each host checked for everything that the job needs; ``launcher`` is the service's ``host:port``.

        Raises:
            LaunchError: hosts cannot take part: a table of them.
        """
        directory = self._sync() or (str(Path.cwd()) if self._plan.directory is None else self._plan.directory)
        for assignment in self._assignments:
            agent = self._caller.agents.get(assignment.host)
            if agent is None:
                continue
            command = self._command(assignment)
            agent.send(
                agent_protocol.PrepareRequest(
                    directory=directory,
                    program=command[0],
                    path=self._environ.get("PATH", ""),
                    files=find_scripts(command),
                    launcher=launcher,
                    interfaces=self._options.network.interfaces,
                    silence_seconds=self._options.network.silence_seconds,
                )
            )
        self._gather(AgentPhase.READY, _PREPARE_SECONDS)
        first = self._caller.agents.get(next(each.host for each in self._assignments if 0 in each.ranks))
        if first is not None and first.ready is not None:
            self.master = first.ready.address, first.ready.port

    def _command(self, assignment: HostAssignment) -> tuple[str, ...]:
        """Return the command that a host must be able to run."""
        servers = self._options.servers
        if assignment.ranks or servers is None:
            return self._options.command
        return servers.command or (self._options.ssh.python,)

    def deliver(self) -> None:
        """Send the payload to the hosts, as fast as each of them takes it; raises LaunchError with a table of hosts."""
        if self._options.inherited is None:
            return
        payload = self._options.inherited.payload
        size = os.fstat(payload).st_size
        agents = self._caller.agents.values()
        num_sent = dict.fromkeys(self._caller.agents, 0)
        while any(num_sent[each.host] < size and each.refused is None for each in agents):
            for each in agents:
                while num_sent[each.host] < size and each.refused is None and not each.is_busy:
                    data = os.pread(payload, PAYLOAD_CHUNK_BYTES, num_sent[each.host])
                    num_sent[each.host] += len(data)
                    each.send(agent_protocol.PayloadChunk(data, num_sent[each.host] == size))
            self._caller.turn(KEEPALIVE_SECONDS if any(each.is_busy for each in agents) else 0.0)
        self._gather(AgentPhase.READY, 0.0)

    def start(self, services: JobServices, last_received: Callable[[int], float]) -> None:
        """Have the processes started; the answers are the owner's to wait for.

        ``last_received`` returns when the control service last received a message of an agent, by its number.
        """
        self._is_starting = False
        environ = select_exported(self._environ, self._options.exports)
        if not self._plan.exports_environ:
            environ = {
                name: text for name, text in environ.items() if name in self._options.exports or is_own_variable(name)
            }
        environ.pop(SECRET_VARIABLE, None)  # another one, which must not travel in the clear
        for number, assignment in enumerate(self._assignments):
            agent = self._caller.agents.get(assignment.host)
            if agent is not None:
                agent.last_received_elsewhere = partial(last_received, number)
                agent.send(
                    agent_protocol.StartRequest(
                        number,
                        assignment,
                        self._options.processes,
                        replace(services, secret=agent.mask(services.secret)),
                        environ,
                        PACKAGE_DIRECTORY,
                        self._plan.kept_variables,
                    )
                )

    @property
    def _starter(self) -> AgentStarter | DialBackStarter:
        assert self._plan.agents is not None, "a launcher without agents has no other hosts"
        return self._plan.agents

    @property
    def _pipe_starter(self) -> AgentStarter:
        return cast(AgentStarter, self._starter)

    def _sync(self) -> str:
        """Copy the working directory, if that was asked for; return its place on the hosts, else an empty text."""
        if self._options.sync_directory is None:
            return ""
        if not self._starter.remote_shell:
            raise LaunchError("--sync-dst-dir: this launcher cannot copy to its hosts; use a directory that all share")
        directory = self._options.sync_directory.removeprefix("~/") or "."
        hosts = list(self._caller.agents)
        problems = rsync.copy_to_hosts(hosts, directory, self._starter.remote_shell, self._caller)
        refused = [each for each in self._caller.agents.values() if each.refused is not None]
        if problems := problems + [each.problem(self._starter, 0) for each in refused]:
            raise LaunchError(format_problems(problems, len(hosts)))
        return directory

    def _gather(self, phase: AgentPhase, seconds: float) -> None:
        """Wait until every agent has reached a phase; raises LaunchError, after all answers, where one has not."""
        agents = self._caller.agents.values()
        begin = time.monotonic()
        deadline, next_notice = begin + seconds, begin + _NOTICE_SECONDS
        while missing := [
            each.host for each in agents if (each.phase < phase and each.refused is None) or each.is_ending
        ]:
            if (now := time.monotonic()) >= deadline:
                break
            if now >= next_notice:
                next_notice = now + _NOTICE_SECONDS
                complain(describe_waiting(missing, now - begin, deadline - now))
            self._caller.turn(min(deadline, next_notice) - now)
        failed = [each for each in agents if each.phase < phase or each.refused is not None or each.is_ending]
        if problems := [each.problem(self._starter, seconds) for each in failed]:
            codes = {each.refused.exit_code for each in agents if each.refused is not None}
            raise LaunchError(format_problems(problems, len(agents)), codes.pop() if len(codes) == 1 else 1)


def is_own_variable(name: str) -> bool:
    """Return whether a variable always goes to other hosts."""
    return name.startswith(_OWN_VARIABLES)


def is_dial_back(starter: AgentStarter | DialBackStarter | None) -> TypeGuard[DialBackStarter]:
    """Return whether the agents of a starter dial back."""
    return hasattr(starter, "start_agents")


def describe_waiting(missing: Sequence[str], waited_seconds: float, left_seconds: float) -> str:
    """Describe the hosts whose agents have not come: which, and for how long they are waited for."""
    num_more = len(missing) - _MOST_NAMES
    shown = ", ".join(missing[:_MOST_NAMES]) + (f" and {num_more} more" if num_more > 0 else "")
    return f"waiting for {shown} since {waited_seconds:.0f} s; {left_seconds:.0f} s are left (REIGEN_START_TIMEOUT)"


def find_scripts(command: Sequence[str]) -> tuple[str, ...]:
    """Return the script that a Python command runs, where it exists: of ``python -u train.py``, ``("train.py",)``."""
    if not Path(command[0]).name.startswith("python"):
        return ()
    for argument in command[1:]:
        if not argument.startswith("-"):
            return (argument,) if Path(argument).exists() else ()
        if argument in {"-", "-X", "-W"} or _NO_SCRIPT.match(argument):
            return ()
    return ()


def format_problems(problems: Sequence[HostProblem], num_hosts: int, what: str = "other hosts") -> str:
    """Format hosts that cannot take part, with their problems."""
    width = max(len(problem.host) for problem in problems)
    lines = [f"{len(problems)} of {num_hosts} {what} cannot take part; nothing was started"]
    for problem in problems:
        lines.append(f"  {problem.host:{width}}  {problem.what}")
        lines += [f"  {'':{width}}  {problem.advice}"] if problem.advice else []
    return "\n".join(lines)
