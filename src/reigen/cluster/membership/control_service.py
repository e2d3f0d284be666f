"""Control service of a job: the membership of its ranks, or of its workers and servers, and a bounded key-value store.

The launcher hosts it, or rank 0 where another launcher has started the ranks; the scheduler of a parameter server is
one. Membership is stated in `cluster.membership.messages`. The protocol of the store, after the handshake of
``net.auth``, one msgspec message a frame:

a. A rank sends Put(request, key, value). The service keeps the value (a later one replaces it), answers, and serves
   everyone who waits for the key. If the rank wants to be the first, and there is a value, that one stays and is the
   answer's.
b. A rank sends Get(request, key). The service answers with the value at once, or when the key is put. If the rank does
   not want to wait, and there is no value, the answer has none.
c. A rank that gave up waiting sends Cancel(request). An answer that crosses it on the way is ignored.
d. What cannot be served is answered with the problem.
e. A rank sends Forget(request, prefix). The service drops all values whose keys begin so, and answers.
f. A rank sends Exchange(request, keys, own, value). The service keeps the value under the rank's own key, and answers
   when all of the keys have one, with all values: one round trip in place of a Put and as many Gets as there are ranks.
g. A launcher's agent on another host sends Gets that need not wait, and is answered: both hear that the other one is
   alive (`heard_at`).

Everything is bounded: keys, values, how much is kept, how many connections there are and for how long one may be
unauthenticated. A connection that breaks a rule is closed; no other connection notices.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from reigen.cluster.membership.messages import (
    MAX_MESSAGE_BYTES,
    HeldKeys,
    MemberMessage,
    MemberRefused,
    MembershipEvent,
    MembershipNews,
    MembershipReply,
    RegisterMember,
    ResizeServers,
)
from reigen.cluster.membership.table import GroupTable, MembershipTable
from reigen.errors import ArgumentError, AuthenticationError, WireError
from reigen.net.auth import Identity, ProcessRole
from reigen.net.codec import MessageCodec
from reigen.net.connection import Connection, ConnectionOptions
from reigen.net.listener import HANDSHAKE_SECONDS, MessageListener

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext

MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 1 << 20
MAX_KEYS = 1 << 16
MAX_STORE_BYTES = 64 << 20
MAX_WAITERS = 1 << 14
#: Values that are exchanged have so many bytes together, and so many ranks take part.
MAX_EXCHANGED_BYTES, MAX_EXCHANGED = 1 << 19, 1 << 13


class PutValue(msgspec.Struct, tag=1, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Keep a value."""

    request: int
    key: str
    value: bytes
    only_first: bool = False


class GetValue(msgspec.Struct, tag=2, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Answer with the value when there is one, or at once whether there is one."""

    request: int
    key: str
    wait: bool = True


class CancelGet(msgspec.Struct, tag=3, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Do not answer that request any more."""

    request: int


class ForgetKeys(msgspec.Struct, tag=5, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Drop the values of all keys that begin with ``prefix``, which is not empty."""

    request: int
    prefix: str


class ExchangeValues(msgspec.Struct, tag=6, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Keep a value under one of some keys; answer with the values of all, in `EXCHANGED_CODEC`, when they are there.

    The keys are ``prefix/name``; ``own`` is the place of the sender's name.
    """

    request: int
    prefix: str
    names: tuple[str, ...]
    own: int
    value: bytes

    def keys(self) -> list[str]:
        """Return all keys."""
        return [f"{self.prefix}/{name}" for name in self.names]


class StoreReply(msgspec.Struct, tag=4, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Answer to a request: it is done; with the value that was asked for, None where there is none; or refused."""

    request: int
    value: bytes | None = None
    problem: str = ""


StoreRequest = PutValue | GetValue | CancelGet | ForgetKeys | ExchangeValues

REQUEST_CODEC: MessageCodec[StoreRequest | MemberMessage] = MessageCodec(
    StoreRequest | MemberMessage, MAX_MESSAGE_BYTES
)
STORE_REPLY_CODEC: MessageCodec[StoreReply] = MessageCodec(StoreReply, MAX_MESSAGE_BYTES)
EXCHANGED_CODEC: MessageCodec[list[bytes]] = MessageCodec(list[bytes], MAX_MESSAGE_BYTES)
_ALL_REPLIES_CODEC: MessageCodec[StoreReply | MembershipReply] = MessageCodec(
    StoreReply | MembershipReply, MAX_MESSAGE_BYTES
)

_log = logging.getLogger(__name__)
_LAUNCHER = Identity(ProcessRole.LAUNCHER, 0)


@dataclass(slots=True)
class _Waiter:
    """Request that waits for values.

    Attributes:
        owner: see `RendezvousStore`.
        request: its number.
        keys: of the values.
        answers_all: it is an `ExchangeValues`.
        num_found: so many of the first keys had values when they were looked at.
    """

    owner: Any
    request: int
    keys: list[str]
    answers_all: bool
    num_found: int = 0


class RendezvousStore:
    """Values, and requests that wait for them. No I/O; an owner is any name of a connection."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        #: key -> those that wait for it, each for one key at a time. A key in here has no value.
        self._waiting: dict[str, list[_Waiter]] = {}

    def handle(self, owner: Any, message: StoreRequest) -> list[tuple[Any, StoreReply]]:
        """Serve one message; returns who is to be sent what."""
        if isinstance(message, CancelGet):
            self._forget(lambda waiter, request: (waiter, request) == (owner, message.request))
            return []
        try:
            check_entry(message)
        except ArgumentError as error:
            return [(owner, StoreReply(message.request, problem=str(error)))]
        if isinstance(message, ForgetKeys):
            for key in [key for key in self._values if key.startswith(message.prefix)]:
                self._num_bytes -= len(self._values.pop(key))
            return [(owner, StoreReply(message.request))]
        if isinstance(message, PutValue):
            return self._put(owner, message)
        if isinstance(message, ExchangeValues):
            keys = message.keys()
            kept, *served = self._put(owner, PutValue(message.request, keys[message.own], message.value))
            if kept[1].problem:
                return [kept]
            return served + self._serve(_Waiter(owner, message.request, keys, answers_all=True))
        if not message.wait and message.key not in self._values:
            return [(owner, StoreReply(message.request))]
        return self._serve(_Waiter(owner, message.request, [message.key], answers_all=False))

    def forget_all(self, owner: Any) -> None:
        """Forget the requests of an owner that has gone."""
        self._forget(lambda waiter, _: waiter is owner)

    def _put(self, owner: Any, message: PutValue) -> list[tuple[Any, StoreReply]]:
        old = self._values.get(message.key)
        if message.only_first and old is not None:
            return [(owner, StoreReply(message.request, old))]
        num_bytes = self._num_bytes + len(message.value) - len(old or b"")
        if num_bytes > MAX_STORE_BYTES or (old is None and len(self._values) >= MAX_KEYS):
            problem = f"the rendezvous is full ({MAX_KEYS} keys, {MAX_STORE_BYTES} bytes)"
            return [(owner, StoreReply(message.request, problem=problem))]
        self._values[message.key], self._num_bytes = message.value, num_bytes
        served: list[tuple[Any, StoreReply]] = [(owner, StoreReply(message.request))]
        for waiter in self._waiting.pop(message.key, []):
            served += self._serve(waiter)
        return served

    def _serve(self, waiter: _Waiter) -> list[tuple[Any, StoreReply]]:
        """Answer a request if all of its values are there; otherwise it waits for the first one that is not."""
        missing = self._first_missing(waiter.keys, waiter.num_found)
        if missing == len(waiter.keys):
            missing = self._first_missing(waiter.keys, 0)  # some may have been dropped meanwhile
        if missing == len(waiter.keys):
            return [(waiter.owner, self._answer(waiter))]
        if sum(map(len, self._waiting.values())) >= MAX_WAITERS:
            problem = f"more than {MAX_WAITERS} requests wait already"
            return [(waiter.owner, StoreReply(waiter.request, problem=problem))]
        waiter.num_found = missing
        self._waiting.setdefault(waiter.keys[missing], []).append(waiter)
        return []

    def _first_missing(self, keys: Sequence[str], begin: int) -> int:
        return next((number for number in range(begin, len(keys)) if keys[number] not in self._values), len(keys))

    def _answer(self, waiter: _Waiter) -> StoreReply:
        values = [self._values[key] for key in waiter.keys]
        if not waiter.answers_all:
            return StoreReply(waiter.request, values[0])
        if (num_bytes := sum(map(len, values))) > MAX_EXCHANGED_BYTES:
            problem = f"together the values have {num_bytes} bytes, at most {MAX_EXCHANGED_BYTES} are allowed"
            return StoreReply(waiter.request, problem=problem)
        return StoreReply(waiter.request, EXCHANGED_CODEC.encode(values))

    def _forget(self, gone: Callable[[Any, int], bool]) -> None:
        for key, waiters in list(self._waiting.items()):
            left = [each for each in waiters if not gone(each.owner, each.request)]
            if left:
                self._waiting[key] = left
            else:
                del self._waiting[key]


class ControlService:
    """Service of a job: one loop over a listener, in a thread of its own (`start`), or driven by its owner (`turn`).

    Args:
        secret: the job's 32 bytes.
        host: the address to listen on, of one interface.
        port: where; 0: the kernel chooses.
        listening: a socket that listens already, instead of the two; closed with the service.
        me: who hosts it: the launcher, or a rank.
        table: the members of one job; None: of jobs of ranks, as they come.
        on_put: called in the serving thread with key and value of what somebody puts, before that is answered.

    The others, the attribute ``address``, and what is raised, are those of `reigen.net.listener.MessageListener`; see
    `reigen.net.connection.ConnectionOptions` for ``tls`` and ``peer_timeout_seconds``.
    """

    def __init__(
        self,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        listening: socket.socket | None = None,
        me: Identity = _LAUNCHER,
        table: MembershipTable | None = None,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        peer_timeout_seconds: float = 20.0,
        must_speak: bool = False,
        port_is_held: bool = False,
        tls: TlsContext | None = None,
        on_put: Callable[[str, bytes], object] = lambda key, value: None,
    ) -> None:
        self._on_put = on_put
        self._store, self._members = RendezvousStore(), table or GroupTable()
        self._listener = MessageListener(
            listening or (host, port),
            ConnectionOptions(secret, me, MAX_MESSAGE_BYTES, tls, peer_timeout_seconds),
            self._receive,
            self._gone,
            handshake_seconds=handshake_seconds,
            must_speak=must_speak,
            port_is_held=port_is_held,
        )
        self.address = self._listener.address
        #: When each agent was heard last.
        self._heard_at: dict[int, float] = {}
        self._thread: threading.Thread | None = None

    def heard_at(self, agent: int) -> float:
        """Return the time (``time.monotonic()``) of an agent's last message, by the agent's number; -inf: none came."""
        return self._heard_at.get(agent, -math.inf)

    @property
    def num_clients(self) -> int:
        """Number of connections whose other ends have proven themselves."""
        return self._listener.num_clients

    def turn(self, until: float | None = None) -> bool:
        """Wait for what happens next, at most until ``until``, and handle it; False: it is time to end."""
        due = min((at for at in (self._members.due(), until) if at is not None), default=None)
        goes_on = self._listener.turn(due)
        if due is not None and time.monotonic() >= due:  # who has said something until then is not silent
            goes_on &= self._listener.turn(due)
        self._send(self._members.tick(time.monotonic()))
        return goes_on

    def start(self) -> None:
        """Start serving in a thread."""
        self._thread = threading.Thread(target=self._serve, name="reigen-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and close all connections. May be called twice."""
        self._listener.end()
        if self._thread is not None:
            self._thread.join()
        self._listener.close()

    def on_register(self, message: RegisterMember) -> None:
        """Hook: a process registers."""

    def on_held_keys(self, message: HeldKeys) -> None:
        """Hook: a server says which keys it holds."""

    def on_resize(self, message: ResizeServers) -> None:
        """Hook: a worker wants the servers to run in so many processes."""

    def on_events(self, events: Sequence[MembershipEvent]) -> None:
        """Hook: these events are about to be announced."""

    def on_refusal(self, reason: str) -> None:
        """Hook: a process is refused, or a member has lost its place."""

    def _serve(self) -> None:
        while self.turn():
            pass
        self.turn()  # last words that are there
        self._send(self._members.flush())
        self._listener.flush_and_close_all()

    def _receive(self, client: Connection, payload: bytes) -> None:
        try:
            self._handle(client, payload)
        except (AuthenticationError, WireError):
            raise
        except Exception as error:
            _log.exception("a message of %s has met a bug of this service", client.peer)
            raise WireError(f"a message that this service fails to handle: {error}") from error

    def _handle(self, client: Connection, payload: bytes) -> None:
        message = REQUEST_CODEC.decode(payload)
        if client.peer.role is ProcessRole.AGENT:
            self._heard_at[client.peer.rank] = time.monotonic()
        if isinstance(message, StoreRequest):
            if isinstance(message, PutValue):
                self._on_put(message.key, message.value)  # what is exchanged is for those who exchange it
            self._send(self._store.handle(client, message))
            return
        if isinstance(message, RegisterMember):
            self.on_register(message)
        elif isinstance(message, HeldKeys):
            self.on_held_keys(message)
        elif isinstance(message, ResizeServers):
            self.on_resize(message)
        self._send(self._members.handle(client, message, time.monotonic()))

    def _gone(self, client: Connection, silent: bool) -> None:
        self._store.forget_all(client)
        self._send(self._members.ended(client, time.monotonic(), silent=silent))

    def _send(self, replies: Sequence[tuple[Any, StoreReply | MembershipReply]]) -> None:
        news = {
            id(message): message for _, message in replies if isinstance(message, MembershipNews)
        }  # one object for all
        if news:
            self.on_events(tuple(dict.fromkeys(event for message in news.values() for event in message.events)))
        last, data = None, b""
        for client, reply in replies:
            if reply is not last:
                last, data = reply, _ALL_REPLIES_CODEC.encode(reply)
            self._listener.send(client, data)
            if isinstance(reply, MemberRefused):
                self.on_refusal(reply.reason)
                self._listener.drop(client)
                self._gone(client, silent=False)


def check_entry(message: PutValue | GetValue | ForgetKeys | ExchangeValues) -> None:
    """Raise ArgumentError if a key is empty, or a key or a value too large, or too much is exchanged."""
    if isinstance(message, ExchangeValues):
        if not 0 <= message.own < len(message.names) <= MAX_EXCHANGED:
            raise ArgumentError(
                f"rendezvous keys {message.prefix!r}: of {len(message.names)} names, {MAX_EXCHANGED} at most, the "
                f"sender's is number {message.own}"
            )
        longest = f"{message.prefix}/{max(message.names, key=lambda name: len(name.encode()))}"
    else:
        longest = message.prefix if isinstance(message, ForgetKeys) else message.key
    num_key_bytes = len(longest.encode())
    if not 0 < num_key_bytes <= MAX_KEY_BYTES:
        raise ArgumentError(f"a rendezvous key must have 1 to {MAX_KEY_BYTES} bytes, not {num_key_bytes}")
    if isinstance(message, PutValue | ExchangeValues) and len(message.value) > MAX_VALUE_BYTES:
        raise ArgumentError(
            f"rendezvous key {longest!r}: a value may have {MAX_VALUE_BYTES} bytes, not {len(message.value)}"
        )
