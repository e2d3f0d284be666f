"""Bulk data over one authenticated connection, without blocking and without copies.

The protocol, after the handshake of `net.auth`:

a. Both ends have agreed beforehand, by what they are doing, which messages they exchange and how long each is. A
   receiver posts the places where the peer's next messages are to land, a sender posts messages.
b. A message is a sealed header of 25 bytes (tag, kind, length) and its bytes. The length must be the one of the
   place that was posted for it. Nothing is allocated for what a peer announces.
c. An end that gives up sends a message of kind ABORT in place of the next one: at most 1 KiB of reason, sealed behind
   a tag of its own. An end that gives up in the middle of a message can only close the connection.
d. The end of the connection is an error on both ends, at any time.

Headers and reasons are sealed, so one that is forged, repeated or left out ends the connection. The bytes of messages
are not: who can change packets on their way can change numbers, unless the connection is one of TLS (`net.tls`).

Waiting is the user's: `advance_receives` and `advance_sends` do what is possible now. The socket tells when more is
possible (readable while ``wants_to_receive``, writable while ``wants_to_send``; level-triggered), with one exception:
what came together with something else has been read already. So call `advance_receives` after posting places, and wait
when it has done what it can.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import deque

from reigen.errors import WireError
from reigen.net.auth import TAG_BYTES, AuthSession
from reigen.net.framing import FramedConnection
from reigen.net.tls import TlsSocket

MAX_REASON_BYTES = 1024

_HEADER = struct.Struct(">BQ")
_NOTHING = memoryview(bytearray())
#: Kinds of messages.
_DATA, _ABORT = 1, 2


class PeerAborted(ConnectionError):  # noqa: N818  an event of the peer's
    """The peer has given up, and says why.

    Attributes:
        reason: its bytes, at most 1 KiB, not to be trusted further than the peer.
    """

    def __init__(self, reason: bytes) -> None:
        self.reason = reason
        super().__init__("the peer has given up")


class BulkConnection(FramedConnection):
    """One end of a connection for bulk data. One thread at a time may use it.

    Arguments as of `FramedConnection`. After any error places that were posted may hold anything.
    """

    def __init__(self, connection: socket.socket | TlsSocket, session: AuthSession) -> None:
        super().__init__(connection, session, _HEADER.size, TAG_BYTES + _HEADER.size)
        self._posted: deque[memoryview] = deque()
        #: where messages that have not left end, and the last one that has: in bytes posted since the beginning
        self._ends: deque[int] = deque()
        self._last_end = 0
        #: length of the message whose bytes come now; None while its header is not complete
        self._length: int | None = None
        #: where the reason of the peer's ABORT lands, once that has been announced
        self._reason: memoryview | None = None

    @property
    def wants_to_send(self) -> bool:
        """Return whether anything is queued."""
        return bool(self._pieces)

    @property
    def wants_to_receive(self) -> bool:
        """Return whether arriving bytes would be taken: not while a message waits that no place is posted for."""
        return bool(self._posted) or self._length is None or self._reason is not None

    @property
    def num_expected(self) -> int:
        """Number of places that are posted and not filled."""
        return len(self._posted)

    @property
    def num_placed_bytes(self) -> int:
        """Number of bytes of the oldest posted place that are there already."""
        return self._num_filled if self._length is not None and self._reason is None else 0

    def post_send(self, data: memoryview) -> None:
        """Queue one message, contiguous, of any format; its memory stays as it is until `advance_sends` counts it."""
        data = data.cast("B") if data.nbytes else _NOTHING
        self.post(_HEADER.pack(_DATA, len(data)), data)
        self._ends.append(self.num_posted_bytes)

    def post_receive(self, into: memoryview) -> None:
        """Have the peer's next message, of just its length, land in ``into``: contiguous, writable, of any format."""
        self._posted.append(into.cast("B") if into.nbytes else _NOTHING)

    def advance_sends(self) -> int:
        """Send as much as the kernel takes; return how many messages have left completely in this call.

        Raises:
            ConnectionError: the peer has gone.
        """
        self.flush()
        ends, num_completed = self._ends, 0
        while ends and ends[0] <= self.num_sent_bytes:
            self._last_end = ends.popleft()
            num_completed += 1
        return num_completed

    def advance_receives(self) -> int:
        """Receive all that has come; return how many messages have arrived completely in this call.

        Where no place is posted, this looks for the peer's ABORT and for the end of the connection.

        Raises:
            PeerAborted: the peer has given up.
            ConnectionError: the peer has gone.
            WireError: a message has another length than the place that was posted for it.
            AuthenticationError: a header, or a reason, is not the peer's next one.
        """
        self._is_drained = False
        num_completed = 0
        while (self._length is not None or self._take_header()) and self._receive_body():
            num_completed += 1
            if not (self._posted or self._end > self._begin or (self._tls is not None and self._tls.has_read_ahead)):
                break
        return num_completed

    def abort(self, reason: bytes) -> None:
        """Tell the peer that this end gives up, as well as can be done without waiting; then `close`.

        Messages that have not begun to leave are dropped. One that has is finished first, if the kernel takes the rest
        of it at once; otherwise the peer only sees the connection end. Of ``reason``, 1 KiB at most is sent.
        """
        reason = reason[:MAX_REASON_BYTES]
        begun = self.num_sent_bytes + (0 if self._tls is None else self._tls.num_held_bytes)  # or is encrypted
        keep = next(end for end in (self._last_end, *self._ends) if end >= begun)
        self._session.take_back(sum(end > keep for end in self._ends))
        while self.num_posted_bytes > keep:
            self.num_posted_bytes -= len(self._pieces.pop())
        self.post(_HEADER.pack(_ABORT, TAG_BYTES + len(reason)), memoryview(reason), is_sealed=True)
        with contextlib.suppress(ConnectionError):
            self.flush()

    def close(self) -> None:
        """Close the connection and let go of all memory. May be called twice."""
        super().close()
        self._posted.clear()
        self._ends.clear()

    def _take_header(self) -> bool:
        """Begin the next message; returns whether its header is there."""
        place = self._posted[0] if self._posted else _NOTHING
        header = self.take_header(place)
        if header is None:
            return False
        kind, self._length = _HEADER.unpack(header)
        if kind == _ABORT and TAG_BYTES <= self._length <= TAG_BYTES + MAX_REASON_BYTES:
            early = bytes(place[: min(self._num_filled, self._length)])  # of the reason
            self._reason = memoryview(bytearray(early.ljust(self._length, b"\0")))
            self._num_filled = len(early)
        elif kind != _DATA:
            raise WireError(f"a message of kind {kind} and {self._length} bytes was announced, which no end sends")
        return True

    def _receive_body(self) -> bool:
        """Go on with a message behind its header; returns whether it is complete."""
        if self._reason is None and not self._posted:
            return False
        place = self._posted[0] if self._reason is None else self._reason
        if self._length != len(place):
            raise WireError(f"a message of {self._length} bytes was announced where one of {len(place)} is expected")
        if self._num_filled < self._length and not self.fill(place):
            return False
        self._num_filled = 0
        if self._reason is not None:
            raise PeerAborted(self.opened(place))
        self._posted.popleft()
        self._length = None
        return True
