"""Launcher in the master of an application: its hosts are the application's containers, and the agents dial back.

It speaks to the master's process (``launch.yarn.master``), which speaks to YARN, through a socket that it inherits.
"""

from __future__ import annotations

import math
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

import msgspec

from reigen.errors import ConfigError, LaunchError
from reigen.launch.base import AgentCaller, AgentCommand, DialCall, HostProblem, JobPlan, assign_processes
from reigen.launch.engines import EngineJob
from reigen.launch.hosts import HostAssignment, HostInfo
from reigen.launch.options import LaunchOptions, complain
from reigen.launch.ps_processes import PsRole, list_ps_processes
from reigen.launch.yarn.exits import explain_container
from reigen.launch.yarn.job import (
    DIAL_FILE,
    Ended,
    Grant,
    Granted,
    LauncherRequest,
    LookNow,
    MasterEvent,
    Refused,
    StartAgent,
    Unanswered,
    Waiting,
)

#: Descriptor of the socket to the master's process.
MASTER_VARIABLE = "REIGEN_YARN_MASTER_FD"
#: Beginnings of names of variables that are a container's own.
KEPT_VARIABLES = ("CONTAINER_ID", "HADOOP_", "HOME", "JAVA_HOME", "LOCAL_DIRS", "LOGNAME", "LOG_DIRS", "NM_", "YARN_")
#: Seconds until the ResourceManager knows that a container has ended.
_STATUS_SECONDS = 2.5
#: When it has not known of one in that time, nobody waits for its answer about others for so long.
_SILENT_SECONDS = 10.0
_WAIT_SECONDS = 0.2
#: How long agents may take at least.
_FETCH_SECONDS = 600.0
_READ_BYTES = 1 << 16


def find_engine_job(environ: Mapping[str, str]) -> EngineJob | None:
    """Find the application whose master has started this process; None: there is none. Its containers come later."""
    if MASTER_VARIABLE not in environ:
        return None
    container = environ.get("CONTAINER_ID", "unknown")
    return EngineJob("yarn", f"YARN application (CONTAINER_ID={container}), in its master", ())


_Message = TypeVar("_Message")


class MessageSocket(Generic[_Message]):
    """One end of the socket between a master and its launcher: messages of msgspec's, a line each.

    Args:
        descriptor: of the socket; it is this object's from now on.
        decoder: of the messages that come.
    """

    def __init__(self, descriptor: int, decoder: msgspec.json.Decoder[_Message]) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._decoder = decoder
        self._rest = b""
        self.is_ended = False

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._socket.fileno()

    def send(self, message: MasterEvent | LauncherRequest) -> None:
        """Send a message; nothing happens where the other end has gone."""
        try:
            self._socket.sendall(msgspec.json.encode(message) + b"\n")
        except OSError:
            self.is_ended = True

    def read(self, timeout_seconds: float = 0.0) -> Iterator[_Message]:
        """Yield the messages that come within so many seconds, or are there."""
        if self.is_ended or not select.select([self._socket], [], [], timeout_seconds)[0]:
            return
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError:
            data = b""
        self.is_ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield self._decoder.decode(line)


class YarnLauncher:
    """Launcher and starter of agents in the containers of an application.

    Raises:
        ConfigError: this process is not in an application's master, or something is asked for that cannot be there.
    """

    #: rsync has no way into a container.
    remote_shell: Sequence[str] = ()

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        if MASTER_VARIABLE not in environ:
            raise ConfigError("--launcher yarn: `reigen launch` submits such jobs: reigen launch --launcher yarn ...")
        if options.sync_directory is not None:
            raise ConfigError("--sync-dst-dir: YARN brings files to its containers: --files, --archives")
        if options.elastic is not None:
            raise ConfigError(
                "--min-np: YARN grants containers before the job begins, so that it cannot be elastic; with Spark on "
                "YARN it can (reigen.spark.run_elastic)"
            )
        # an agent begins when its node has fetched and unpacked the job's archives; ranks wait no longer than elsewhere
        seconds = max(_FETCH_SECONDS, options.network.start_timeout_seconds)
        self.options = replace(options, network=replace(options.network, start_timeout_seconds=seconds))
        self._master = MessageSocket(
            os.dup(int(environ[MASTER_VARIABLE])), msgspec.json.Decoder[MasterEvent](MasterEvent)
        )
        self._grants: dict[str, Grant] = {}
        self._ended: dict[str, Ended] = {}
        #: When YARN has last not known why a container's agent has gone.
        self._silent_at = -math.inf
        self._caller: AgentCaller | None = None

    def allocate(self, wait: Callable[[float], None]) -> JobPlan:
        """Wait for the containers."""
        grants: Sequence[Grant] | None = None
        while grants is None:
            wait(_WAIT_SECONDS)
            for event in self._master.read():
                match event:
                    case Granted():
                        grants = event.grants
                    case Waiting(num_granted, num_wanted):
                        complain(f"waiting for containers: YARN has given {num_granted} of {num_wanted}")
                    case Ended():
                        problem = explain_container(event.container, event.status, event.diagnostics)
                        raise LaunchError(f"{problem.host}: {problem.what}; nothing was started")
                    case Unanswered(reason):
                        complain(f"{reason}; it is asked again")
                    case Refused(reason):
                        raise LaunchError(reason)
            if self._master.is_ended:
                raise LaunchError("the application's master has gone")
        assignments, self._grants = place(grants, self.options)
        addresses = {name: grant.node for name, grant in self._grants.items()}
        return JobPlan(
            assignments,
            self,
            addresses,
            kept_variables=KEPT_VARIABLES,
            directory="",
            describe_notice=self._describe_notice,
        )

    def start_agents(self, calls: Sequence[DialCall], agent: AgentCommand, caller: AgentCaller) -> None:
        """Have the master start an agent in each container."""
        self._caller = caller
        for call in calls:
            argv = tuple(agent.argv_dialing(DIAL_FILE))
            self._master.send(StartAgent(self._grants[call.host].container, argv, call.text))
        caller.loop.watch(self._master, self._on_events)

    def explain_exit(self, host: str, exit_code: int | None, output: str) -> HostProblem:
        """Explain the end of an agent by that of its container, for which YARN is asked."""
        container, now = self._grants[host].container, time.monotonic()
        # many hosts may be lost at once, and ranks of others wait meanwhile
        deadline = now if now - self._silent_at < _SILENT_SECONDS else now + _STATUS_SECONDS
        self._take(self._master.read())
        while container not in self._ended and not self._master.is_ended:
            if (left := deadline - time.monotonic()) <= 0:
                self._silent_at = self._silent_at if deadline == now else time.monotonic()
                return HostProblem(host, f"its agent has gone; YARN does not say why: see yarn logs of {container}")
            self._master.send(LookNow())
            self._take(self._master.read(min(left, _WAIT_SECONDS)))
        ended = self._ended.get(container)
        if ended is None:
            return HostProblem(host, "the application's master has gone")
        return explain_container(host, ended.status, ended.diagnostics)

    def close_agents(self) -> None:
        """Start no more: the master ends the containers."""
        if self._caller is not None:
            self._caller.loop.unwatch(self._master)
            self._caller = None

    def close(self) -> tuple[str, ...]:
        """Give nothing back: the application ends with its master."""
        return ()

    def _describe_notice(self, output: str) -> str:
        """Explain a signal that asks an agent to stop, by the container that YARN says has ended, or will soon."""
        known, deadline = set(self._ended), time.monotonic() + _STATUS_SECONDS
        while not self._master.is_ended and time.monotonic() < deadline:
            self._master.send(LookNow())
            for ended in self._take(self._master.read(_WAIT_SECONDS)):
                if ended.container not in known:
                    what = explain_container("", ended.status, ended.diagnostics)
                    return f"by YARN: {what.what}" + (f"; {what.advice}" if what.advice else "")
        return "by YARN, or by a user"

    def _on_events(self) -> None:
        ended = self._take(self._master.read())
        caller = self._caller
        assert caller is not None, "it is unwatched when there is none"
        names = {grant.container: name for name, grant in self._grants.items()}
        for event in ended:
            name = names[event.container]
            caller.agent_ended(name, explain_container(name, event.status, event.diagnostics))
        if self._master.is_ended:
            caller.loop.unwatch(self._master)

    def _take(self, events: Iterator[MasterEvent]) -> list[Ended]:
        """Keep the ends among the events; returns those that are new."""
        found = []
        for event in events:
            if isinstance(event, Ended) and event.container not in self._ended:
                self._ended[event.container] = event
                found.append(event)
            elif isinstance(event, Unanswered):
                complain(f"{event.reason}; it is asked again")
            elif isinstance(event, Refused):
                complain(f"{event.reason}; the job goes on without it, as long as YARN leaves it its containers")
        return found


def place(grants: Sequence[Grant], options: LaunchOptions) -> tuple[list[HostAssignment], dict[str, Grant]]:
    """Place ranks and servers in containers; the scheduler runs beside the master.

    Ranks of one node are neighbours, and are counted as ranks of one host, whether a container has one or several.

    Returns:
        The assignments, a container each, and the grants by the names that the containers have there.
    """
    workers = sorted((grant for grant in grants if grant.is_worker), key=_order(grants))
    nodes: dict[str, int] = {}
    for grant in workers:
        nodes[grant.node] = nodes.get(grant.node, 0) + grant.slots
    hosts = [HostInfo(node, slots) for node, slots in nodes.items()]
    by_node = assign_processes(_without_servers(options), hosts, lambda name: False)
    topologies = [topology for each in by_node for topology in each.topologies]
    found, named = [], {}
    for grant in workers:
        own, topologies = topologies[: grant.slots], topologies[grant.slots :]
        named[_name(grant)] = grant
        found.append(HostAssignment(_name(grant), False, tuple(own)))
    servers = [grant for grant in grants if not grant.is_worker]
    for process in list_ps_processes(options.num_ranks, options.servers) if options.servers is not None else ():
        if process.role is PsRole.SCHEDULER:
            found.append(HostAssignment("the master", True, (), (process,)))
        else:
            grant = servers[process.index]
            named[_name(grant)] = grant
            found.append(HostAssignment(_name(grant), False, (), (process,)))
    return found, named


def _order(grants: Sequence[Grant]) -> Callable[[Grant], tuple[int, str]]:
    """Return the key by which containers are sorted: nodes as YARN has given them, containers by number."""
    nodes = list(dict.fromkeys(grant.node for grant in grants))
    return lambda grant: (nodes.index(grant.node), grant.container)


def _without_servers(options: LaunchOptions) -> LaunchOptions:
    return replace(options, servers=None)


def _name(grant: Grant) -> str:
    """Return how messages call a container: its node, and the end of its id."""
    return f"{grant.node}/{grant.container.rpartition('_')[2]}"
