"""Connection of a member to its control service, from registration on. Waits only where a deadline is given."""

from __future__ import annotations

import select
import socket
import time

from reigen.cluster.membership.messages import (
    MEMBER_CODEC,
    MEMBERSHIP_REPLY_CODEC,
    MemberAssigned,
    MemberMessage,
    SavedJob,
)
from reigen.cluster.membership.view import JobView
from reigen.net.sockets import set_keepalive, translate_connection_losses, wait_until_delivered
from reigen.net.stream import AuthenticatedStream


class MemberConnection:
    """Sends and receives for a view; one thread at a time may use both. The stream belongs to it from now on.

    Attributes:
        service: who is at the other end.
        num_received: messages of the service.
        is_assigned: the member has its place, on this connection.
    """

    def __init__(
        self, stream: AuthenticatedStream, view: JobView, peer_timeout_seconds: float, saved: tuple[SavedJob, ...] = ()
    ) -> None:
        self.service, self._view = stream.peer, view
        self._socket, self._protocol = stream.hand_over()
        self.num_received, self.is_assigned = 0, False
        set_keepalive(self._socket, peer_timeout_seconds)
        self.send(view.registration(saved))

    def fileno(self) -> int:
        """Readable when there is news; -1 when closed."""
        return self._socket.fileno()

    @property
    def has_more(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._protocol.outgoing)

    def send(self, message: MemberMessage) -> None:
        """Queue a message."""
        self._protocol.send(MEMBER_CODEC.encode(message))

    def receive(self) -> None:
        """Take in all that has come, and queue what the view says to that.

        Raises:
            OSError: the connection has ended, and everything that came before was taken in.
            AuthenticationError, WireError: the bytes are not the service's.
        """
        num_before = self.num_received
        while True:
            try:
                with translate_connection_losses():
                    data = self._socket.recv(self._protocol.num_wanted_bytes)
            except BlockingIOError:
                return
            if not data and self.num_received > num_before:
                return
            if not data:
                raise ConnectionResetError("the other end closed the connection")
            for payload in self._protocol.receive(data):
                message = MEMBERSHIP_REPLY_CODEC.decode(payload)
                self.num_received += 1
                for answer in self._view.take(message):
                    self.send(answer)
                self.is_assigned |= isinstance(message, MemberAssigned)

    def flush(self) -> None:
        """Send what the kernel takes."""
        flush(self._socket, self._protocol.outgoing)

    def flush_until(self, deadline: float) -> None:
        """Send everything, until a time of ``time.monotonic()`` at the latest."""
        self.flush()
        while self.has_more and self.wait(deadline, select.POLLOUT):
            self.flush()

    def wait(self, deadline: float, events: int = select.POLLIN) -> bool:
        """Wait until something has come, or the deadline; whether it has."""
        poll = select.poll()
        poll.register(self._socket, events)
        return bool(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))

    def close(self, delivery_seconds: float = 0.0) -> None:
        """End it; what was said may take so long to arrive. Repeatable."""
        wait_until_delivered(self._socket, delivery_seconds)
        self._socket.close()


def flush(connection: socket.socket, outgoing: bytearray) -> None:
    """Send what the kernel takes. What the other end said before it went is still to be read."""
    try:
        del outgoing[: connection.send(outgoing)]
    except BlockingIOError:
        pass
    except ConnectionError:
        outgoing.clear()
