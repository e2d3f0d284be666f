"""Probes of hosts without starting a job there: `reigen check --hosts`."""

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
from reigen.launch.hosts import is_this_host
from reigen.launch.job_state import ProcessExited
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.launch.supervision.host_processes import HostProcesses

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
    with _HostProber() as prober:
        for host in hosts:
            if not is_this_host(host):
                prober.add_agent(host, starter.start_agent(host, command))
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

    def __init__(self) -> None:
        self._loop = LauncherLoop()
        self._agents: dict[str, AgentClient] = {}
        self._pings: dict[str, list[tuple[float, float, float]]] = {}
        self._ping_sent: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._loop.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        for agent in self._agents.values():
            agent.close()
        self._loop.__exit__(*exception)

    def add_agent(self, host: str, process: subprocess.Popen[bytes]) -> None:
        """Talk to an agent through this client process."""
        self._pings[host] = []
        self._agents[host] = AgentClient(host, process, self._loop, self, _SILENCE_SECONDS)

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

    # ---------------------------------------------------------------- AgentListener

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

    def rank_message(self, text: bytes, payload: int | None) -> None:
        """Ignore it: there are no ranks, here and below."""

    def printed(self, rank: int, stream: int, data: bytes) -> None:
        """Ignore it."""

    def closed(self, rank: int, stream: int) -> None:
        """Ignore it."""

    def exited(self, event: ProcessExited) -> None:
        """Ignore it."""

    def swept(self, group: HostProcesses) -> None:
        """Ignore it."""
