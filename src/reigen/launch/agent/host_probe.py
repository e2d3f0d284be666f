"""Looking at hosts without starting a job there: `reigen check --hosts`."""

from __future__ import annotations

import platform
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from reigen.launch.agent import agent_protocol
from reigen.launch.agent.agent_client import AgentClient, AgentPhase
from reigen.launch.agent.host_facts import collect_host_facts
from reigen.launch.base import AgentCommand, AgentStarter, HostProblem
from reigen.launch.event_loop import LauncherLoop
from reigen.launch.host_processes import HostProcesses
from reigen.launch.hosts import is_this_host

_PROBE_SECONDS = 30.0
_SILENCE_SECONDS = 15.0
_NUM_PINGS = 10


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A host's clock beside this one's.

    Attributes:
        offset_seconds: how far it is ahead.
        error_seconds: by how much that may be wrong: half the round trip.
    """

    offset_seconds: float
    error_seconds: float


@dataclass(frozen=True, slots=True)
class HostProbe:
    """What was found on a host.

    Attributes:
        host: its name, as the user gave it.
        problem: why nothing was found; None where it was.
        hostname: as it calls itself.
        python: version of the Python there.
        facts: what else there is.
        clock: its clock; None for this host's own.
    """

    host: str
    problem: HostProblem | None = None
    hostname: str = ""
    python: str = ""
    facts: agent_protocol.HostFacts | None = None
    clock: ClockOffset | None = None


def probe_hosts(hosts: Sequence[str], starter: AgentStarter, command: AgentCommand) -> list[HostProbe]:
    """Look at all hosts at the same time, by an agent on each of the others.

    Args:
        hosts: their names.
        starter: gets the agents there.
        command: what they run.

    Raises:
        LaunchError: the client process of an agent cannot be started.
    """
    with _HostProber() as visitor:
        for host in hosts:
            if not is_this_host(host):
                visitor.add_agent(host, starter.start_agent(host, command))
        visitor.wait(_PROBE_SECONDS)
        return [visitor.found(host, starter) for host in hosts]


def estimate_clock_offset(pings: Sequence[tuple[float, float, float]]) -> ClockOffset | None:
    """A clock from questions and answers: (asked, time there, answered); the quickest one counts.

    Example:
        >>> clock_of([(0.0, 7.0, 4.0), (10.0, 15.5, 11.0)])
        Clock(offset_seconds=5.0, error_seconds=0.5)
    """
    if not pings:
        return None
    asked, there, answered = min(pings, key=lambda ping: ping[2] - ping[0])
    return ClockOffset(there - (asked + answered) / 2, (answered - asked) / 2)


class _HostProber:
    """The agents that are asked; a ``AgentListener`` to whom no job ever happens."""

    def __init__(self) -> None:
        self._loop = LauncherLoop()
        self._agents: dict[str, AgentClient] = {}
        self._pings: dict[str, list[tuple[float, float, float]]] = {}
        self._asked: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._loop.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        for agent in self._agents.values():
            agent.close()
        self._loop.__exit__(*exception)

    def add_agent(self, host: str, process: subprocess.Popen[bytes]) -> None:
        """Speak to an agent through this client process."""
        self._pings[host] = []
        self._agents[host] = AgentClient(host, process, self._loop, self, _SILENCE_SECONDS)

    def wait(self, seconds: float) -> None:
        """Wait until all have answered everything, or cannot."""
        deadline = time.monotonic() + seconds
        agents = self._agents.values()
        while any(not self._is_done(each) for each in agents) and (left := deadline - time.monotonic()) > 0:
            turns = [each.turn() for each in agents]
            self._loop.wait(min([left, *(turn for turn in turns if turn is not None)]))
        for each in agents:
            each.finish_agent()

    def found(self, host: str, starter: AgentStarter) -> HostProbe:
        """What is known of a host now."""
        agent = self._agents.get(host)
        if agent is None:
            return HostProbe(host, None, socket.gethostname(), platform.python_version(), collect_host_facts())
        if agent.facts is None or agent.hello is None:
            return HostProbe(host, agent.problem(starter, _PROBE_SECONDS))
        clock = estimate_clock_offset(self._pings[host])
        return HostProbe(host, None, agent.hello.hostname, agent.hello.python, agent.facts, clock)

    def _is_done(self, agent: AgentClient) -> bool:
        return agent.step is AgentPhase.GONE or len(self._pings[agent.host]) == _NUM_PINGS

    # ---------------------------------------------------------------- as an agent's listener

    def stepped(self, agent: AgentClient) -> None:
        """Ask the next question."""
        host, now = agent.host, time.time()
        if agent.step is AgentPhase.GONE:
            return
        if agent.facts is None:
            agent.send(agent_protocol.FactsRequest())
            return
        if agent.pong is not None and host in self._asked:
            self._pings[host].append((self._asked.pop(host), agent.pong.seconds, now))
        if not self._is_done(agent):
            self._asked[host] = time.time()
            agent.send(agent_protocol.TimeRequest())

    def rank_message(self, text: bytes, parcel: int | None) -> None:
        """No rank runs."""

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        """No rank runs."""

    def closed(self, rank: int, stream: int) -> None:
        """No rank runs."""

    def exited(self, rank: int, exit_code: int, cause: str) -> None:
        """No rank runs."""

    def swept(self, group: HostProcesses) -> None:
        """No rank runs."""
