"""Where authenticated connections for small messages arrive: what every service of a job has in common. No thread.

Everything is bounded: how many connections may be unproven and for how long, how large a message is, and how much may
wait to be sent to somebody who does not read. A connection that breaks a rule is closed; no other connection notices.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import selectors
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from reigen.errors import AuthenticationError, ConfigError, WireError
from reigen.net.auth import Identity, ServerHandshake
from reigen.net.fork_safety import close_in_children
from reigen.net.sockets import set_keepalive
from reigen.net.stream import HANDSHAKE_SECONDS, StreamProtocol

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext

_log = logging.getLogger(__name__)

#: Connections that have not proven themselves; one more closes the oldest of them.
MAX_UNAUTHENTICATED = 128
#: What may wait to be sent to one end.
MAX_UNREAD_BYTES = 8 << 20
_BACKLOG = 512
#: epoll counts milliseconds in 31 bits.
_LONGEST_WAIT_SECONDS = 86_400.0
#: What the kernel says of a connection whose peer's machine does not answer.
SILENCE_ERRNOS = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ENONET}
)


class ClientConnection:
    """One connection.

    Attributes:
        deadline: until when it must have proven itself.
        has_spoken: it has sent a message.
    """

    def __init__(self, connection: socket.socket, conversation: StreamProtocol, deadline: float) -> None:
        self.socket, self.conversation, self.deadline = connection, conversation, deadline
        self.has_spoken = False

    @property
    def peer(self) -> Identity | None:
        """Who is at the other end, None until it has proven to know the secret."""
        return self.conversation.peer


class MessageListener:
    """Listens, authenticates, and hands over what proven ends say. Whoever owns it calls `turn` from one thread.

    Args:
        secret: the job's 32 bytes.
        address: host and port to listen on, of one interface; port 0: the kernel chooses.
        me: who listens.
        max_message_bytes: the largest message, both ways.
        receive: is called with each message of a guest; an AuthenticationError or WireError ends that connection.
        gone: is called when a connection has ended, and with whether the guest's whole machine is silent.
        handshake_seconds: how long a connection may be unauthenticated.
        peer_timeout_seconds: after how long a machine that is not heard of any more counts as lost.
        must_speak: a connection counts as unauthenticated until it has said something.
        port_is_held: the launcher holds the port by SO_REUSEPORT, which this listener then needs, too.
        tls: encrypt everything; whoever connects must do so, too.

    Attributes:
        address: ``host:port``; connections queue there from now on.

    Raises:
        ConfigError: the host is not the address of an interface.
        OSError: the port is taken, or the address is not this machine's.
    """

    def __init__(
        self,
        secret: bytes,
        address: tuple[str, int],
        me: Identity,
        max_message_bytes: int,
        receive: Callable[[ClientConnection, bytes], None],
        gone: Callable[[ClientConnection, bool], None],
        *,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        peer_timeout_seconds: float = 20.0,
        must_speak: bool = False,
        port_is_held: bool = False,
        tls: TlsContext | None = None,
    ) -> None:
        host, port = address
        check_address(host)
        self._secret, self._me, self._max_message_bytes = secret, me, max_message_bytes
        self._receive, self._gone = receive, gone
        self._handshake_seconds = handshake_seconds
        self._peer_timeout_seconds, self._must_speak = peer_timeout_seconds, must_speak
        self._tls = tls
        self._guests: dict[socket.socket, ClientConnection] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=port_is_held)
        self._listener.setblocking(False)
        self.address = join_address(host, self._listener.getsockname()[1])
        self._waker, self._wakened = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakened, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        close_in_children(self)

    @property
    def num_clients(self) -> int:
        """How many connections there are whose ends are proven."""
        return sum(guest.peer is not None for guest in self._guests.values())

    def turn(self, due: float | None) -> bool:
        """Wait for what happens next, at most until ``due`` (``time.monotonic()``), and handle it.

        Returns:
            False once `end` has been called.
        """
        goes_on = True
        for key, events in self._selector.select(self._seconds_until(due)):
            if key.fileobj is self._wakened:
                goes_on = False
            elif key.fileobj is self._listener:
                self._accept()
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._guests:
                self._serve(self._guests[key.fileobj], events)
        self._drop_slow()
        return goes_on

    def send(self, guest: ClientConnection, message: bytes) -> None:
        """Queue a message; what was queued for somebody who has gone meanwhile is lost."""
        if guest.socket in self._guests:
            guest.conversation.send(message)
            self._watch(guest)

    def drop(self, guest: ClientConnection) -> None:
        """End a connection, without `gone` being called."""
        if self._guests.pop(guest.socket, None) is not None:
            self._selector.unregister(guest.socket)
            with contextlib.suppress(OSError):
                guest.socket.send(guest.conversation.outgoing)
            guest.socket.close()

    def end(self) -> None:
        """Have `turn` return, from any thread. May be called twice."""
        self._waker.close()

    def flush_and_close_all(self) -> None:
        """Send the last words as well as can be done without waiting, and end all connections."""
        for guest in list(self._guests.values()):
            self.drop(guest)

    def close(self) -> None:
        """Stop listening and end all connections. May be called twice."""
        self.flush_and_close_all()
        self._selector.close()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """See `reigen.net.fork_safety`."""
        for each in (self._listener, self._waker, self._wakened, *self._guests):
            each.close()

    def _seconds_until(self, due: float | None) -> float | None:
        deadlines = [one.deadline for one in self._strangers()]
        deadlines += [] if due is None else [due]
        return min(_LONGEST_WAIT_SECONDS, max(0.0, min(deadlines) - time.monotonic())) if deadlines else None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptors left: those who do not prove themselves give theirs back
            if not self._drop_oldest_stranger():
                time.sleep(0.05)  # the listener stays readable: without a pause this thread would spin
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        set_keepalive(connection, self._peer_timeout_seconds)
        channel = None if self._tls is None else self._tls.accepts()
        conversation = StreamProtocol(ServerHandshake(self._secret, self._me), self._max_message_bytes, channel)
        self._guests[connection] = ClientConnection(
            connection, conversation, time.monotonic() + self._handshake_seconds
        )
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._strangers()) > MAX_UNAUTHENTICATED:
            self._drop_oldest_stranger()

    def _serve(self, guest: ClientConnection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read(guest)
            self._flush(guest)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(guest, silent=error.errno in SILENCE_ERRNOS)
        except (AuthenticationError, WireError):
            self._lose(guest)

    def _read(self, guest: ClientConnection) -> None:
        data = guest.socket.recv(guest.conversation.num_wanted_bytes)
        if not data:
            raise ConnectionResetError
        for payload in guest.conversation.receive(data):
            guest.has_spoken = True
            if guest.socket in self._guests:  # not once it was dropped
                self._receive(guest, payload)

    def _flush(self, guest: ClientConnection) -> None:
        if guest.socket not in self._guests:
            return
        outgoing = guest.conversation.outgoing
        if len(outgoing) > MAX_UNREAD_BYTES:
            raise WireError("somebody asks for more than it reads")
        if outgoing:
            with contextlib.suppress(BlockingIOError):
                del outgoing[: guest.socket.send(outgoing)]
        self._watch(guest)

    def _watch(self, guest: ClientConnection) -> None:
        writing = selectors.EVENT_WRITE if guest.conversation.outgoing else 0
        self._selector.modify(guest.socket, selectors.EVENT_READ | writing)

    def _strangers(self) -> list[ClientConnection]:
        guests = self._guests.values()
        return [one for one in guests if one.peer is None or (self._must_speak and not one.has_spoken)]

    def _drop_slow(self) -> None:
        now = time.monotonic()
        for one in self._strangers():
            if one.deadline <= now:
                self._lose(one)

    def _drop_oldest_stranger(self) -> bool:
        strangers = self._strangers()
        if strangers:
            self._lose(min(strangers, key=lambda one: one.deadline))
        return bool(strangers)

    def _lose(self, guest: ClientConnection, *, silent: bool = False) -> None:
        if self._guests.pop(guest.socket, None) is not None:
            self._selector.unregister(guest.socket)
            if guest.peer is None:
                _log.info("a connection to %s has ended, and nobody there has proven to know the secret", self.address)
            elif self._must_speak and not guest.has_spoken:
                _log.info("a connection to %s has ended, and nobody there has said anything", self.address)
            self._gone(guest, silent)
            guest.socket.close()


def check_address(host: str) -> None:
    """Raise ConfigError unless ``host`` is an address that belongs to one interface."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"a service listens on an address of an interface, not on {host!r}") from None
    if address.is_unspecified or address.is_multicast:
        raise ConfigError(f"a service listens on one interface of this machine, never on {host!r}")


def join_address(host: str, port: int) -> str:
    """``host:port``, ``[host]:port`` where the host is an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
