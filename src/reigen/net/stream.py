"""Authenticated messages over one TCP connection: a core without I/O, and a blocking stream with deadlines."""

from __future__ import annotations

import socket
import time
from collections import deque
from typing import TYPE_CHECKING

from reigen.errors import AuthenticationError, WireError
from reigen.net.auth import TAG_BYTES, AuthSession, ClientHandshake, Handshake, Identity, ServerHandshake
from reigen.net.codec import FrameBuffer, add_length_prefix
from reigen.net.sockets import (
    bound_retransmit_backoff,
    set_keepalive,
    translate_connection_losses,
    wait_until_delivered,
)

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsChannel, TlsContext, TlsSocket

_READ_BYTES = 1 << 16
#: What it means where a connection ends before both ends are proven.
HANDSHAKE_ENDED_TEXT = (
    "the other end closed the connection during the handshake: it knows another secret, has another version of Reigen "
    "or another REIGEN_TLS, or has gone"
)


class StreamProtocol:
    """One end of an authenticated connection, without a socket: bytes go in, payloads come out.

    Whoever owns the socket sends ``outgoing`` when it can, and reads at most ``num_wanted_bytes`` at a time. Until the
    peer is proven these are the bytes of the handshake and no more, and none of them is decoded.

    Args:
        handshake: of the connecting or of the accepting end.
        max_payload_bytes: the largest payload, both ways.
        channel: this end of TLS, if all of this is to be encrypted.

    Attributes:
        outgoing: what is to be sent.
        peer: who is at the other end, None until it has proven to know the secret.
    """

    def __init__(self, handshake: Handshake, max_payload_bytes: int, channel: TlsChannel | None = None) -> None:
        self._handshake = handshake
        self._max_body_bytes = max_payload_bytes + TAG_BYTES
        self._session: AuthSession | None = None
        self._early = bytearray()
        self._frames = FrameBuffer(self._max_body_bytes)
        self.outgoing = bytearray()
        self._channel = channel
        if channel is None:
            self._put(handshake.opening)
        else:
            self.outgoing += channel.take()

    @property
    def peer(self) -> Identity | None:
        """Who is at the other end, None until it has proven to know the secret."""
        return None if self._session is None else self._session.peer

    @property
    def num_wanted_bytes(self) -> int:
        """How much to read at most."""
        if self._session is not None:
            return _READ_BYTES
        if self._channel is not None:
            return self._channel.num_wanted_bytes
        return self._handshake.num_expected_bytes - len(self._early)

    def receive(self, data: bytes) -> list[bytes]:
        """Take what was read (at most ``num_wanted_bytes``); returns the payloads that are complete.

        Raises:
            AuthenticationError: the peer does not know the secret, or a payload is not its next one.
            WireError: a length is too large. After either error the connection must be closed.
        """
        if self._channel is not None:
            data = self._decrypt(data, self._channel)
        if self._session is None:
            data = self._shake_hands(data)
        return self._open(data)

    def detach(self, connection: socket.socket) -> tuple[socket.socket | TlsSocket, AuthSession]:
        """What somebody needs who carries on with the same connection in another way.

        Raises:
            WireError: the peer is not proven yet, or bytes are left that were read or queued.
        """
        if self._session is None or self.outgoing or len(self._frames):
            raise WireError("a conversation can be left only at the end of a message, and after the handshake")
        if self._channel is None:
            return connection, self._session
        from reigen.net.tls import TlsSocket

        return TlsSocket(connection, self._channel), self._session

    def send(self, payload: bytes) -> None:
        """Put one payload behind what is ``outgoing``. Only after the handshake.

        Raises:
            WireError: it is larger than the limit, or the peer is not proven yet.
        """
        if self._session is None:
            raise WireError("nothing can be sent before the handshake")
        if len(payload) + TAG_BYTES > self._max_body_bytes:
            raise WireError(
                f"a payload has {len(payload)} bytes; at most {self._max_body_bytes - TAG_BYTES} are allowed"
            )
        self._put(add_length_prefix(self._session.seal(payload), self._max_body_bytes))

    def _open(self, data: bytes) -> list[bytes]:
        payloads: list[bytes] = []
        if self._session is not None:
            self._frames.feed(data)
            while (body := self._frames.pop()) is not None:
                payloads.append(self._session.open(body))
        return payloads

    def _put(self, data: bytes) -> None:
        if self._channel is None:
            self.outgoing += data
        elif data:
            self._channel.write(data)
            self.outgoing += self._channel.take()

    def _decrypt(self, data: bytes, channel: TlsChannel) -> bytes:
        """What the records say; while TLS is being established, go on with that."""
        if self._session is not None:
            channel.feed(data)
        else:
            channel.feed_record(data)
        if not channel.binding:
            is_established = channel.advance()
            self.outgoing += channel.take()
            if not is_established:
                return b""
            self._handshake.binding = channel.binding
            self._put(self._handshake.opening)
        return channel.read()

    def _shake_hands(self, data: bytes) -> bytes:
        """Give the handshake what it expects; returns what is left of ``data`` behind it."""
        while data and self._session is None:
            num_missing = self._handshake.num_expected_bytes - len(self._early)
            self._early += data[:num_missing]
            data = data[num_missing:]
            if len(self._early) == self._handshake.num_expected_bytes:
                message, self._early = bytes(self._early), bytearray()
                answer, self._session = self._handshake.advance(message)
                self._put(answer)
        return data


class AuthenticatedStream:
    """A blocking, authenticated stream of payloads. One thread at a time may use it.

    Every call has a deadline: a point on the clock of ``time.monotonic()``, in seconds. After a ``TimeoutError`` the
    stream goes on where it was: nothing that was read or queued is lost.

    Use :func:`connect_stream` or :func:`accept_stream` to make one.
    """

    def __init__(self, connection: socket.socket, conversation: StreamProtocol) -> None:
        self._connection = connection
        self._conversation = conversation
        self._payloads: deque[bytes] = deque()

    @property
    def peer(self) -> Identity:
        """Who is at the other end."""
        peer = self._conversation.peer
        assert peer is not None, "a stream is handed out after its handshake"
        return peer

    def fileno(self) -> int:
        """The connection's descriptor: readable when `receive` may find more."""
        return self._connection.fileno()

    def keep_alive(self, peer_timeout_seconds: float, *, bulk: bool = False) -> None:
        """See `reigen.net.sockets.set_keepalive`."""
        set_keepalive(self._connection, peer_timeout_seconds, bulk=bulk)

    def wait_until_delivered(self, seconds: float) -> None:
        """See `reigen.net.sockets.wait_until_delivered`."""
        wait_until_delivered(self._connection, seconds)

    def send(self, payload: bytes, deadline: float) -> None:
        """Send one payload.

        Raises:
            TimeoutError: it has not left by the deadline.
            ConnectionError: the peer has gone.
            WireError: it is too large.
        """
        self._conversation.send(payload)
        self._flush(deadline)

    def receive(self, deadline: float) -> bytes:
        """The peer's next payload.

        Raises:
            TimeoutError: it has not come by the deadline.
            ConnectionError: the peer has gone.
            AuthenticationError, WireError: the bytes are not the peer's; the stream is closed.
        """
        while not self._payloads:
            self._read(deadline)
        return self._payloads.popleft()

    def detach(self) -> tuple[socket.socket | TlsSocket, AuthSession]:
        """Hand over the connection, now non-blocking, and the session; this stream cannot be used any more.

        Both ends must do so at the same place of their conversation: for `reigen.net.bulk_connection.BulkConnection`,
            right after the
        handshake.

        Raises:
            WireError: payloads have been read or queued that nobody has taken or sent.
        """
        if self._payloads:
            raise WireError("a stream was detached while payloads of the peer were waiting in it")
        connection, session = self._conversation.detach(self._connection)
        self._connection.setblocking(False)
        return connection, session

    def hand_over(self) -> tuple[socket.socket, StreamProtocol]:
        """The socket, now non-blocking, and the conversation, for who waits in another way; this stream is done."""
        self._connection.setblocking(False)
        return self._connection, self._conversation

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self._connection.close()

    def shake_hands(self, deadline: float) -> None:
        """Authenticate both ends; called by ``connect_stream`` and ``accept_stream``."""
        self._flush(deadline)
        while self._conversation.peer is None:
            try:
                self._read(deadline)
            except ConnectionError:
                raise AuthenticationError(HANDSHAKE_ENDED_TEXT) from None
            self._flush(deadline)

    def _flush(self, deadline: float) -> None:
        outgoing = self._conversation.outgoing
        while outgoing:
            self._arm(deadline)
            with translate_connection_losses():
                sent = self._connection.send(outgoing)
            del outgoing[:sent]

    def _read(self, deadline: float) -> None:
        self._arm(deadline)
        with translate_connection_losses():
            data = self._connection.recv(self._conversation.num_wanted_bytes)
        if not data:
            raise ConnectionResetError("the other end closed the connection")
        try:
            self._payloads.extend(self._conversation.receive(data))
        except (AuthenticationError, WireError):
            self.close()
            raise

    def _arm(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left)


#: How long a connection that was accepted may take to prove itself. Where every third packet is lost, what is said in a
#: handshake may have to be said a dozen times.
HANDSHAKE_SECONDS = 20.0


def connect_stream(
    address: tuple[str, int],
    secret: bytes,
    me: Identity,
    max_payload_bytes: int,
    deadline: float,
    tls: TlsContext | None = None,
) -> AuthenticatedStream:
    """Connect to ``address`` and authenticate both ends.

    Args:
        address: host and port.
        secret: the job's 32 bytes.
        me: who connects, and what for.
        max_payload_bytes: the largest payload, both ways.
        deadline: on the clock of ``time.monotonic()``.
        tls: encrypt everything; the other end must do so, too.

    Raises:
        AuthenticationError: the other end does not know the secret, or one end uses TLS and the other does not.
        TimeoutError: not done by the deadline.
        OSError: nobody listens there.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    connection = socket.create_connection(address, timeout=left)
    channel = None if tls is None else tls.connects()
    return _shake_hands_or_close(
        connection, StreamProtocol(ClientHandshake(secret, me), max_payload_bytes, channel), deadline
    )


def accept_stream(
    connection: socket.socket,
    secret: bytes,
    me: Identity,
    max_payload_bytes: int,
    deadline: float,
    tls: TlsContext | None = None,
) -> AuthenticatedStream:
    """Authenticate both ends of an accepted connection. Arguments and errors as of `connect_stream`."""
    channel = None if tls is None else tls.accepts()
    return _shake_hands_or_close(
        connection, StreamProtocol(ServerHandshake(secret, me), max_payload_bytes, channel), deadline
    )


def _shake_hands_or_close(
    connection: socket.socket, conversation: StreamProtocol, deadline: float
) -> AuthenticatedStream:
    stream = AuthenticatedStream(connection, conversation)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound_retransmit_backoff(connection)
        stream.shake_hands(deadline)
    except BaseException:
        stream.close()
        raise
    return stream
