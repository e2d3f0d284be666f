"""Small messages and large ones over one authenticated connection, without blocking: for who does not know what comes.

A message says itself what it is, by a header of fixed length, and its receiver then says where the body belongs.
`reigen.net.bulk_connection` is the same for peers that know each next message and its length beforehand.

a. A message is a sealed header (tag, header), and its body, whose length the header tells in the user's way.
b. A body is sealed, too (tag, body), or it is not; both ends know from the header which. What is not sealed can be
   changed on its way unnoticed, unless the connection is one of TLS (`net.tls`).
c. The end of the connection is an error on both ends, at any time.

Many small messages take one system call: reading takes what is there, and goes on from memory. What is missing of a
large body is read straight into its place.
"""

from __future__ import annotations

import itertools
import socket
from collections import deque

from reigen.net.auth import TAG_BYTES, AuthSession, Identity
from reigen.net.sockets import as_connection_error
from reigen.net.tls import TlsSocket

#: What is read ahead; of larger bodies no more than that passes through here.
_BUFFER_BYTES = 1 << 17
#: Bodies up to so many bytes are copied behind their header: a piece more costs the kernel as much.
_JOINED_BYTES = 1 << 12
#: How many pieces go to the kernel in one call.
_MOST_PIECES = 256
_NOTHING = memoryview(bytearray())


class FramedConnection:
    """One end of a connection. One thread at a time may use it; after any error it is of no further use: close it.

    Args:
        connection: a non-blocking stream socket, or one with TLS, behind whose handshake nothing has been read.
        session: what the handshake made. Both come from `Connection.detach`.
        header_bytes: length of a header.
        buffer_bytes: how much is read ahead.

    Attributes:
        peer: who is at the other end.
        num_posted_bytes: how much was posted since the beginning.
        num_sent_bytes: how much of that the kernel has taken.
        num_received_bytes: how much was read since the beginning.
    """

    def __init__(
        self,
        connection: socket.socket | TlsSocket,
        session: AuthSession,
        header_bytes: int,
        buffer_bytes: int = _BUFFER_BYTES,
    ) -> None:
        self._connection = connection
        self._tls = connection if isinstance(connection, TlsSocket) else None
        self._session = session
        self.peer: Identity = session.peer
        self._sealed_bytes = TAG_BYTES + header_bytes
        self.num_posted_bytes = self.num_sent_bytes = self.num_received_bytes = 0
        #: what is to be sent, the first piece without what has left
        self._pieces: deque[memoryview | bytes] = deque()
        self._buffer = memoryview(bytearray(buffer_bytes))
        #: what was read and not taken: ``[begin, end)`` of the buffer
        self._begin = self._end = 0
        #: the last read took all that was there
        self._is_drained = False
        #: how much of the body that is expected is in its place
        self._num_filled = 0

    def fileno(self) -> int:
        """The socket's descriptor, -1 after `close`."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close the connection and let go of all memory. May be called twice."""
        self._connection.close()
        self._pieces.clear()

    # -- sending ------------------------------------------------------------------------------------------------------

    def post(self, header: bytes, body: memoryview = _NOTHING, *, is_sealed: bool = False) -> None:
        """Queue a message. The body's memory must stay as it is until the kernel has it (`num_sent_bytes`)."""
        first = self._session.seal(header)
        if is_sealed:
            first += self._session.seal(bytes(body))
        elif len(body) <= _JOINED_BYTES:
            first += body
        else:
            self._pieces += (first, body)
            self.num_posted_bytes += len(first) + len(body)
            return
        self._pieces.append(first)
        self.num_posted_bytes += len(first)

    def flush(self) -> bool:
        """Send as much as the kernel takes; return whether that is all.

        Raises:
            ConnectionError: the peer has gone.
        """
        pieces = self._pieces
        while pieces:
            is_cut = len(pieces) > _MOST_PIECES
            try:
                num_sent = self._connection.sendmsg(itertools.islice(pieces, _MOST_PIECES) if is_cut else pieces)
            except BlockingIOError:
                return False
            except OSError as error:
                raise as_connection_error(error) from None
            self.num_sent_bytes += num_sent
            if self.num_sent_bytes == self.num_posted_bytes:
                pieces.clear()
                return True
            while num_sent >= len(pieces[0]):
                num_sent -= len(pieces.popleft())
            if num_sent:
                pieces[0] = memoryview(pieces[0])[num_sent:]
            if not is_cut and self._tls is None:
                return False  # the kernel took a part: it is full
        return True

    # -- receiving ----------------------------------------------------------------------------------------------------

    def take_header(self, place: memoryview = _NOTHING) -> bytes | None:
        """Return the next message's header; None if it is not there now. Its body comes next, by `fill`.

        Args:
            place: of that body, if it is known: what comes with the header lands there.

        Raises:
            AuthenticationError: it is not the peer's next one.
            ConnectionError: the peer has gone.
        """
        while self._end - self._begin < self._sealed_bytes:
            if not self._read(place, header_first=True):
                return None
        begin = self._begin
        self._begin = begin + self._sealed_bytes
        return self._session.open(bytes(self._buffer[begin : self._begin]))

    def fill(self, place: memoryview) -> bool:
        """Go on receiving a body; whether all of it is in ``place`` now, which is the same in all calls for a body.

        Raises:
            ConnectionError: the peer has gone.
        """
        length = len(place)
        while self._num_filled < length:
            begin, filled = self._begin, self._num_filled
            num_here = min(self._end - begin, length - filled)
            if num_here:
                place[filled : filled + num_here] = self._buffer[begin : begin + num_here]
                self._begin += num_here
                self._num_filled += num_here
            elif not self._read(place[filled:]):
                return False
        self._num_filled = 0
        return True

    def opened(self, body: memoryview) -> bytes:
        """Return the contents of a sealed body that has arrived, with the ``TAG_BYTES`` in front.

        Raises:
            AuthenticationError: it is not the peer's next one.
        """
        return self._session.open(bytes(body))

    def _read(self, place: memoryview, *, header_first: bool = False) -> bool:
        """Read into ``place``, and then ahead, or the other way round; returns whether there was anything."""
        if self._is_drained:
            self._is_drained = False
            return False
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._end > len(self._buffer) - self._sealed_bytes:  # a part of a header, which would not fit
            rest = bytes(self._buffer[self._begin : self._end])
            self._begin, self._end = 0, len(rest)
            self._buffer[: self._end] = rest
        ahead = self._buffer[self._end :]
        try:
            num_read = self._connection.recvmsg_into([ahead, place] if header_first else [place, ahead])[0]
        except BlockingIOError:
            return False
        except OSError as error:
            raise as_connection_error(error) from None
        if not num_read:
            is_in_message = not header_first or self._end > self._begin  # a body, or a header
            raise ConnectionResetError(
                "the other end closed the connection" + " in the middle of a message" * is_in_message
            )
        self.num_received_bytes += num_read
        self._is_drained = num_read < len(place) + len(ahead)
        num_ahead = min(num_read, len(ahead)) if header_first else max(0, num_read - len(place))
        self._num_filled += num_read - num_ahead
        self._end += num_ahead
        return True
