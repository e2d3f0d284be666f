"""Probes of hosts without starting a job there: `reigen check --hosts`."""

from __future__ import annotations

import platform
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from reigen.launch.agent import agent_protocol
from reigen.launch.agent.agent_client import AgentClient, AgentPhase
from reigen.launch.agent.host_facts import collect_host_facts
from reigen.launch.agent.lines import PipedLine
from reigen.launch.base import AgentCommand, AgentStarter, HostProblem
from reigen.launch.hosts import is_this_host
from reigen.launch.supervision.event_loop import LauncherLoop

_PROBE_SECONDS = 30.0
_SILENCE_SECONDS = 15.0
_NUM_PINGS = 10


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Offset of a host's clock, positive where it is ahead, and its error: half the round trip."""

    offset_seconds: float
    error_seconds: float


@dataclass(frozen=True, slots=True)
class HostProbe:
    """Findings about a host.

    Attributes:
        host: its name, as the user gave it.
        problem: why nothing was found; None where it was.
        hostname: its own name.
        python: version of the Python there.
        facts: the rest.
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

    Raises:
        LaunchError: the client process of an agent cannot be started.
    """
    with LauncherLoop() as loop, ExitStack() as stack:
        prober = _HostProber(loop)
        for host in hosts:
            if not is_this_host(host):
                stack.callback(prober.add_agent(host, starter.start_agent(host, command)).close)
        prober.wait(_PROBE_SECONDS)
        return [prober.result(host, starter) for host in hosts]


def estimate_clock_offset(pings: Sequence[tuple[float, float, float]]) -> ClockOffset | None:
    """Estimate an offset from (sent at, time there, answered at) of pings, in seconds; the quickest one counts.

    Example:
        >>> estimate_clock_offset([(0.0, 7.0, 4.0), (10.0, 15.5, 11.0)])
        ClockOffset(offset_seconds=5.0, error_seconds=0.5)
    """
    if not pings:
        return None
    sent, remote, received = min(pings, key=lambda ping: ping[2] - ping[0])
    return ClockOffset(remote - (sent + received) / 2, (received - sent) / 2)


class _HostProber:
    """Client of the agents of a probe; an ``AgentListener`` without a job."""

    def __init__(self, loop: LauncherLoop) -> None:
        self._loop = loop
        self._agents: dict[str, AgentClient] = {}
        self._pings: dict[str, list[tuple[float, float, float]]] = {}
        self._ping_sent: dict[str, float] = {}

    def add_agent(self, host: str, process: subprocess.Popen[bytes]) -> AgentClient:
        """Talk to an agent through this client process."""
        self._pings[host] = []
        agent = self._agents[host] = AgentClient(host, PipedLine(process, self._loop), self, _SILENCE_SECONDS)
        return agent

    def wait(self, seconds: float) -> None:
        """Wait until all have answered everything, or cannot."""
        deadline = time.monotonic() + seconds
        agents = self._agents.values()
        while any(not self._is_done(each) for each in agents) and (remaining := deadline - time.monotonic()) > 0:
            turns = [each.turn() for each in agents]
            self._loop.wait(min([remaining, *(turn for turn in turns if turn is not None)]))
        for each in agents:
            each.finish_agent()

    def result(self, host: str, starter: AgentStarter) -> HostProbe:
        """Return the findings about a host."""
        agent = self._agents.get(host)
        if agent is None:
            return HostProbe(host, None, socket.gethostname(), platform.python_version(), collect_host_facts())
        if agent.facts is None or agent.hello is None:
            return HostProbe(host, agent.problem(starter, _PROBE_SECONDS))
        clock = estimate_clock_offset(self._pings[host])
        return HostProbe(host, None, agent.hello.hostname, agent.hello.python, agent.facts, clock)

    def _is_done(self, agent: AgentClient) -> bool:
        return agent.phase is AgentPhase.GONE or len(self._pings[agent.host]) == _NUM_PINGS

    def stepped(self, agent: AgentClient) -> None:
        """Ask the next question."""
        host, now = agent.host, time.time()
        if agent.phase is AgentPhase.GONE:
            return
        if agent.facts is None:
            agent.send(agent_protocol.FactsRequest())
            return
        if agent.time_reply is not None and host in self._ping_sent:
            self._pings[host].append((self._ping_sent.pop(host), agent.time_reply.seconds, now))
        if not self._is_done(agent):
            self._ping_sent[host] = time.time()
            agent.send(agent_protocol.TimeRequest())

    def _ignore(self, *_: object, **__: object) -> None:
        """Ignore an event of ranks: there are none."""

    rank_message = signalled = printed = closed = exited = swept = _ignore
