"""Calls of agents that dial back: a listener for them, and for each call a ticket, and the line of its agent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from reigen.launch.agent.agent_client import AgentClient, AgentPhase
from reigen.launch.agent.dial_back import DialedAgent, DialListener
from reigen.launch.agent.lines import DialedLine
from reigen.launch.base import AgentCaller, AgentCommand, DialBackStarter, DialCall, HostProblem
from reigen.launch.options import NetworkOptions


class DialingOwner(AgentCaller, Protocol):
    """Owner of the agents, which waits for them."""

    agents: dict[str, AgentClient]

    def await_agent(self, host: str) -> DialedLine:
        """Wait for an agent that dials back; returns its line."""


class DialCalls:
    """Calls of the agents of a job. Of a host that is called again, an older call is void.

    Args:
        starter: of the agents.
        command: of the agents.
        address: of this host, where the agents reach it.
        network: options of the job.
        owner: of the agents.
        on_conflict: told of a ticket that was used twice, in words.

    Raises:
        OSError, ConfigError: the address cannot be used.
    """

    def __init__(
        self,
        starter: DialBackStarter,
        command: AgentCommand,
        address: str,
        network: NetworkOptions,
        owner: DialingOwner,
        on_conflict: Callable[[str], None],
    ) -> None:
        self._starter, self._command, self._owner = starter, command, owner
        self._num_calls = 0
        #: Clients and lines whose agents have not come, by the number of the call.
        self._awaited: dict[int, tuple[AgentClient, DialedLine]] = {}
        self._listener = DialListener(
            owner.loop,
            DialListener.at(address),
            self._on_agent,
            on_conflict,
            lambda host, reason: owner.agent_ended(host, HostProblem(host, reason)),
            tls=network.make_tls(),
            peer_timeout_seconds=network.peer_timeout_seconds,
        )

    def call(self, hosts: Sequence[str], timeout_seconds: float) -> None:
        """Have agents started on these hosts, which may take so long to come; returns at once.

        Raises:
            LaunchError: the engine cannot be asked.
        """
        calls = []
        for host in hosts:
            number, self._num_calls = self._num_calls, self._num_calls + 1
            line = self._owner.await_agent(host)
            self._awaited[number] = self._owner.agents[host], line
            calls.append(DialCall(host, self._listener.issue(number, host, timeout_seconds)))
        self._starter.start_agents(calls, self._command, self._owner)

    def close(self) -> None:
        """Wait for no more agents, and end what has started them on this host. May be called twice."""
        self._listener.close()
        self._starter.close_agents()

    def _on_agent(self, agent: DialedAgent) -> None:
        client, line = self._awaited.pop(agent.number)
        if client.phase is AgentPhase.GONE:  # given up; its host may have been called again
            agent.connection.close()
        else:
            line.attach(agent.connection)
