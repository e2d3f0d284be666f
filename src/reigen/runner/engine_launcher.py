"""Launcher of a job whose hosts an engine has given to a driver: the driver starts the agents (`engine_channel`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import msgspec

from reigen.errors import LaunchError
from reigen.launch.agent.gathering import Gathering, SlotGathering, group_by_machine, unique_name
from reigen.launch.agent.remote_start import format_problems
from reigen.launch.base import AgentCaller, AgentCommand, DialCall, HostProblem, JobPlan, PolledHost, assign_processes
from reigen.launch.hosts import HostAssignment, HostInfo
from reigen.launch.options import LaunchOptions, complain
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.net.event_loop import wait_ready
from reigen.net.interfaces import choose_address
from reigen.runner.engine_channel import (
    AgentProblem,
    CallAgent,
    CallsComplete,
    EngineChannel,
    EngineHostSettings,
    EngineHostsFound,
    ExplainAgent,
    RankHosts,
)

#: Seconds in which the driver has to say why an agent has ended.
_EXPLAIN_SECONDS = 3.0
#: Names of hosts in one message.
_HOSTS_PER_MESSAGE = 100


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
        #: Number of the latest call of each agent.
        self._calls: dict[str, int] = {}
        self._caller: AgentCaller | None = None
        #: Of an elastic job: the loop that reads the channel, tasks, and hosts as the driver has named them, and names.
        self._loop: LauncherLoop | None = None
        self._slots: SlotGathering | None = None
        self._found: list[EngineHostSettings] = []
        self._coming: list[EngineHostSettings] = []

    def allocate(self, wait: Callable[[float], None]) -> JobPlan:
        """Place the ranks on the hosts, which are given, or where the engine's tasks turn out to be."""
        settings = self._settings
        if self.options.elastic is not None:
            return JobPlan(
                (),
                self,
                kept_variables=settings.kept_variables,
                directory=settings.directory,
                exports_environ=settings.exports_environ,
                poll=self._poll,
                is_local=lambda name: False,
                listen_towards=settings.listen_towards,
            )
        hosts = settings.hosts or self._gather(wait)
        if (servers := self.options.servers) is not None:  # they have the variables that the job was given, too
            self.options = replace(self.options, servers=replace(servers, environ=settings.environ))
        self._settings = msgspec.structs.replace(settings, hosts=tuple(hosts))
        places = [HostInfo(host.name, host.slots) for host in hosts]
        environs = {host.name: settings.environ | host.environ for host in hosts}
        assignments = [_with_environ(each, environs.get(each.host, {})) for each in self._assign(places)]
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
        if self._caller is None:
            self._caller = caller
            caller.loop.watch(self._channel, self._receive)
        if self._slots is not None:
            for call in calls:
                self._slots.call(call.host, call.text)
            return
        if self._gathering is not None:
            for call in calls:
                self._gathering.call(self._leaders[call.host], call.text)
            return
        for call in calls:
            self._problems.pop(call.host, None)  # of an earlier agent
            self._calls[call.host] = self._calls.get(call.host, -1) + 1
            self._post(CallAgent(call.host, call.text, self._calls[call.host]))
        self._post(CallsComplete())

    def explain_exit(self, host: str, exit_code: int | None, output: str) -> HostProblem:
        """Ask the driver what its engine says."""
        name = self._leaders.get(host, host) if self._slots is None else self._slots.task_of_agent(host)
        if self._slots is not None:  # an earlier attempt may have had one
            self._problems.pop(name, None)
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
            self._caller = self._loop = None
        self.close()

    def close(self) -> tuple[str, ...]:
        """Give nothing back: that is the driver's."""
        if self._gathering is not None:
            self._gathering.close()
        if self._slots is not None:
            self._slots.close()
        return ()

    def _poll(self, loop: LauncherLoop) -> list[PolledHost]:
        """Return the hosts that the driver has named, or those of its engine's tasks."""
        if self._loop is None:
            self._loop = loop
            loop.watch(self._channel, self._receive)
            if self._settings.num_tasks:
                self._slots = self._gather_slots(loop)
        environ = self._settings.environ
        if self._slots is not None:
            return [PolledHost(each.name, each.num_slots, each.address, environ) for each in self._slots.hosts()]
        return [PolledHost(each.name, each.slots, each.address, environ | each.environ) for each in self._found]

    def _gather_slots(self, loop: LauncherLoop) -> SlotGathering:
        """Begin to listen for tasks, and have the driver start them."""
        settings, network = self._settings, self.options.network
        address, _ = choose_address(network.interfaces, settings.listen_towards or None)
        names = [str(number) for number in range(settings.num_tasks)]
        gathering = SlotGathering(
            loop,
            (address, 0),
            names,
            self.options.start_timeout_seconds or network.start_timeout_seconds,
            lambda host: self._caller is not None and self._caller.has_agent(host),
            tls=network.make_tls(),
            peer_timeout_seconds=network.peer_timeout_seconds,
            on_problem=lambda reason: complain(f"{settings.engine}: {reason}"),
        )
        for name in names:
            self._post(CallAgent(name, gathering.texts[name]))
        self._post(CallsComplete())
        return gathering

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
            name = unique_name(first.greeting.hostname, self._leaders)
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
        """Take a message of the driver's; returns whether the driver is there."""
        try:
            message = self._channel.receive()
        except BlockingIOError:
            return True
        except OSError:
            message = None
        if message is None:
            loop = self._loop if self._caller is None else self._caller.loop
            if loop is not None:
                loop.unwatch(self._channel)
            return False
        if isinstance(message, AgentProblem) and message.call != self._calls.get(message.name, 0):
            return True  # of an earlier agent
        if isinstance(message, EngineHostsFound):
            self._coming = [*([] if message.is_first else self._coming), *message.hosts]
            self._found = self._coming if message.is_last else self._found
        elif isinstance(message, AgentProblem) and message.reason:
            self._problems[message.name] = message.reason
            host = next((host for host, task in self._leaders.items() if task == message.name), message.name)
            is_agent = not self._leaders or host in self._leaders
            if self._caller is not None and is_agent and self._caller.has_agent(host):
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
