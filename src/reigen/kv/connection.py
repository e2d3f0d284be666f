"""Messages of the parameter server over one connection, without blocking; urgent ones overtake others.

What is to be sent waits here, by priority (higher first, in order among equals), and at most `SEND_AHEAD_BYTES` are
handed on ahead (`reigen.net.framing`), so an urgent message waits for that much and for what is under way in the
kernel. Bodies are received into the place that the receiver names when it has seen the header; those of control
messages are authenticated as headers are.
"""

from __future__ import annotations

import heapq
import logging
import random
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol

from reigen.errors import WireError
from reigen.kv.protocol import CONTROL_KINDS, HEADER_BYTES, MessageHeader, MessageKind, unpack_header
from reigen.net.auth import TAG_BYTES, AuthSession
from reigen.net.framing import FramedConnection
from reigen.net.tls import TlsSocket

#: How much is handed on before what comes later may no longer overtake it.
SEND_AHEAD_BYTES = 1 << 20
#: Messages that one call of `KVConnection.receive` takes, so that one busy peer does not keep others waiting.
_MOST_MESSAGES = 64
_NOTHING = memoryview(b"")
#: Nobody would send these again.
_NEVER_DROPPED = frozenset(map(int, (MessageKind.HELLO, MessageKind.WELCOME, MessageKind.RELEASE, MessageKind.NOTICE)))
_log = logging.getLogger(__name__)


class MessageReceiver(Protocol):
    """Receiver of what arrives. Errors that it raises end `KVConnection.receive`, and the connection is of no use."""

    def place(self, line: KVConnection, header: MessageHeader) -> memoryview:
        """Return where the body of a message is to land: exactly ``header.body_bytes`` bytes, writable."""

    def arrived(self, line: KVConnection, header: MessageHeader, body: memoryview) -> None:
        """Take a complete message; ``body`` is what `place` returned, empty where nothing followed the header."""


class MessageDropper:
    """Loses some percent of the messages that arrive, to try out what happens then (PS_DROP_MSG).

    Equal seeds drop the same ones.
    """

    def __init__(self, percent: float, seed: int = 0) -> None:
        self._percent, self._random = percent, random.Random(seed)

    def next(self, header: MessageHeader) -> bool:
        """Return whether the message with this header is lost."""
        return header.kind not in _NEVER_DROPPED and self._random.random() * 100 < self._percent


class KVConnection:
    """One end of the connection between a worker and a server. One thread at a time may use it.

    After any error it is of no further use: close it.

    Args:
        connection, session: as of `reigen.net.framing.FramedConnection`.
        receiver: gets what arrives, unless ``drops`` loses it on purpose.
        name: of the other end, for logs.
        log_messages: every one (PS_VERBOSE=2).
    """

    def __init__(
        self,
        connection: socket.socket | TlsSocket,
        session: AuthSession,
        receiver: MessageReceiver,
        name: str,
        *,
        drops: MessageDropper | None = None,
        log_messages: bool = False,
    ) -> None:
        self._framed = FramedConnection(connection, session, HEADER_BYTES)
        self._receiver = receiver
        self.name = name
        self._drops = drops
        self._log_messages = log_messages
        #: what was not handed on: by priority, then in order; header, body, and what is called then
        self._waiting: list[tuple[int, int, MessageHeader, memoryview, Callable[[], None] | None]] = []
        self._num_queued = 0
        #: what is called when so many bytes have left
        self._on_sent: deque[tuple[int, Callable[[], None]]] = deque()
        #: the header whose body is expected, where that is to land, and whether it is lost
        self._header: MessageHeader | None = None
        self._body = _NOTHING
        self._is_dropped = False

    def fileno(self) -> int:
        """Return the socket's descriptor, -1 after `close`."""
        return self._framed.fileno()

    @property
    def wants_to_send(self) -> bool:
        """Return whether anything waits to be sent: call `advance_sends` when the socket is writable."""
        return bool(self._waiting) or self._framed.num_sent_bytes < self._framed.num_posted_bytes

    @property
    def num_received_bytes(self) -> int:
        """Bytes that have come since the beginning, headers included."""
        return self._framed.num_received_bytes

    @property
    def receiving(self) -> MessageHeader | None:
        """Header of the message that has arrived in part."""
        return self._header

    def send(
        self,
        header: MessageHeader,
        body: memoryview | bytes = _NOTHING,
        *,
        priority: int = 0,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a message; `advance_sends` sends it.

        Args:
            header: with ``body_bytes``, the length of ``body``: WireError if it is another.
            body: contiguous bytes, if any; must stay as they are until they have been sent.
            priority: higher ones overtake lower ones; messages of one priority stay in order.
            on_sent: called when the kernel has all of it. Never called if the line ends before.
        """
        body = memoryview(body)
        if header.body_bytes != body.nbytes:
            raise WireError(f"{self.name}: a header announces {header.body_bytes} bytes, its body has {body.nbytes}")
        if self._log_messages:
            self._log("to", header)
        heapq.heappush(self._waiting, (-priority, self._num_queued, header, body, on_sent))
        self._num_queued += 1

    def advance_sends(self) -> None:
        """Send as much as the kernel takes now; raises ConnectionError if the peer has gone."""
        framed, waiting = self._framed, self._waiting
        while True:
            while waiting and framed.num_posted_bytes - framed.num_sent_bytes < SEND_AHEAD_BYTES:
                _, _, header, body, on_sent = heapq.heappop(waiting)
                framed.post(header.pack(), body, is_sealed=header.kind in CONTROL_KINDS and body.nbytes > 0)
                if on_sent is not None:
                    self._on_sent.append((framed.num_posted_bytes, on_sent))
            is_all = framed.flush()
            while self._on_sent and self._on_sent[0][0] <= framed.num_sent_bytes:
                self._on_sent.popleft()[1]()
            if not (is_all and waiting):
                return

    def receive(self) -> bool:
        """Take the messages that have come; returns whether there may be more, because these were many.

        Raises:
            ConnectionError: the peer has gone.
            WireError, AuthenticationError: what came is no message; so may the receiver say.
        """
        framed = self._framed
        for _ in range(_MOST_MESSAGES):
            if self._header is None:
                data = framed.take_header()
                if data is None:
                    return False
                header = unpack_header(data)
                self._is_dropped = self._drops is not None and self._drops.next(header)
                if not header.body_bytes:
                    self._arrived(header, _NOTHING)
                    continue
                self._header, self._body = header, self._place(header)
            if not framed.fill(self._body):
                return False
            header, body = self._header, self._body
            self._header, self._body = None, _NOTHING
            self._arrived(header, memoryview(framed.opened(body)) if header.kind in CONTROL_KINDS else body)
        return True

    def close(self) -> None:
        """Close the connection and let go of all memory. May be called twice."""
        self._framed.close()
        self._waiting.clear()
        self._on_sent.clear()
        self._header, self._body = None, _NOTHING

    def _arrived(self, header: MessageHeader, body: memoryview) -> None:
        if self._log_messages:
            self._log("lost from" if self._is_dropped else "from", header)
        if not self._is_dropped:
            self._receiver.arrived(self, header, body)

    def _place(self, header: MessageHeader) -> memoryview:
        place = self._receiver.place(self, header)
        if place.nbytes != header.body_bytes:
            raise WireError(
                f"{self.name}: a {MessageKind(header.kind).name} of {header.body_bytes} bytes "
                f"where {place.nbytes} are expected"
            )
        if header.kind in CONTROL_KINDS:
            return memoryview(bytearray(TAG_BYTES + header.body_bytes))
        # a message that is to be lost has to land somewhere, but not where it would count
        return memoryview(bytearray(header.body_bytes)) if self._is_dropped else place.cast("B")

    def _log(self, direction: str, header: MessageHeader) -> None:
        _log.info(
            "%s %s: %s request=%d key=%d shard=%d round=%d bytes=%d%s",
            direction, self.name, MessageKind(header.kind).name, header.request, header.key, header.shard, header.round,
            header.num_bytes, " in shared memory" if header.memory_bytes else "",
        )  # fmt: skip
