"""Connections from this rank to another one, as the event loop of the TCP backend sees them."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from reigen.net.bulk_connection import BulkConnection
from reigen.net.sockets import AckMonitor, retransmit_after_close

#: Called when a message has left or arrived.
CompletionCallback = Callable[[], None]

#: Bytes that the kernel takes beyond those that it may send at once, where there are several ranks to send to.
_UNSENT_BYTES = 1 << 17


class PeerConnection:
    """Link to a rank.

    Attributes:
        sending, receiving: callbacks of the link's messages, in their order.
        events: those that the poll object looks for.
    """

    __slots__ = ("_ack_monitor", "events", "fd", "link", "peer", "receiving", "sending")

    def __init__(self, peer: TcpPeer, link: BulkConnection) -> None:
        self.peer, self.link = peer, link
        self.fd = link.fileno()
        self.sending: deque[CompletionCallback | None] = deque()
        self.receiving: deque[CompletionCallback | None] = deque()
        self.events = 0
        self._ack_monitor = AckMonitor()

    def leave_little_unsent(self) -> None:
        """Have the kernel take no more than it may send soon, so that a message that has left is on its way."""
        with self._connection() as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def close(self) -> None:
        """Close the link. Sent data may still be on their way."""
        if self.link.fileno() >= 0:
            with self._connection() as connection:
                retransmit_after_close(connection)
        self.link.close()

    @property
    def is_same_host(self) -> bool:
        """True if both ends have the same address, which both ends see. Where it is over, its first use shows it."""
        with self._connection() as connection:
            try:
                return bool(connection.getsockname()[0] == connection.getpeername()[0])
            except OSError:
                return False

    @property
    def silent_seconds(self) -> float:
        """Seconds of silence: see `reigen.net.sockets.AckMonitor`."""
        with self._connection() as connection:
            return self._ack_monitor.seconds(connection)

    @contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """Yield the socket beneath the link, for its options."""
        connection = socket.socket(fileno=self.fd)
        try:
            yield connection
        finally:
            connection.detach()


@dataclass(slots=True)
class _ExpectedMessage:
    """Message that is expected from a rank with several links."""

    then: CompletionCallback | None
    has_arrived: bool = False


class TcpPeer:
    """Rank with the links to it, which messages take in turn.

    Between hosts every link carries messages both ways, so that acknowledgements travel with them. Within a host each
    direction has links of its own, which was faster where TCP's congestion control is bbr, and made no clear difference
    with cubic or reno; why is not known.

    Attributes:
        connections: all links; ``ways``: those there are for sending, and for receiving.
        outgoing, incoming: those of them that are used.
        num_given, num_expected: numbers of messages to send, and to receive, since these have changed.
        num_leaving: number of messages to send that have not left.
        has_untried: a message was posted and has not been tried; ``expects_more``: a place for one was.
        is_heard: data has come since the operation began; ``is_active``: since the last look around.
        is_silent: its host had been silent for too long when that was looked at last.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.connections: list[PeerConnection] = []
        self.ways = (self.connections, self.connections)
        self.outgoing = self.incoming = self.connections
        self.num_given = self.num_expected = self.num_leaving = 0
        self.has_untried = self.expects_more = self.is_heard = self.is_active = self.is_silent = False
        self._arriving: deque[_ExpectedMessage] = deque()

    def close(self) -> None:
        """Drop the links, which refer to their peer."""
        self.connections, self.outgoing, self.incoming = [], [], []
        self.ways = ([], [])

    def use_sockets(self, num_sockets: int) -> None:
        """Send through, and expect from, so many connections; nothing is under way."""
        there, back = self.ways
        self.outgoing, self.incoming = there[:num_sockets], back[:num_sockets]
        self.num_given = self.num_expected = 0

    def call_in_order(self, then: CompletionCallback | None) -> CompletionCallback:
        """Have ``then`` called when its message and all posted before it have come, though they take several links."""
        arrival = _ExpectedMessage(then)
        self._arriving.append(arrival)

        def arrived() -> None:
            arrival.has_arrived = True
            while self._arriving and self._arriving[0].has_arrived:
                next_one = self._arriving.popleft().then
                if next_one is not None:
                    next_one()

        return arrived

    @property
    def silent_seconds(self) -> float:
        """Seconds for which its host has left data unacknowledged, on any of the connections."""
        return max(connection.silent_seconds for connection in self.connections)

    @property
    def owes_data(self) -> bool:
        """True if a message is expected from it."""
        return any(connection.receiving for connection in self.connections)
