"""A connection between a worker and a server until both ends have proven to know the job's secret. Nothing blocks."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from reigen.net.connection import StreamProtocol


@dataclass(eq=False)
class PendingHandshake:
    """A connection whose other end has not proven itself.

    Attributes:
        socket: not blocking; it may still be connecting.
        conversation: what is said over it.
        deadline: when to give up, on the clock of ``time.monotonic()``.
    """

    socket: socket.socket
    conversation: StreamProtocol
    deadline: float

    def advance(self) -> bool:
        """Do what is possible now; whether both ends are proven.

        Raises:
            OSError, AuthenticationError, WireError: this leads nowhere.
        """
        with contextlib.suppress(BlockingIOError):
            while True:
                outgoing = self.conversation.outgoing
                while outgoing:
                    del outgoing[: self.socket.send(outgoing)]
                if self.conversation.peer is not None:
                    return True
                data = self.socket.recv(self.conversation.num_wanted_bytes)
                if not data:
                    raise ConnectionResetError("the other end closed the connection during the handshake")
                self.conversation.receive(data)
        return False
