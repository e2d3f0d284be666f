"""Messages between a driver, which has the connection to an engine, and the supervisor of its job (`engine_launcher`).

One pair of sockets (SOCK_SEQPACKET) that only these two processes inherit:

a. The supervisor sends CallAgent for each agent, and CallsComplete: the driver then has the engine start them.
b. The driver sends AgentProblem when the engine says that an agent cannot come, or has ended; also as the answer to
   ExplainAgent, with an empty reason where the engine knows of none.
c. The supervisor sends RanksStarted, when nothing more is awaited.

In an elastic job the driver sends EngineHostsFound whenever its engine has other hosts than before, and the supervisor
calls agents (a.) at any time.
"""

from __future__ import annotations

import socket
from typing import Self

import msgspec

from reigen.launch.job_state import JobMessage
from reigen.net.codec import MessageCodec

#: A message must fit into the buffer of a socket, which is 200 KB.
MAX_CHANNEL_BYTES = 1 << 16


class CallAgent(JobMessage, tag=1, frozen=True):
    """Start the agent of this name with this dial text; ``call`` counts the calls of this name."""

    name: str
    text: str
    call: int = 0

    def __repr__(self) -> str:
        """Describe it without the ticket."""
        return f"CallAgent({self.name})"


class CallsComplete(JobMessage, tag=2, frozen=True):
    """All agents were called."""


class ExplainAgent(JobMessage, tag=3, frozen=True):
    """Say why this agent has ended."""

    name: str


class RanksStarted(JobMessage, tag=4, frozen=True):
    """Ranks were started; ``hosts`` by rank, and the control service with its secret."""

    rendezvous: str
    secret: bytes

    def __repr__(self) -> str:
        """Describe it without the secret."""
        return f"RanksStarted({self.rendezvous})"


class RankHosts(JobMessage, tag=5, frozen=True):
    """Hosts of the ranks from ``first`` on."""

    first: int
    hosts: tuple[str, ...]


class EngineHostSettings(msgspec.Struct, frozen=True):
    """Host of an engine, as `reigen.runner.engine_jobs.EngineHost`."""

    name: str
    slots: int
    address: str = ""
    environ: dict[str, str] = {}


class EngineHostsFound(JobMessage, tag=7, frozen=True):
    """Hosts that the engine has now, in parts: the first, the last, and those between."""

    hosts: tuple[EngineHostSettings, ...]
    is_first: bool
    is_last: bool


class AgentProblem(JobMessage, tag=6, frozen=True):
    """Reason why an agent cannot come, or has ended: that of this call, and not one of a later call."""

    name: str
    reason: str
    call: int = 0


EngineMessage = CallAgent | CallsComplete | ExplainAgent | RanksStarted | RankHosts | AgentProblem | EngineHostsFound
_CODEC: MessageCodec[EngineMessage] = MessageCodec(EngineMessage, MAX_CHANNEL_BYTES)


class EngineChannel(socket.socket):
    """One end of the pair; the socket ``descriptor`` is the channel's from now on."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(fileno=descriptor)
        self.set_inheritable(False)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Make both ends."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one.detach()), cls(other.detach())

    def post(self, message: EngineMessage) -> None:
        """Send a message; raises OSError where the other end is closed."""
        if isinstance(message, AgentProblem):
            message = msgspec.structs.replace(message, reason=message.reason[:4000])
        self.sendall(_CODEC.encode(message))

    def receive(self) -> EngineMessage | None:
        """Receive the next message; None when the other end is closed. Raises BlockingIOError: there is none now."""
        data = self.recv(MAX_CHANNEL_BYTES, socket.MSG_DONTWAIT)
        return _CODEC.decode(data) if data else None
