"""Listeners: where connections are accepted and authenticated.

Everything is bounded: how many connections may be unproven and for how long, how large a message is, and how much may
wait to be sent to an end that does not read. A connection that breaks a rule is closed; no other connection notices.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from reigen.errors import AuthenticationError, ConfigError, WireError
from reigen.net.connection import Connection, ConnectionOptions
from reigen.net.event_loop import Callback, EventLoop, HasFileno, Timer
from reigen.net.fork_safety import close_in_children

_log = logging.getLogger(__name__)

#: How long a connection that was accepted may take to prove itself. Where every third packet is lost, what is said in a
#: handshake may have to be said a dozen times.
HANDSHAKE_SECONDS = 20.0
#: Connections that have not proven themselves; one more closes the oldest of them.
MAX_UNAUTHENTICATED = 128
#: What may wait to be sent to one end.
MAX_UNREAD_BYTES = 8 << 20
_BACKLOG = 1024
#: The pause behind a connection that could not be accepted, because no descriptors are left.
_PAUSE_SECONDS = 0.05
_EXHAUSTED_ERRNOS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
#: What the kernel says of a connection whose peer's host does not answer.
SILENCE_ERRNOS = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ENONET}
)


def open_listening_socket(host: str, port: int = 0, *, port_is_held: bool = False) -> tuple[socket.socket, str]:
    """Open a socket at which connections queue from now on; returns it and its address, ``host:port``.

    Args:
        host: an address of one interface.
        port: 0: the kernel chooses.
        port_is_held: the launcher holds the port by SO_REUSEPORT, which this socket then needs, too.

    Raises:
        ConfigError: ``host`` is not the address of an interface.
        OSError: the port is taken, or the address is not this host's.
    """
    check_address(host)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=port_is_held)
    listening.setblocking(False)
    return listening, join_address(host, listening.getsockname()[1])


class Listener:
    """Accepts connections and authenticates them, while its loop runs.

    At most `MAX_UNAUTHENTICATED` connections are pending at a time, and none longer than its deadline. Nothing that
    comes from one is parsed before the other end has proven to know the secret.

    Args:
        loop: run by the owner; connections queue in the kernel while it does not.
        listening: from `open_listening_socket`; closed with the listener.
        options: of the connections.
        on_authenticated: called with each connection whose other end is proven; it is the owner's from then on. Where
            it returns a callback, the connection stays pending until `confirm`, and the callback has to close it.
        handshake_seconds: how long a connection may be pending, before it is proven and after.

    Attributes:
        num_refused: connections that came to nothing.
        last_refusal: the reason for the last one of them.
    """

    def __init__(
        self,
        loop: EventLoop,
        listening: socket.socket,
        options: ConnectionOptions,
        on_authenticated: Callable[[Connection], Callback | None],
        *,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        self._loop, self._listening, self._options = loop, listening, options
        self._on_authenticated, self._handshake_seconds = on_authenticated, handshake_seconds
        self.num_refused, self.last_refusal = 0, ""
        #: deadline of each pending connection, and what closes it; the oldest first
        self._pending: dict[Connection, tuple[float, Callback]] = {}
        self._timer: Timer | None = None
        #: the last attempt to accept found no descriptors left; that is logged once
        self._is_exhausted = False
        self._address = join_address(*listening.getsockname()[:2])
        self._listen()
        close_in_children(self)

    def confirm(self, connection: Connection) -> None:
        """Count a connection as pending no more: it has said something, or has ended. May be called twice."""
        self._pending.pop(connection, None)

    def refuse(self, why: str) -> None:
        """Count a connection that came to nothing, for `num_refused`; the owner closes it."""
        self.num_refused, self.last_refusal = self.num_refused + 1, why

    def close(self) -> None:
        """Stop listening, and end all connections that are not proven. May be called twice."""
        self._loop.unwatch(self._listening)
        for connection in [each for each in self._pending if not each.is_authenticated]:
            self._loop.unwatch(connection)
        self.close_descriptors()
        self._pending.clear()

    def close_descriptors(self) -> None:
        """Close the sockets only; see `reigen.net.fork_safety`."""
        self._listening.close()
        for connection in self._pending:
            if not connection.is_authenticated:
                connection.close()

    def _listen(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.watch(self._listening, self._accept)

    def _accept(self) -> None:
        try:
            connection = self._options.accept(self._listening.accept()[0])
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in _EXHAUSTED_ERRNOS:  # the connection has ended in the queue
                _log.debug("a connection could not be accepted: %s", error)
                return
            # no descriptors left: those who do not prove themselves give theirs back
            if not self._is_exhausted:
                _log.warning("a connection could not be accepted: %s", error)
            self._is_exhausted = True
            oldest = next((each for each in self._pending if not each.is_authenticated), None)
            if oldest is not None:
                self._drop(oldest, "took the last descriptor of this process")
            else:  # the socket stays readable: without a pause this thread would spin
                self._loop.unwatch(self._listening)
                self._loop.call_at(time.monotonic() + _PAUSE_SECONDS, self._listen)
            return
        self._is_exhausted = False
        self._add(connection, partial(self._close, connection))
        self._loop.watch(connection, partial(self._advance, connection))

    def _advance(self, connection: Connection) -> None:
        try:
            is_proven = connection.advance()
        except (OSError, AuthenticationError, WireError) as error:
            self._drop(connection, str(error))
            return
        if not is_proven:
            step = partial(self._advance, connection)
            self._loop.watch(connection, step, step if connection.num_unsent_bytes else None)
            return
        self._loop.unwatch(connection)
        del self._pending[connection]
        if (drop := self._on_authenticated(connection)) is not None:
            self._add(connection, drop)

    def _add(self, connection: Connection, drop: Callback) -> None:
        """Let a connection be pending, among the unproven ones or among those that have said nothing."""
        same_kind = [each for each in self._pending if each.is_authenticated == connection.is_authenticated]
        deadline = time.monotonic() + self._handshake_seconds
        self._pending[connection] = deadline, drop
        if len(same_kind) >= MAX_UNAUTHENTICATED:
            self._drop(same_kind[0], f"was the oldest of more than {MAX_UNAUTHENTICATED} without a proof")
        if self._timer is None:
            self._timer = self._loop.call_at(deadline, self._drop_late)

    def _drop_late(self) -> None:
        now = time.monotonic()
        for connection in [each for each, (deadline, _) in self._pending.items() if deadline <= now]:
            self._drop(connection, "did not prove in time that it knows this job's secret")
        deadlines = [deadline for deadline, _ in self._pending.values()]
        self._timer = self._loop.call_at(min(deadlines), self._drop_late) if deadlines else None

    def _drop(self, connection: Connection, why: str) -> None:
        if (pending := self._pending.pop(connection, None)) is None:
            return  # dropping another one has ended it, too
        self.refuse(why)
        what = "said anything" if connection.is_authenticated else "proven to know the secret"
        _log.info("a connection to %s has ended, and nobody there has %s: %s", self._address, what, why)
        pending[1]()

    def _close(self, connection: Connection) -> None:
        self._loop.unwatch(connection)
        connection.close()


class MessageListener:
    """A listener and its connections: hands over the messages of authenticated ends. One thread calls `turn`.

    Args:
        address: host and port to listen on, of one interface; port 0: the kernel chooses. Or the socket, from
            `open_listening_socket`, which is closed with the listener.
        options: of the connections.
        receive: called with each message; an AuthenticationError or WireError ends that connection.
        gone: called when a connection has ended, and with whether the peer's whole host is silent.
        handshake_seconds: how long a connection may be unauthenticated.
        must_speak: a connection is pending until it has sent a message.
        port_is_held: see `open_listening_socket`.

    Attributes:
        address: ``host:port``; connections queue there from now on.

    Raises:
        ConfigError, OSError: see `open_listening_socket`.
    """

    def __init__(
        self,
        address: tuple[str, int] | socket.socket,
        options: ConnectionOptions,
        receive: Callable[[Connection, bytes], None],
        gone: Callable[[Connection, bool], None],
        *,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        must_speak: bool = False,
        port_is_held: bool = False,
    ) -> None:
        self._receive, self._gone, self._must_speak = receive, gone, must_speak
        self._clients: set[Connection] = set()
        self._is_ending = False
        if isinstance(address, socket.socket):
            listening, self.address = address, join_address(*address.getsockname()[:2])
        else:
            listening, self.address = open_listening_socket(*address, port_is_held=port_is_held)
        self._loop = EventLoop()
        self._listener = Listener(
            self._loop, listening, options, self._on_authenticated, handshake_seconds=handshake_seconds
        )
        close_in_children(self)

    @property
    def num_clients(self) -> int:
        """Number of authenticated connections."""
        return len(self._clients)

    def turn(self, due: float | None) -> bool:
        """Wait for what happens next, at most until ``due`` (``time.monotonic()``), and handle it.

        Returns:
            False once `end` has been called; then it does not wait.
        """
        due = 0.0 if self._is_ending else due
        self._loop.wait(None if due is None else max(0.0, due - time.monotonic()))
        return not self._is_ending

    def watch(self, file: HasFileno | int, on_readable: Callback | None) -> None:
        """Call a function while ``file`` is readable, in `turn`; None: no more."""
        if on_readable is None:
            self._loop.unwatch(file)
        else:
            self._loop.watch(file, on_readable)

    def wake(self) -> None:
        """Have `turn` return soon, from any thread."""
        self._loop.wake()

    def send(self, client: Connection, message: bytes) -> None:
        """Queue a message; it is lost where the connection has ended, or is about to as its end does not read."""
        # beyond the bound nothing is added, and the next `_flush` ends the connection: not here, amid the owner's sends
        if client in self._clients and client.num_unsent_bytes <= MAX_UNREAD_BYTES:
            client.post(message)
            self._watch(client)

    def drop(self, client: Connection) -> None:
        """End a connection, without `gone` being called."""
        if client in self._clients:
            with suppress(OSError):
                client.flush()
            self._forget(client)

    def end(self) -> None:
        """Have `turn` return, from any thread. May be called twice."""
        self._is_ending = True
        self._loop.wake()

    def flush_and_close_all(self) -> None:
        """Send the last words as well as can be done without waiting, and end all connections."""
        for client in list(self._clients):
            self.drop(client)

    def close(self) -> None:
        """Stop listening and end all connections. May be called twice."""
        self.flush_and_close_all()
        self._listener.close()
        self._loop.close()

    def close_descriptors(self) -> None:
        """Close the sockets only; see `reigen.net.fork_safety`."""
        self._loop.close()
        for client in self._clients:
            client.close()

    def _on_authenticated(self, client: Connection) -> Callback | None:
        self._clients.add(client)
        self._watch(client)
        return partial(self._lose, client) if self._must_speak else None

    def _watch(self, client: Connection) -> None:
        flush = partial(self._serve, client, self._flush) if client.num_unsent_bytes else None
        self._loop.watch(client, partial(self._serve, client, self._read), flush)

    def _serve(self, client: Connection, step: Callable[[Connection], None]) -> None:
        try:
            step(client)
        except OSError as error:
            self._lose(client, silent=error.errno in SILENCE_ERRNOS)
        except (AuthenticationError, WireError):
            self._lose(client)

    def _read(self, client: Connection) -> None:
        for message in client.read():
            self._listener.confirm(client)
            if client in self._clients:  # not once it was dropped
                self._receive(client, message)
        if client in self._clients:
            self._flush(client)

    def _flush(self, client: Connection) -> None:
        if client.num_unsent_bytes > MAX_UNREAD_BYTES:
            raise WireError("a peer requests more than it reads")
        client.flush()
        self._watch(client)

    def _lose(self, client: Connection, *, silent: bool = False) -> None:
        if client in self._clients:
            self._forget(client)
            self._gone(client, silent)

    def _forget(self, client: Connection) -> None:
        self._clients.discard(client)
        self._loop.unwatch(client)
        self._listener.confirm(client)
        client.close()


def check_address(host: str) -> None:
    """Raise ConfigError unless ``host`` is an address that belongs to one interface."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"a service listens on an address of an interface, not on {host!r}") from None
    if address.is_unspecified or address.is_multicast:
        raise ConfigError(f"a service listens on one interface of this host, never on {host!r}")


def join_address(host: str, port: int) -> str:
    """``host:port``, ``[host]:port`` where the host is an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
