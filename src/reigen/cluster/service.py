"""The control service of a job: a bounded key-value store that authenticated ranks share, and who of them is alive.

The launcher hosts it, or rank 0 where somebody else has started the ranks. The protocol, after the handshake of
``wire.auth``, one msgspec message a frame:

a. A rank sends Put(request, key, value). The service keeps the value (a later one replaces it), answers Done(request),
   and serves everyone who waits for the key. If the rank wants to be the first, and there is a value, that one stays
   and is answered: Value(request, value).
b. A rank sends Get(request, key). The service answers Value(request, value) at once, or when the key is put. If the
   rank does not want to wait, and there is no value, the answer is Absent(request).
c. A rank that gave up waiting sends Forget(request). An answer that crosses it on the way is ignored.
d. What cannot be served is answered with Refused(request, reason).
e. A rank that opens another connection and sends Enter is a member for as long as that lasts: see `cluster.roll`.

Everything is bounded: keys, values, how much is kept, how many connections there are and for how long one may be
unauthenticated. A connection that breaks a rule is closed; no other connection notices.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from reigen.cluster.forks import not_in_children
from reigen.cluster.roll import Answer, Enter, Leave, Refused, Roll
from reigen.cluster.told import Abort
from reigen.errors import ArgumentError, AuthenticationError, ConfigError, WireError
from reigen.wire.auth import Identity, Role, ServerHandshake
from reigen.wire.codec import Codec
from reigen.wire.sockets import keepalive
from reigen.wire.stream import Conversation

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.wire.tls import Tls

MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 1 << 20
MAX_KEYS = 1 << 16
MAX_STORE_BYTES = 64 << 20
MAX_WAITERS = 1 << 14
#: Connections that have not proven themselves; one more closes the oldest of them.
MAX_STRANGERS = 128
#: What may wait to be sent to one rank.
MAX_UNREAD_BYTES = 8 << 20
#: A message is a value, a key and a few numbers.
MAX_MESSAGE_BYTES = MAX_VALUE_BYTES + 1024


class Put(msgspec.Struct, tag=1, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Keep a value."""

    request: int
    key: str
    value: bytes
    only_first: bool = False


class Get(msgspec.Struct, tag=2, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Answer with the value when there is one, or at once whether there is one."""

    request: int
    key: str
    wait: bool = True


class Forget(msgspec.Struct, tag=3, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Do not answer that request any more."""

    request: int


class Done(msgspec.Struct, tag=4, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The value is kept."""

    request: int


class Value(msgspec.Struct, tag=5, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The value that was asked for."""

    request: int
    value: bytes


class Absent(msgspec.Struct, tag=12, array_like=True, frozen=True, forbid_unknown_fields=True):
    """There is no value of that key now."""

    request: int


Request = Put | Get | Forget
Reply = Done | Value | Absent | Refused

REQUESTS: Codec[Request | Enter | Leave | Abort] = Codec(Request | Enter | Leave | Abort, MAX_MESSAGE_BYTES)
REPLIES: Codec[Reply] = Codec(Reply, MAX_MESSAGE_BYTES)
#: What a member hears.
ANSWERS: Codec[Answer] = Codec(Answer, MAX_MESSAGE_BYTES)
_ALL: Codec[Reply | Answer] = Codec(Reply | Answer, MAX_MESSAGE_BYTES)

_BACKLOG = 512
_LAUNCHER = Identity(Role.LAUNCHER, 0)
#: What the kernel says of a connection whose peer's machine does not answer.
SILENCE = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ENONET}
)


class Store:
    """What is kept, and who waits for what. No I/O; an owner is whatever names a connection."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        #: key -> the (owner, request) pairs that wait for it. A key in here has no value.
        self._waiting: dict[str, list[tuple[Any, int]]] = {}

    def handle(self, owner: Any, message: Request) -> list[tuple[Any, Reply]]:
        """Serve one message; returns who is to be sent what."""
        if isinstance(message, Forget):
            self._forget(lambda who, request: (who, request) == (owner, message.request))
            return []
        try:
            check_entry(message.key, message.value if isinstance(message, Put) else b"")
        except ArgumentError as error:
            return [(owner, Refused(message.request, str(error)))]
        if isinstance(message, Put):
            return self._put(owner, message)
        if message.key in self._values:
            return [(owner, Value(message.request, self._values[message.key]))]
        if not message.wait:
            return [(owner, Absent(message.request))]
        if sum(len(waiters) for waiters in self._waiting.values()) >= MAX_WAITERS:
            return [(owner, Refused(message.request, f"more than {MAX_WAITERS} requests wait already"))]
        self._waiting.setdefault(message.key, []).append((owner, message.request))
        return []

    def forget_all(self, owner: Any) -> None:
        """An owner has gone: it waits for nothing any more."""
        self._forget(lambda who, _: who is owner)

    def _put(self, owner: Any, message: Put) -> list[tuple[Any, Reply]]:
        old = self._values.get(message.key)
        if message.only_first and old is not None:
            return [(owner, Value(message.request, old))]
        num_bytes = self._num_bytes + len(message.value) - len(old or b"")
        if num_bytes > MAX_STORE_BYTES or (old is None and len(self._values) >= MAX_KEYS):
            return [
                (owner, Refused(message.request, f"the rendezvous is full ({MAX_KEYS} keys, {MAX_STORE_BYTES} bytes)"))
            ]
        self._values[message.key], self._num_bytes = message.value, num_bytes
        served: list[tuple[Any, Reply]] = [(owner, Done(message.request))]
        served += [(who, Value(request, message.value)) for who, request in self._waiting.pop(message.key, [])]
        return served

    def _forget(self, gone: Callable[[Any, int], bool]) -> None:
        for key, waiters in list(self._waiting.items()):
            left = [(who, request) for who, request in waiters if not gone(who, request)]
            if left:
                self._waiting[key] = left
            else:
                del self._waiting[key]


@dataclass
class _Connection:
    """One connection of the server.

    Attributes:
        deadline: until when it must have proven itself.
    """

    socket: socket.socket
    conversation: Conversation
    deadline: float


class RendezvousServer:
    """The service: one thread, any number of ranks.

    Args:
        secret: the job's 32 bytes.
        host: the address to listen on, of one interface.
        port: where; 0: the kernel chooses.
        me: who hosts it: the launcher, or a rank.
        handshake_seconds: how long a connection may be unauthenticated.
        peer_timeout_seconds: after how long a machine that is not heard of any more counts as lost.
        tls: encrypt everything; whoever connects must do so, too.

    Attributes:
        address: ``host:port``; connections queue there from now on, before ``start``.

    Raises:
        ConfigError: ``host`` is not the address of an interface.
        OSError: the port is taken, or the address is not this machine's.
    """

    def __init__(
        self,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        me: Identity = _LAUNCHER,
        handshake_seconds: float = 5.0,
        peer_timeout_seconds: float = 20.0,
        tls: Tls | None = None,
    ) -> None:
        check_address(host)
        self._secret, self._me = secret, me
        self._handshake_seconds = handshake_seconds
        self._peer_timeout_seconds = peer_timeout_seconds
        self._tls = tls
        self._store, self._roll = Store(), Roll()
        self._connections: dict[socket.socket, _Connection] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address = join_address(host, self._listener.getsockname()[1])
        self._waker, self._wakened = socket.socketpair()
        self._thread: threading.Thread | None = None
        not_in_children(self)

    def start(self) -> None:
        """Start serving in a thread."""
        self._thread = threading.Thread(target=self._serve, name="reigen-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and close all connections. May be called twice."""
        self._waker.close()
        if self._thread is not None:
            self._thread.join()
        self._listener.close()
        self._wakened.close()

    def close_descriptors(self) -> None:
        """See `reigen.cluster.forks`."""
        for each in (self._listener, self._waker, self._wakened, *self._connections):
            each.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakened, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._turn(selector, self._seconds_to_next_turn()):
                pass
            self._turn(selector, 0)  # last words that are there
            self._send(selector, self._roll.flush())
            self._close_all(selector)

    def _turn(self, selector: selectors.BaseSelector, timeout_seconds: float | None) -> bool:
        """Wait for what happens next and handle it; whether to end."""
        is_last = False
        for key, events in selector.select(timeout_seconds):
            if key.fileobj is self._wakened:
                is_last = True
            elif key.fileobj is self._listener:
                self._accept(selector)
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._connections:
                self._serve_one(selector, self._connections[key.fileobj], events)
        self._drop_slow(selector)
        self._send(selector, self._roll.tick(time.monotonic()))
        return is_last

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptors left: those who do not prove themselves give theirs back
            if not self._drop_oldest_stranger(selector):
                time.sleep(0.05)  # the listener stays readable: without a pause this thread would spin
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keepalive(connection, self._peer_timeout_seconds)
        channel = None if self._tls is None else self._tls.accepts()
        conversation = Conversation(ServerHandshake(self._secret, self._me), MAX_MESSAGE_BYTES, channel)
        self._connections[connection] = _Connection(
            connection, conversation, time.monotonic() + self._handshake_seconds
        )
        selector.register(connection, selectors.EVENT_READ)
        if len(self._strangers()) > MAX_STRANGERS:
            self._drop_oldest_stranger(selector)

    def _serve_one(self, selector: selectors.BaseSelector, one: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read(selector, one)
            self._flush(selector, one)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(selector, one, silent=error.errno in SILENCE)
        except (AuthenticationError, WireError):
            self._drop(selector, one)

    def _read(self, selector: selectors.BaseSelector, one: _Connection) -> None:
        data = one.socket.recv(one.conversation.num_wanted_bytes)
        if not data:
            raise ConnectionResetError
        for payload in one.conversation.receive(data):
            message = REQUESTS.decode(payload)
            if isinstance(message, Enter | Leave | Abort):
                self._send(selector, self._roll.handle(one.socket, message, time.monotonic()))
            else:
                self._send(selector, self._store.handle(one.socket, message))

    def _send(self, selector: selectors.BaseSelector, replies: Sequence[tuple[Any, Reply | Answer]]) -> None:
        for owner, reply in replies:
            receiver = self._connections.get(owner)
            if receiver is not None:
                receiver.conversation.send(_ALL.encode(reply))
                self._watch(selector, receiver)

    def _flush(self, selector: selectors.BaseSelector, one: _Connection) -> None:
        outgoing = one.conversation.outgoing
        if len(outgoing) > MAX_UNREAD_BYTES:
            raise WireError("a rank asks for more than it reads")
        if outgoing:
            with contextlib.suppress(BlockingIOError):
                del outgoing[: one.socket.send(outgoing)]
        self._watch(selector, one)

    def _watch(self, selector: selectors.BaseSelector, one: _Connection) -> None:
        writing = selectors.EVENT_WRITE if one.conversation.outgoing else 0
        selector.modify(one.socket, selectors.EVENT_READ | writing)

    def _strangers(self) -> list[_Connection]:
        return [one for one in self._connections.values() if one.conversation.peer is None]

    def _seconds_to_next_turn(self) -> float | None:
        deadlines = [one.deadline for one in self._strangers()]
        due = self._roll.due()
        deadlines += [] if due is None else [due]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _drop_slow(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for one in self._strangers():
            if one.deadline <= now:
                self._drop(selector, one)

    def _drop_oldest_stranger(self, selector: selectors.BaseSelector) -> bool:
        strangers = self._strangers()
        if strangers:
            self._drop(selector, min(strangers, key=lambda one: one.deadline))
        return bool(strangers)

    def _drop(self, selector: selectors.BaseSelector, one: _Connection, *, silent: bool = False) -> None:
        self._store.forget_all(one.socket)
        del self._connections[one.socket]
        selector.unregister(one.socket)
        self._send(selector, self._roll.lost(one.socket, time.monotonic(), silent=silent))
        one.socket.close()

    def _close_all(self, selector: selectors.BaseSelector) -> None:
        for one in self._connections.values():
            selector.unregister(one.socket)
            with contextlib.suppress(OSError):
                one.socket.send(one.conversation.outgoing)
            one.socket.close()
        self._connections.clear()


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


def check_entry(key: str, value: bytes) -> None:
    """Raise ArgumentError if a key or a value is too large."""
    if not 0 < len(key.encode()) <= MAX_KEY_BYTES:
        raise ArgumentError(f"a rendezvous key must have 1 to {MAX_KEY_BYTES} bytes, not {len(key.encode())}")
    if len(value) > MAX_VALUE_BYTES:
        raise ArgumentError(f"rendezvous key {key!r}: a value may have {MAX_VALUE_BYTES} bytes, not {len(value)}")
