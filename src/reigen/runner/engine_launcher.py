"""Launcher of a job whose hosts an engine has given to a driver: the driver starts the agents (`engine_channel`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from reigen.errors import LaunchError
from reigen.launch.agent.gathering import Gathering, group_by_machine
from reigen.launch.agent.remote_start import format_problems
from reigen.launch.base import AgentCaller, AgentCommand, DialCall, HostProblem, JobPlan, assign_processes
from reigen.launch.hosts import HostAssignment, HostInfo
from reigen.launch.options import LaunchOptions
from reigen.net.event_loop import wait_ready
from reigen.net.interfaces import choose_address
from reigen.runner.engine_channel import AgentProblem, CallAgent, CallsComplete, EngineChannel, ExplainAgent, RankHosts

#: Seconds in which the driver has to say why an agent has ended.
_EXPLAIN_SECONDS = 3.0
#: Names of hosts in one message.
_HOSTS_PER_MESSAGE = 100


class EngineHostSettings(msgspec.Struct, frozen=True):
    """Host of an engine, as `reigen.runner.engine_jobs.EngineHost`."""

    name: str
    slots: int
    address: str = ""
    environ: dict[str, str] = {}


class EngineSettings(msgspec.Struct, frozen=True):
    """Settings of a job on an engine, for its launcher; as `reigen.runner.engine_jobs.EngineAgents`."""

    engine: str
    hosts: tuple[EngineHostSettings, ...]
    num_tasks: int
    kept_variables: tuple[str, ...]
    exports_environ: bool
    environ: dict[str, str]
    listen_towards: str
    directory: str


class EngineLauncher:
    """Both a ``Launcher`` and its ``DialBackStarter``."""

    remote_shell = ()

    def __init__(self, options: LaunchOptions, settings: EngineSettings, channel: EngineChannel) -> None:
        self.options, self._settings, self._channel = options, settings, channel
        self._gathering: Gathering | None = None
        #: The task that is the agent of each host, where tasks were gathered.
        self._leaders: dict[str, str] = {}
        self._problems: dict[str, str] = {}
        self._caller: AgentCaller | None = None

    def allocate(self, wait: Callable[[float], None]) -> JobPlan:
        """Place the ranks on the hosts, which are given, or where the engine's tasks turn out to be."""
        settings = self._settings
        hosts = settings.hosts or self._gather(wait)
        self._settings = msgspec.structs.replace(settings, hosts=tuple(hosts))
        places = [HostInfo(host.name, host.slots) for host in hosts]
        environs = {host.name: settings.environ | host.environ for host in hosts}
        assignments = [_with_environ(each, environs[each.host]) for each in self._assign(places)]
        self._tell_hosts(assignments)
        return JobPlan(
            assignments,
            self,
            {host.name: host.address for host in hosts if host.address},
            kept_variables=settings.kept_variables,
            directory=settings.directory,
            exports_environ=settings.exports_environ,
        )

    def start_agents(self, calls: Sequence[DialCall], agent: AgentCommand, caller: AgentCaller) -> None:
        """Have the driver start the agents, or make a task of each host its agent."""
        self._caller = caller
        caller.loop.watch(self._channel, self._receive)
        if self._gathering is not None:
            for call in calls:
                self._gathering.call(self._leaders[call.host], call.text)
            return
        for call in calls:
            self._post(CallAgent(call.host, call.text))
        self._post(CallsComplete())

    def explain_exit(self, host: str, exit_code: int | None, output: str) -> HostProblem:
        """Ask the driver what its engine says."""
        name = self._leaders.get(host, host)
        if name not in self._problems:
            self._post(ExplainAgent(name))
            deadline = time.monotonic() + _EXPLAIN_SECONDS
            while name not in self._problems and (left := deadline - time.monotonic()) > 0:
                if wait_ready(self._channel, left) and not self._receive():
                    break
        reason = self._problems.get(name)
        where = "the connection to its agent has ended"
        return HostProblem(host, f"{self._settings.engine} says: {reason}" if reason else where)

    def close_agents(self) -> None:
        """Let go of the tasks that hold slots."""
        if self._caller is not None:
            self._caller.loop.unwatch(self._channel)
            self._caller = None
        self.close()

    def close(self) -> tuple[str, ...]:
        """Give nothing back: that is the driver's."""
        if self._gathering is not None:
            self._gathering.close()
        return ()

    def _assign(self, places: Sequence[HostInfo]) -> list[HostAssignment]:
        return assign_processes(self.options, places, lambda name: False)

    def _gather(self, wait: Callable[[float], None]) -> list[EngineHostSettings]:
        settings, network = self._settings, self.options.network
        names = [str(number) for number in range(settings.num_tasks)]
        timeout = self.options.start_timeout_seconds or network.start_timeout_seconds
        address, _ = choose_address(network.interfaces, settings.listen_towards or None)
        tls, peer_timeout = network.make_tls(), network.peer_timeout_seconds
        gathering = self._gathering = Gathering(
            (address, 0), names, timeout, tls=tls, peer_timeout_seconds=peer_timeout
        )
        for name in names:
            self._post(CallAgent(name, gathering.texts[name]))
        self._post(CallsComplete())
        gathering.wait(wait, self._look)
        if missing := gathering.missing():
            problems = [HostProblem(f"task {name}", f"it has not come within {timeout:g} s") for name in missing]
            raise LaunchError(format_problems(problems, len(names), f"tasks of {settings.engine}"))
        hosts = []
        for group in group_by_machine(gathering.agents, names):
            first = gathering.agents[group[0]]
            name = _unique_name(first.greeting.hostname, self._leaders)
            self._leaders[name] = group[0]
            hosts.append(EngineHostSettings(name, len(group), first.address.rpartition(":")[0].strip("[]")))
        return hosts

    def _look(self, problems: Mapping[str, str]) -> None:
        """Raise LaunchError where a task cannot come, or has gone again."""
        while wait_ready(self._channel) and self._receive():
            pass
        found = {**problems, **self._problems}
        if found:
            table = [HostProblem(f"task {name}", reason) for name, reason in found.items()]
            raise LaunchError(format_problems(table, self._settings.num_tasks, f"tasks of {self._settings.engine}"))

    def _tell_hosts(self, assignments: Sequence[HostAssignment]) -> None:
        hosts = [each.host for each in assignments for _ in each.ranks]
        for first in range(0, len(hosts), _HOSTS_PER_MESSAGE):
            self._post(RankHosts(first, tuple(hosts[first : first + _HOSTS_PER_MESSAGE])))

    def _receive(self) -> bool:
        """Take what the driver says; returns whether it is there."""
        try:
            message = self._channel.receive()
        except BlockingIOError:
            return True
        except OSError:
            message = None
        if message is None:
            if self._caller is not None:
                self._caller.loop.unwatch(self._channel)
            return False
        if isinstance(message, AgentProblem) and message.reason:
            self._problems[message.name] = message.reason
            host = next((host for host, task in self._leaders.items() if task == message.name), message.name)
            if self._caller is not None and (not self._leaders or host in self._leaders):
                problem = HostProblem(host, f"{self._settings.engine} says: {message.reason}")
                self._caller.agent_ended(host, problem)
        elif isinstance(message, AgentProblem):
            self._problems.setdefault(message.name, "")
        return True

    def _post(self, message: CallAgent | CallsComplete | ExplainAgent | RankHosts) -> None:
        try:
            self._channel.post(message)
        except OSError:
            raise LaunchError("the process that runs the job has gone") from None


def _with_environ(assignment: HostAssignment, environ: Mapping[str, str]) -> HostAssignment:
    if not environ:
        return assignment
    return replace(assignment, rank_environs=tuple(dict(environ) for _ in assignment.ranks))


def _unique_name(name: str, taken: Mapping[str, str]) -> str:
    """Return the name, or that with a number: two containers may have one name."""
    if name not in taken:
        return name
    number = 2
    while f"{name}#{number}" in taken:
        number += 1
    return f"{name}#{number}"
