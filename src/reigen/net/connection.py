"""Authenticated messages over one connection: a core without I/O, and the connection, waited for or not."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reigen.errors import AuthenticationError, WireError
from reigen.net.auth import TAG_BYTES, AuthSession, ClientHandshake, Handshake, Identity, ServerHandshake
from reigen.net.codec import FrameBuffer, add_length_prefix
from reigen.net.event_loop import wait_ready
from reigen.net.sockets import (
    bound_retransmit_backoff,
    set_keepalive,
    translate_connection_losses,
)

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsChannel, TlsContext, TlsSocket

_READ_BYTES = 1 << 16
#: How often `Connection.read` reads, so that one busy peer does not keep others waiting.
_MOST_READS = 32
#: What it means where a connection ends before both ends are proven.
HANDSHAKE_ENDED_TEXT = (
    "the other end closed the connection during the handshake: it knows another secret, has another version of Reigen "
    "or another REIGEN_TLS, or has gone"
)


class StreamProtocol:
    """One end of an authenticated connection, without a socket: bytes go in, payloads come out.

    The owner of the socket sends ``outgoing`` when it can, and reads at most ``num_wanted_bytes`` at a time. Until the
    peer is proven these are the bytes of the handshake and no more, and none of them is decoded.

    Args:
        handshake: of the connecting or of the accepting end.
        max_payload_bytes: the largest payload, both ways.
        channel: this end of TLS, if all of this is to be encrypted.

    Attributes:
        outgoing: what is to be sent.
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
        """Identity of the other end, None until it has proven to know the secret."""
        return None if self._session is None else self._session.peer

    @property
    def num_wanted_bytes(self) -> int:
        """Number of bytes to read at most."""
        if self._session is not None:
            return _READ_BYTES
        if self._channel is not None:
            return self._channel.num_wanted_bytes
        return self._handshake.num_expected_bytes - len(self._early)

    def mask(self, secret: bytes) -> bytes:
        """Mask or unmask one secret, as `AuthSession.mask` does; only after the handshake."""
        assert self._session is not None, "only after the handshake"
        return self._session.mask(secret)

    def receive(self, data: bytes) -> list[bytes]:
        """Take bytes that were read (at most ``num_wanted_bytes``); return the payloads that are complete.

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
        """Return socket and session, for another kind of connection that goes on with them.

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
        """Put one payload behind ``outgoing``. Only after the handshake.

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
        """Return the contents of the records; while TLS is being established, go on with that."""
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
        """Feed the handshake; return the rest of ``data``."""
        while data and self._session is None:
            num_missing = self._handshake.num_expected_bytes - len(self._early)
            self._early += data[:num_missing]
            data = data[num_missing:]
            if len(self._early) == self._handshake.num_expected_bytes:
                message, self._early = bytes(self._early), bytearray()
                answer, self._session = self._handshake.advance(message)
                self._put(answer)
        return data


class Connection:
    """One end of an authenticated connection for messages. One thread at a time may use it.

    The socket does not block. `advance`, `flush` and `read` do what is possible now. `shake_hands`, `send` and
    `receive` wait until a deadline on the clock of ``time.monotonic()``; after a ``TimeoutError`` the connection goes
    on where it was: nothing that was read or queued is lost.

    Args:
        connection: a stream socket; it may still be connecting.
        protocol: this end.

    Attributes:
        socket: the same.
        num_posted: messages that have not left.
    """

    def __init__(self, connection: socket.socket, protocol: StreamProtocol) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.num_posted = 0
        self._protocol = protocol
        self._messages: deque[bytes] = deque()

    @property
    def is_authenticated(self) -> bool:
        """Return whether the other end has proven to know the secret."""
        return self._protocol.peer is not None

    @property
    def peer(self) -> Identity:
        """Identity of the other end, once that is authenticated."""
        peer = self._protocol.peer
        assert peer is not None, "only after the handshake"
        return peer

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that wait for the socket to be writable."""
        return len(self._protocol.outgoing)

    def fileno(self) -> int:
        """The socket's descriptor, -1 after `close`."""
        return self.socket.fileno()

    def mask(self, secret: bytes) -> bytes:
        """Mask or unmask one secret, as `reigen.net.auth.AuthSession.mask` does; only after the handshake."""
        return self._protocol.mask(secret)

    def keep_alive(self, peer_timeout_seconds: float, *, bulk: bool = False) -> None:
        """Set keepalive options, as `reigen.net.sockets.set_keepalive` does."""
        set_keepalive(self.socket, peer_timeout_seconds, bulk=bulk)

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self.socket.close()

    def detach(self) -> tuple[socket.socket | TlsSocket, AuthSession]:
        """Give socket and session to another kind of connection; this one cannot be used any more.

        Both ends do so at the same message: for `BulkConnection` and `FramedConnection`, right after the handshake.

        Raises:
            WireError: messages were read or posted that were not taken, or that have not left.
        """
        if self._messages:
            raise WireError("a connection was detached while messages of the peer were waiting in it")
        return self._protocol.detach(self.socket)

    # -- without waiting ----------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Go on with the handshake; returns whether both ends are authenticated.

        Raises:
            OSError: the connection could not be made, or has ended.
            AuthenticationError, WireError: the peer does not know the secret, or does not speak this protocol.
        """
        with contextlib.suppress(BlockingIOError):
            while True:
                self._send_outgoing()
                if self.is_authenticated:
                    return True
                self._read(" during the handshake")
        return False

    def post(self, message: bytes) -> None:
        """Queue a message; `flush` sends it.

        Raises:
            WireError: it is too large, or the peer is not authenticated yet.
        """
        self._protocol.send(message)
        self.num_posted += 1

    def flush(self) -> bool:
        """Send as much as the kernel takes; return whether that is all.

        Raises:
            OSError: the peer has gone.
        """
        try:
            self._send_outgoing()
        except BlockingIOError:
            return False
        self.num_posted = 0
        return True

    def read(self) -> list[bytes]:
        """Return the messages that have come. Of many, some are left, and the socket stays readable.

        Raises:
            OSError: the peer has gone, and everything that it sent was returned.
            AuthenticationError, WireError: the bytes are not the peer's.
        """
        if not self._messages:
            try:
                for _ in range(_MOST_READS):
                    if not self._read():
                        break
            except BlockingIOError:
                pass
            except OSError:
                if not self._messages:  # otherwise the next call meets the end
                    raise
        messages = list(self._messages)
        self._messages.clear()
        return messages

    # -- with a deadline ----------------------------------------------------------------------------------------------

    def shake_hands(self, deadline: float) -> None:
        """Authenticate both ends.

        Raises:
            TimeoutError: not done by the deadline.
            AuthenticationError: the peer does not know the secret, or has gone.
        """
        self._wait_until(deadline, self._send_outgoing, select.POLLOUT)
        while not self.is_authenticated:
            try:
                self._wait_until(deadline, self._read, select.POLLIN)
            except ConnectionError:
                raise AuthenticationError(HANDSHAKE_ENDED_TEXT) from None
            self._wait_until(deadline, self._send_outgoing, select.POLLOUT)

    def send(self, message: bytes, deadline: float) -> None:
        """Send a message.

        Raises:
            TimeoutError: it has not left by the deadline.
            ConnectionError: the peer has gone.
            WireError: it is too large.
        """
        self.post(message)
        self._wait_until(deadline, self._send_outgoing, select.POLLOUT)
        self.num_posted = 0

    def receive(self, deadline: float) -> bytes:
        """Return the peer's next message.

        Raises:
            TimeoutError: it has not come by the deadline.
            ConnectionError: the peer has gone.
            AuthenticationError, WireError: the bytes are not the peer's; the connection is closed.
        """
        while not self._messages:
            self._wait_until(deadline, self._read, select.POLLIN)
        return self._messages.popleft()

    def _wait_until(self, deadline: float, step: Callable[[], object], events: int) -> None:
        """Take a step as soon as the socket is ready."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            try:
                with translate_connection_losses():
                    step()
                return
            except BlockingIOError:
                wait_ready(self.socket, left, events)
            except (AuthenticationError, WireError):
                self.close()
                raise

    def _send_outgoing(self) -> None:
        outgoing = self._protocol.outgoing
        while outgoing:
            del outgoing[: self.socket.send(outgoing)]

    def _read(self, where: str = "") -> bool:
        """Read once; returns whether there may be more."""
        num_wanted = self._protocol.num_wanted_bytes
        data = self.socket.recv(num_wanted)
        if not data:
            raise ConnectionResetError(f"the other end closed the connection{where}")
        self._messages.extend(self._protocol.receive(data))
        return len(data) == num_wanted


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """One end's side of all connections that it makes or accepts for one purpose.

    Attributes:
        secret: the job's 32 bytes.
        me: identity of this end.
        max_message_bytes: the largest message, both ways.
        tls: encrypt everything; the other end must do so, too.
        peer_timeout_seconds: see `reigen.net.sockets.set_keepalive`; None: it is called later.
        bulk: the same.
    """

    secret: bytes
    me: Identity
    max_message_bytes: int
    tls: TlsContext | None = None
    peer_timeout_seconds: float | None = None
    bulk: bool = False

    def accept(self, accepted: socket.socket) -> Connection:
        """Begin the handshake of the accepting end."""
        channel = None if self.tls is None else self.tls.accepts()
        return self._begin(accepted, self.make_server_handshake(), channel)

    def make_server_handshake(self) -> Handshake:
        """Make the accepting end's handshake."""
        return ServerHandshake(self.secret, self.me)

    def connect(self, connecting: socket.socket) -> Connection:
        """Begin the handshake of the connecting end."""
        channel = None if self.tls is None else self.tls.connects()
        return self._begin(connecting, ClientHandshake(self.secret, self.me), channel)

    def start_connecting(self, address: tuple[str, int]) -> Connection:
        """Begin to connect to host and port; `Connection.advance` goes on, once the socket is writable.

        Raises:
            OSError: that has failed at once.
        """
        connection = self.connect(socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET))
        try:
            with contextlib.suppress(BlockingIOError):
                connection.socket.connect(address)
        except BaseException:
            connection.close()
            raise
        return connection

    def _begin(self, connection: socket.socket, handshake: Handshake, channel: TlsChannel | None) -> Connection:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.peer_timeout_seconds is None:
                bound_retransmit_backoff(connection)
            else:
                set_keepalive(connection, self.peer_timeout_seconds, bulk=self.bulk)
            return Connection(connection, StreamProtocol(handshake, self.max_message_bytes, channel))
        except BaseException:
            connection.close()
            raise


def open_connection(
    address: tuple[str, int],
    secret: bytes,
    me: Identity,
    max_message_bytes: int,
    deadline: float,
    tls: TlsContext | None = None,
) -> Connection:
    """Connect to ``address`` and authenticate both ends; arguments as of `ConnectionOptions`.

    Raises:
        AuthenticationError: the other end does not know the secret, or one end uses TLS and the other does not.
        TimeoutError: not done by the deadline.
        OSError: no process listens there.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    options = ConnectionOptions(secret, me, max_message_bytes, tls)
    connection = options.connect(socket.create_connection(address, timeout=left))
    try:
        connection.shake_hands(deadline)
    except BaseException:
        connection.close()
        raise
    return connection
