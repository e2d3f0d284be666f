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
import itertools
import socket
import struct
from collections import deque

from reigen.errors import WireError
from reigen.net.auth import TAG_BYTES, AuthSession, Identity
from reigen.net.sockets import as_connection_error, connection_closed_error
from reigen.net.tls import TlsSocket

MAX_REASON_BYTES = 1024

_HEADER = struct.Struct(">BQ")
_SEALED_BYTES = TAG_BYTES + _HEADER.size
#: How many pieces go to the kernel in one call: 8 messages.
_MOST_PIECES = 16


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


class BulkConnection:
    """One end of a connection for bulk data. One thread at a time may use it.

    After any error the link is of no further use: close it. Places that were posted may then hold anything.

    Args:
        connection: a non-blocking stream socket, or one with TLS, behind whose handshake nothing has been read.
        session: what the handshake made. Both come from `Stream.detach`.

    Attributes:
        peer: who is at the other end.
    """

    def __init__(self, connection: socket.socket | TlsSocket, session: AuthSession) -> None:
        self._connection = connection
        self._tls = connection if isinstance(connection, TlsSocket) else None
        self._session = session
        self.peer: Identity = session.peer
        #: What is to be sent, headers and messages by turns; the first piece without what has left already.
        self._pieces: deque[memoryview | bytes] = deque()
        #: Whether the first piece is a message, whose header has left.
        self._is_header_sent = False
        self._posted: deque[memoryview] = deque()
        self._header = bytearray(_SEALED_BYTES)
        self._header_view = memoryview(self._header)
        self._num_header_bytes = 0
        #: Length of the message whose bytes come now; None while its header is not complete.
        self._length: int | None = None
        #: Where the reason of the peer's ABORT lands, once that has been announced.
        self._reason: memoryview | None = None
        self._num_received_bytes = 0

    def fileno(self) -> int:
        """The socket's descriptor, -1 after ``close``."""
        return self._connection.fileno()

    @property
    def wants_to_send(self) -> bool:
        """Whether anything is queued."""
        return bool(self._pieces)

    @property
    def wants_to_receive(self) -> bool:
        """Whether something would be done with what arrives: not while a message waits that no place is posted for."""
        return bool(self._posted) or self._length is None or self._reason is not None

    @property
    def num_expected(self) -> int:
        """How many places are posted that have not been filled."""
        return len(self._posted)

    @property
    def num_received_bytes(self) -> int:
        """How many bytes of the oldest posted place are there already."""
        return self._num_received_bytes if self._length is not None and self._reason is None else 0

    def post_send(self, data: memoryview) -> None:
        """Queue one message. Its memory must stay as it is until `advance_sends` has counted it.

        Args:
            data: contiguous, of any format.
        """
        data = data.cast("B") if data.nbytes else memoryview(b"")
        self._pieces.append(self._session.seal(_HEADER.pack(_DATA, len(data))))
        self._pieces.append(data)

    def post_receive(self, into: memoryview) -> None:
        """Have the peer's next message, of exactly ``len(into)`` bytes, land in ``into``.

        Args:
            into: contiguous and writable, of any format.
        """
        self._posted.append(into.cast("B") if into.nbytes else memoryview(bytearray()))

    def advance_sends(self) -> int:
        """Send what the kernel takes now; returns how many messages have left completely in this call.

        Raises:
            ConnectionError: the peer has gone.
        """
        pieces, num_completed = self._pieces, 0
        while pieces:
            num_later = max(0, len(pieces) - _MOST_PIECES)
            try:
                num_sent = self._connection.sendmsg(itertools.islice(pieces, _MOST_PIECES) if num_later else pieces)
            except BlockingIOError:
                break
            except OSError as error:
                raise as_connection_error(error) from None
            num_completed += self._take_off(num_sent)
            if len(pieces) > num_later and self._tls is None:
                break  # the kernel took a part: it is full
        return num_completed

    def advance_receives(self) -> int:
        """Receive what is there now; returns how many messages have arrived completely in this call.

        Where no place is posted, this looks for the peer's ABORT and for the end of the connection.

        Raises:
            PeerAborted: the peer has given up.
            ConnectionError: the peer has gone.
            WireError: a message has another length than the place that was posted for it.
            AuthenticationError: a header, or a reason, is not the peer's next one.
        """
        num_completed = 0
        while (self._length is not None or self._read_header()) and self._read_message():
            num_completed += 1
            if not self._posted and (self._tls is None or not self._tls.has_read_ahead):
                break
        return num_completed

    def abort(self, reason: bytes) -> None:
        """Tell the peer that this end gives up, as well as can be done without waiting; then `close`.

        Messages that have not begun to leave are dropped. One that has is finished first, if the kernel takes the rest
        of it at once; otherwise the peer only sees the connection end.

        Args:
            reason: why; what exceeds 1 KiB is cut off.
        """
        reason = reason[:MAX_REASON_BYTES]
        num_begun = self._num_begun_pieces()
        self._session.take_back((len(self._pieces) - num_begun) // 2)
        while len(self._pieces) > num_begun:
            self._pieces.pop()
        self._pieces.append(self._session.seal(_HEADER.pack(_ABORT, TAG_BYTES + len(reason))))
        self._pieces.append(self._session.seal(reason))
        with contextlib.suppress(ConnectionError):
            self.advance_sends()

    def close(self) -> None:
        """Close the connection and let go of all memory. May be called twice."""
        self._connection.close()
        self._pieces.clear()
        self._posted.clear()

    def _num_begun_pieces(self) -> int:
        """How many of the pieces belong to messages that have begun to leave, or are encrypted already."""
        held = 0 if self._tls is None else self._tls.num_held_bytes
        num_begun = 1 if self._is_header_sent else 0
        if not num_begun and self._pieces and len(self._pieces[0]) < _SEALED_BYTES:
            num_begun = 2
        num_bytes = sum(map(len, itertools.islice(self._pieces, num_begun)))
        while num_bytes < held:
            num_bytes += len(self._pieces[num_begun]) + len(self._pieces[num_begun + 1])
            num_begun += 2
        return num_begun

    def _take_off(self, num_sent: int) -> int:
        """Take what has left off the queue; returns how many messages that completes."""
        pieces, num_completed = self._pieces, 0
        while pieces:
            piece = pieces[0]
            if num_sent < len(piece):
                if num_sent:
                    pieces[0] = piece[num_sent:]
                break
            num_sent -= len(piece)
            pieces.popleft()
            num_completed += self._is_header_sent
            self._is_header_sent = not self._is_header_sent
        return num_completed

    def _read_header(self) -> bool:
        """Go on reading a header, and the beginning of its message in the same call; whether it is complete."""
        rest = self._header_view[self._num_header_bytes :] if self._num_header_bytes else self._header_view
        wanted = (rest, self._posted[0]) if self._posted else (rest,)
        try:
            num_read = self._connection.recvmsg_into(wanted)[0]
        except BlockingIOError:
            return False
        except OSError as error:
            raise as_connection_error(error) from None
        if not num_read:
            raise self._ended()
        self._num_header_bytes += num_read
        if self._num_header_bytes < _SEALED_BYTES:
            return False
        self._num_received_bytes = self._num_header_bytes - _SEALED_BYTES
        self._num_header_bytes = 0
        kind, length = _HEADER.unpack(self._session.open(bytes(self._header)))
        if kind != _DATA:
            self._begin_reason(kind, length)
        self._length = length
        return True

    def _begin_reason(self, kind: int, length: int) -> None:
        """Prepare to read an ABORT's reason, the beginning of which lies where the next message was expected."""
        if kind != _ABORT or not TAG_BYTES <= length <= TAG_BYTES + MAX_REASON_BYTES:
            raise WireError(f"a message of kind {kind} and {length} bytes was announced, which no end sends")
        early = bytes(self._posted[0][: self._num_received_bytes]) if self._posted else b""
        self._num_received_bytes = min(length, len(early))
        self._reason = memoryview(bytearray(early[:length].ljust(length, b"\0")))

    def _read_message(self) -> bool:
        """Go on reading a message behind its header; whether it is complete."""
        if self._reason is None and not self._posted:
            return False
        place = self._posted[0] if self._reason is None else self._reason
        if self._length != len(place):
            raise WireError(f"a message of {self._length} bytes was announced where one of {len(place)} is expected")
        if self._num_received_bytes < self._length and not self._fill(place):
            return False
        if self._reason is not None:
            raise PeerAborted(self._session.open(bytes(place)))
        self._posted.popleft()
        self._length, self._num_received_bytes = None, 0
        return True

    def _fill(self, place: memoryview) -> bool:
        """Read what is there of a message; whether it is complete then."""
        try:
            num_read = self._connection.recv_into(place[self._num_received_bytes :])
        except BlockingIOError:
            return False
        except OSError as error:
            raise as_connection_error(error) from None
        if not num_read:
            raise self._ended()
        self._num_received_bytes += num_read
        return self._num_received_bytes == len(place)

    def _ended(self) -> ConnectionError:
        return connection_closed_error(amid=self._length is not None or self._num_header_bytes > 0)
