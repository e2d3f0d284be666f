"""Authenticated messages over one TCP connection: a core without I/O, and a blocking stream with deadlines."""

from __future__ import annotations

import socket
import time
from collections import deque

from reigen.errors import AuthenticationError, WireError
from reigen.wire.auth import TAG_BYTES, ClientHandshake, Handshake, Identity, ServerHandshake, Session
from reigen.wire.codec import FrameBuffer, frame
from reigen.wire.sockets import keepalive, losses_are_connection_errors

_READ_BYTES = 1 << 16


class Conversation:
    """One end of an authenticated connection, without a socket: bytes go in, payloads come out.

    Whoever owns the socket sends ``outgoing`` when it can, and reads at most ``num_wanted_bytes`` at a time. Until the
    peer is proven these are the bytes of the handshake and no more, and none of them is decoded.

    Args:
        handshake: of the connecting or of the accepting end.
        max_payload_bytes: the largest payload, both ways.

    Attributes:
        outgoing: what is to be sent.
        peer: who is at the other end, None until it has proven to know the secret.
    """

    def __init__(self, handshake: Handshake, max_payload_bytes: int) -> None:
        self._handshake = handshake
        self._max_body_bytes = max_payload_bytes + TAG_BYTES
        self._session: Session | None = None
        self._early = bytearray()
        self._frames = FrameBuffer(self._max_body_bytes)
        self.outgoing = bytearray(handshake.opening)

    @property
    def peer(self) -> Identity | None:
        """Who is at the other end, None until it has proven to know the secret."""
        return None if self._session is None else self._session.peer

    @property
    def num_wanted_bytes(self) -> int:
        """How much to read at most."""
        return _READ_BYTES if self._session is not None else self._handshake.num_expected_bytes - len(self._early)

    def receive(self, data: bytes) -> list[bytes]:
        """Take what was read (at most ``num_wanted_bytes``); returns the payloads that are complete.

        Raises:
            AuthenticationError: the peer does not know the secret, or a payload is not its next one.
            WireError: a length is too large. After either error the connection must be closed.
        """
        if self._session is None:
            self._early += data
            if len(self._early) == self._handshake.num_expected_bytes:
                message, self._early = bytes(self._early), bytearray()
                answer, self._session = self._handshake.advance(message)
                self.outgoing += answer
            return []
        self._frames.feed(data)
        payloads = []
        while (body := self._frames.pop()) is not None:
            payloads.append(self._session.open(body))
        return payloads

    def detach(self) -> Session:
        """The session, for somebody who carries on with the same connection in another way.

        Raises:
            WireError: the peer is not proven yet, or bytes are left that were read or queued.
        """
        if self._session is None or self.outgoing or len(self._frames):
            raise WireError("a conversation can be left only at the end of a message, and after the handshake")
        return self._session

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
        self.outgoing += frame(self._session.seal(payload), self._max_body_bytes)


class Stream:
    """A blocking, authenticated stream of payloads. One thread at a time may use it.

    Every call has a deadline: a point on the clock of ``time.monotonic()``, in seconds. After a ``TimeoutError`` the
    stream goes on where it was: nothing that was read or queued is lost.

    Use :func:`connect` or :func:`accept` to make one.
    """

    def __init__(self, connection: socket.socket, conversation: Conversation) -> None:
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

    def keep_alive(self, peer_timeout_seconds: float) -> None:
        """See `reigen.wire.sockets.keepalive`."""
        keepalive(self._connection, peer_timeout_seconds)

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

    def detach(self) -> tuple[socket.socket, Session]:
        """Hand over the connection, now non-blocking, and the session; this stream cannot be used any more.

        Both ends must do so at the same place of their conversation: for `reigen.wire.link.Link`, right after the
        handshake.

        Raises:
            WireError: payloads have been read or queued that nobody has taken or sent.
        """
        session = self._conversation.detach()
        if self._payloads:
            raise WireError("a stream was detached while payloads of the peer were waiting in it")
        self._connection.setblocking(False)
        return self._connection, session

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self._connection.close()

    def shake_hands(self, deadline: float) -> None:
        """Authenticate both ends; called by ``connect`` and ``accept``."""
        self._flush(deadline)
        while self._conversation.peer is None:
            try:
                self._read(deadline)
            except ConnectionError:
                raise AuthenticationError(
                    "the other end closed the connection during the handshake: it knows another secret, speaks another "
                    "version of Reigen's protocol, or has gone"
                ) from None
            self._flush(deadline)

    def _flush(self, deadline: float) -> None:
        outgoing = self._conversation.outgoing
        while outgoing:
            self._arm(deadline)
            with losses_are_connection_errors():
                sent = self._connection.send(outgoing)
            del outgoing[:sent]

    def _read(self, deadline: float) -> None:
        self._arm(deadline)
        with losses_are_connection_errors():
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


def connect(address: tuple[str, int], secret: bytes, me: Identity, max_payload_bytes: int, deadline: float) -> Stream:
    """Connect to ``address`` and authenticate both ends.

    Raises:
        AuthenticationError: the other end does not know the secret.
        TimeoutError: not done by the deadline.
        OSError: nobody listens there.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    connection = socket.create_connection(address, timeout=left)
    return _established(connection, Conversation(ClientHandshake(secret, me), max_payload_bytes), deadline)


def accept(connection: socket.socket, secret: bytes, me: Identity, max_payload_bytes: int, deadline: float) -> Stream:
    """Authenticate both ends of a connection that a listening socket accepted. Raises as ``connect``."""
    return _established(connection, Conversation(ServerHandshake(secret, me), max_payload_bytes), deadline)


def _established(connection: socket.socket, conversation: Conversation, deadline: float) -> Stream:
    stream = Stream(connection, conversation)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.shake_hands(deadline)
    except BaseException:
        stream.close()
        raise
    return stream
