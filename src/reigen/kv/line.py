"""Messages of the parameter server over one `reigen.wire.link.Link`, without blocking; urgent ones overtake others.

A message is one message of the link for its header, and one for its body if it has any. What is to be sent waits here,
by priority (higher first, in order among equals), and at most `AHEAD_BYTES` are handed to the link ahead, so an urgent
message waits for that much and for what is under way in the kernel. Bodies are received straight into the place that
the receiver names when it has seen the header.
"""

from __future__ import annotations

import heapq
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from reigen.errors import WireError
from reigen.kv.protocol import HEADER_BYTES, Header, Kind, unpack_header
from reigen.wire.link import Link

#: How much is handed to the link before what comes later may no longer overtake it.
AHEAD_BYTES = 1 << 20
#: Messages that one call of `Line.receive` takes, so that one busy peer does not keep others waiting.
_MOST_MESSAGES = 64
_NOTHING = memoryview(b"")
#: Nobody would send these again.
_NEVER_DROPPED = frozenset(map(int, (Kind.HELLO, Kind.WELCOME, Kind.RELEASE, Kind.NOTICE)))
_log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Who gets what arrives on a line. Errors that it raises end `Line.receive`, and the line is of no further use."""

    def place(self, line: Line, header: Header) -> memoryview:
        """Where the body of a message is to land: exactly ``header.body_bytes`` bytes, writable."""

    def arrived(self, line: Line, header: Header, body: memoryview) -> None:
        """A message is complete; ``body`` is what `place` returned, empty where nothing followed the header."""


class Drops:
    """Which of the messages that arrive are lost, to try out what happens then (PS_DROP_MSG).

    Args:
        percent: how many of a hundred.
        seed: equal seeds drop the same ones.
    """

    def __init__(self, percent: float, seed: int = 0) -> None:
        self._percent = percent
        self._random = random.Random(seed)

    def next(self, header: Header) -> bool:
        """Whether the message with this header is lost."""
        return header.kind not in _NEVER_DROPPED and self._random.random() * 100 < self._percent


@dataclass(slots=True)
class _Outgoing:
    """A message on its way.

    Attributes:
        num_left: how many messages of the link it still consists of.
    """

    header: bytes
    body: memoryview
    on_sent: Callable[[], None] | None
    num_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_left = 2 if self.body.nbytes else 1

    @property
    def num_bytes(self) -> int:
        return HEADER_BYTES + self.body.nbytes


class Line:
    """One end of the connection between a worker and a server. One thread at a time may use it.

    After any error the line is of no further use: close it.

    Args:
        link: behind whose handshake nothing has been sent or received.
        receiver: gets what arrives.
        name: of the other end, for logs.
        drops: loses messages on purpose.
        log_messages: log every message (PS_VERBOSE=2).

    Attributes:
        name: of the other end.
    """

    def __init__(
        self, link: Link, receiver: Receiver, name: str, *, drops: Drops | None = None, log_messages: bool = False
    ) -> None:
        self._link = link
        self._receiver = receiver
        self.name = name
        self._drops = drops
        self._log_messages = log_messages
        #: what the link does not have yet: by priority, then in order
        self._waiting: list[tuple[int, int, _Outgoing]] = []
        self._num_queued = 0
        #: what the link has, in its order, and how many bytes that is
        self._handed: deque[_Outgoing] = deque()
        self._num_ahead_bytes = 0
        self._header_place = memoryview(bytearray(HEADER_BYTES))
        #: the header whose body is expected, where that is to land, and whether it is lost
        self._header: Header | None = None
        self._body = _NOTHING
        self._is_dropped = False
        self._link.post_receive(self._header_place)

    def fileno(self) -> int:
        """The socket's descriptor, -1 after `close`."""
        return self._link.fileno()

    @property
    def wants_to_send(self) -> bool:
        """Whether anything waits to be sent: call `advance_sends` when the socket is writable."""
        return bool(self._handed or self._waiting)

    @property
    def is_receiving(self) -> bool:
        """Whether a message has arrived in part: its header, and not all of its body."""
        return self._header is not None

    @property
    def receiving(self) -> Header | None:
        """The header of the message that has arrived in part."""
        return self._header

    def send(
        self,
        header: Header,
        body: memoryview | bytes = _NOTHING,
        *,
        priority: int = 0,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a message; `advance_sends` sends it.

        Args:
            header: with ``body_bytes``, the length of ``body``.
            body: contiguous; must stay as it is until it has been sent.
            priority: higher ones overtake lower ones; messages of one priority stay in order.
            on_sent: called when the kernel has all of it. Never called if the line ends before.

        Raises:
            WireError: the header announces another length.
        """
        body = memoryview(body)
        if header.body_bytes != body.nbytes:
            raise WireError(f"{self.name}: a header announces {header.body_bytes} bytes, its body has {body.nbytes}")
        if self._log_messages:
            self._log("to", header)
        heapq.heappush(self._waiting, (-priority, self._num_queued, _Outgoing(header.pack(), body, on_sent)))
        self._num_queued += 1

    def advance_sends(self) -> None:
        """Send what the kernel takes now.

        Raises:
            ConnectionError: the peer has gone.
        """
        while self._waiting or self._handed:
            while self._waiting and self._num_ahead_bytes < AHEAD_BYTES:
                self._hand(heapq.heappop(self._waiting)[2])
            num_sent = self._link.advance_sends()
            if num_sent:
                self._count(num_sent)
            if self._link.wants_to_send or not num_sent:
                return

    def receive(self) -> bool:
        """Take what is there now; returns whether there may be more, because these were many messages.

        Raises:
            ConnectionError: the peer has gone, or has given up.
            WireError, AuthenticationError: what came is no message; so may the receiver say.
        """
        for _ in range(_MOST_MESSAGES):
            if not self._link.advance_receives():
                return False
            self._take()
        return True

    def close(self) -> None:
        """Close the connection and let go of all memory. May be called twice."""
        self._link.close()
        self._waiting.clear()
        self._handed.clear()
        self._header, self._body = None, _NOTHING

    def _hand(self, message: _Outgoing) -> None:
        self._link.post_send(memoryview(message.header))
        if message.body.nbytes:
            self._link.post_send(message.body)
        self._handed.append(message)
        self._num_ahead_bytes += message.num_bytes

    def _count(self, num_sent: int) -> None:
        """So many messages of the link have left."""
        while num_sent:
            first = self._handed[0]
            num_of_first = min(num_sent, first.num_left)
            first.num_left -= num_of_first
            num_sent -= num_of_first
            if not first.num_left:
                self._handed.popleft()
                self._num_ahead_bytes -= first.num_bytes
                if first.on_sent is not None:
                    first.on_sent()

    def _take(self) -> None:
        """A message of the link has arrived: a header, or the body of the one before."""
        if self._header is None:
            header = unpack_header(self._header_place)
            self._is_dropped = self._drops is not None and self._drops.next(header)
            if header.body_bytes:
                self._header, self._body = header, self._place(header)
                self._link.post_receive(self._body)
                return
            body = _NOTHING
        else:
            header, body = self._header, self._body
            self._header, self._body = None, _NOTHING
        self._link.post_receive(self._header_place)
        if self._log_messages:
            self._log("lost from" if self._is_dropped else "from", header)
        if not self._is_dropped:
            self._receiver.arrived(self, header, body)

    def _place(self, header: Header) -> memoryview:
        place = self._receiver.place(self, header)
        if place.nbytes != header.body_bytes:
            raise WireError(
                f"{self.name}: a {Kind(header.kind).name} of {header.body_bytes} bytes "
                f"where {place.nbytes} are expected"
            )
        # a message that is to be lost has to land somewhere, but not where it would count
        return memoryview(bytearray(header.body_bytes)) if self._is_dropped else place.cast("B")

    def _log(self, direction: str, header: Header) -> None:
        _log.info(
            "%s %s: %s request=%d key=%d cell=%d round=%d bytes=%d%s",
            direction, self.name, Kind(header.kind).name, header.request, header.key, header.cell, header.round,
            header.num_bytes, " in shared memory" if header.memory_bytes else "",
        )  # fmt: skip
