"""The connections from this rank to another one, as the event loop of the TCP backend sees them."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from reigen.net.bulk_connection import BulkConnection
from reigen.net.sockets import AckMonitor, retransmit_after_close

#: What follows when a message has left or arrived.
CompletionCallback = Callable[[], None]

#: How much the kernel takes beyond what it may send at once, where there are several ranks to send to.
_UNSENT_BYTES = 1 << 17


class PeerConnection:
    """One link to a rank.

    Attributes:
        sending, receiving: what follows the messages that the link has been given, in their order.
        events: what the poll object is told to look for.
    """

    __slots__ = ("_silence", "events", "fd", "link", "peer", "receiving", "sending")

    def __init__(self, peer: TcpPeer, link: BulkConnection) -> None:
        self.peer, self.link = peer, link
        self.fd = link.fileno()
        self.sending: deque[CompletionCallback | None] = deque()
        self.receiving: deque[CompletionCallback | None] = deque()
        self.events = 0
        self._silence = AckMonitor()

    def leave_little_unsent(self) -> None:
        """Have the kernel take no more than it may send soon, so that a message that has left is on its way."""
        with self._connection() as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def close(self) -> None:
        """Close the link. What it has sent may still be on its way."""
        if self.link.fileno() >= 0:
            with self._connection() as connection:
                retransmit_after_close(connection)
        self.link.close()

    @property
    def is_same_host(self) -> bool:
        """Whether both ends have the same address; both ends say the same. Where it is over, its first use tells so."""
        with self._connection() as connection:
            try:
                return bool(connection.getsockname()[0] == connection.getpeername()[0])
            except OSError:
                return False

    @property
    def silent_seconds(self) -> float:
        """See `reigen.net.sockets.AckMonitor`."""
        with self._connection() as connection:
            return self._silence.seconds(connection)

    @contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """The socket beneath the link, for its options."""
        connection = socket.socket(fileno=self.fd)
        try:
            yield connection
        finally:
            connection.detach()


@dataclass(slots=True)
class _ExpectedMessage:
    """A message that is expected from a rank with several links."""

    then: CompletionCallback | None
    is_here: bool = False


class TcpPeer:
    """A rank and the links to it, which messages take in turn.

    Between machines every link carries messages both ways, so that what is acknowledged travels with them. Within a
    machine each direction has links of its own, which was faster where TCP's congestion control is bbr, and made no
    clear difference with cubic or reno; why is not known.

    Attributes:
        lanes: all of them; ``outgoing``: those for what this rank sends; ``incoming``: those for what it receives.
        num_given, num_expected: how many messages the links have been given, and have been told to expect, ever.
        num_leaving: how many the links have been given that have not left.
        is_hot: something was posted and has not been tried; ``expects_more``: a place for a message was.
        is_heard: something has come since the operation began; ``is_stirring``: since the last look around.
        is_silent: its machine had been silent for too long when that was looked at last.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lanes: list[PeerConnection] = []
        self.outgoing = self.incoming = self.lanes
        self.num_given = self.num_expected = self.num_leaving = 0
        self.has_untried = self.expects_more = self.is_heard = self.is_active = self.is_silent = False
        self._arriving: deque[_ExpectedMessage] = deque()

    def close(self) -> None:
        """Let go of the lanes, which know whose they are."""
        self.lanes, self.outgoing, self.incoming = [], [], []

    def call_in_order(self, then: CompletionCallback | None) -> CompletionCallback:
        """Have ``then`` called when its message and all posted before it are there, though they take several links."""
        arrival = _ExpectedMessage(then)
        self._arriving.append(arrival)

        def arrived() -> None:
            arrival.is_here = True
            while self._arriving and self._arriving[0].is_here:
                next_one = self._arriving.popleft().then
                if next_one is not None:
                    next_one()

        return arrived

    @property
    def silent_seconds(self) -> float:
        """For how long its machine has left data unacknowledged, on any of the connections."""
        return max(lane.silent_seconds for lane in self.lanes)

    @property
    def owes_data(self) -> bool:
        """Whether something is expected from it."""
        return any(lane.receiving for lane in self.lanes)
