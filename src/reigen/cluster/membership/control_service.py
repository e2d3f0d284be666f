"""The control service of a job: a bounded key-value store that authenticated ranks share, and who of them is alive.

The launcher hosts it, or rank 0 where somebody else has started the ranks. The protocol, after the handshake of
``net.auth``, one msgspec message a frame:

a. A rank sends Put(request, key, value). The service keeps the value (a later one replaces it), answers Done(request),
   and serves everyone who waits for the key. If the rank wants to be the first, and there is a value, that one stays
   and is answered: Value(request, value).
b. A rank sends Get(request, key). The service answers Value(request, value) at once, or when the key is put. If the
   rank does not want to wait, and there is no value, the answer is Absent(request).
c. A rank that gave up waiting sends Forget(request). An answer that crosses it on the way is ignored.
d. What cannot be served is answered with Refused(request, reason).
e. A rank that opens another connection and sends Enter is a member for as long as that lasts: see
   `cluster.membership.liveness`.
f. A launcher's agent on another host sends Gets that need not wait, and is answered: both hear that the other one is
   alive (`heard_at`).

Everything is bounded: keys, values, how much is kept, how many connections there are and for how long one may be
unauthenticated. A connection that breaks a rule is closed; no other connection notices.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from reigen.cluster.membership.abort_message import AbortMessage
from reigen.cluster.membership.liveness import EnterGroup, LeaveGroup, LivenessReply, LivenessTable, RequestRefused
from reigen.errors import ArgumentError
from reigen.net.auth import Identity, ProcessRole
from reigen.net.codec import MessageCodec
from reigen.net.connection import Connection
from reigen.net.listener import HANDSHAKE_SECONDS, MessageListener

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext

MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 1 << 20
MAX_KEYS = 1 << 16
MAX_STORE_BYTES = 64 << 20
MAX_WAITERS = 1 << 14
#: A message is a value, a key and a few numbers.
MAX_MESSAGE_BYTES = MAX_VALUE_BYTES + 1024


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


class ValueStored(msgspec.Struct, tag=4, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The value is kept."""

    request: int


class ValueFound(msgspec.Struct, tag=5, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The value that was asked for."""

    request: int
    value: bytes


class ValueAbsent(msgspec.Struct, tag=12, array_like=True, frozen=True, forbid_unknown_fields=True):
    """There is no value of that key now."""

    request: int


StoreRequest = PutValue | GetValue | CancelGet
StoreReply = ValueStored | ValueFound | ValueAbsent | RequestRefused

REQUEST_CODEC: MessageCodec[StoreRequest | EnterGroup | LeaveGroup | AbortMessage] = MessageCodec(
    StoreRequest | EnterGroup | LeaveGroup | AbortMessage, MAX_MESSAGE_BYTES
)
STORE_REPLY_CODEC: MessageCodec[StoreReply] = MessageCodec(StoreReply, MAX_MESSAGE_BYTES)
#: What a member hears.
LIVENESS_REPLY_CODEC: MessageCodec[LivenessReply] = MessageCodec(LivenessReply, MAX_MESSAGE_BYTES)
_ALL_REPLIES_CODEC: MessageCodec[StoreReply | LivenessReply] = MessageCodec(
    StoreReply | LivenessReply, MAX_MESSAGE_BYTES
)

_LAUNCHER = Identity(ProcessRole.LAUNCHER, 0)


class RendezvousStore:
    """What is kept, and who waits for what. No I/O; an owner is whatever names a connection."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._num_bytes = 0
        #: key -> the (owner, request) pairs that wait for it. A key in here has no value.
        self._waiting: dict[str, list[tuple[Any, int]]] = {}

    def handle(self, owner: Any, message: StoreRequest) -> list[tuple[Any, StoreReply]]:
        """Serve one message; returns who is to be sent what."""
        if isinstance(message, CancelGet):
            self._forget(lambda who, request: (who, request) == (owner, message.request))
            return []
        try:
            check_entry(message.key, message.value if isinstance(message, PutValue) else b"")
        except ArgumentError as error:
            return [(owner, RequestRefused(message.request, str(error)))]
        if isinstance(message, PutValue):
            return self._put(owner, message)
        if message.key in self._values:
            return [(owner, ValueFound(message.request, self._values[message.key]))]
        if not message.wait:
            return [(owner, ValueAbsent(message.request))]
        if sum(len(waiters) for waiters in self._waiting.values()) >= MAX_WAITERS:
            return [(owner, RequestRefused(message.request, f"more than {MAX_WAITERS} requests wait already"))]
        self._waiting.setdefault(message.key, []).append((owner, message.request))
        return []

    def forget_all(self, owner: Any) -> None:
        """An owner has gone: it waits for nothing any more."""
        self._forget(lambda who, _: who is owner)

    def _put(self, owner: Any, message: PutValue) -> list[tuple[Any, StoreReply]]:
        old = self._values.get(message.key)
        if message.only_first and old is not None:
            return [(owner, ValueFound(message.request, old))]
        num_bytes = self._num_bytes + len(message.value) - len(old or b"")
        if num_bytes > MAX_STORE_BYTES or (old is None and len(self._values) >= MAX_KEYS):
            return [
                (
                    owner,
                    RequestRefused(
                        message.request, f"the rendezvous is full ({MAX_KEYS} keys, {MAX_STORE_BYTES} bytes)"
                    ),
                )
            ]
        self._values[message.key], self._num_bytes = message.value, num_bytes
        served: list[tuple[Any, StoreReply]] = [(owner, ValueStored(message.request))]
        served += [(who, ValueFound(request, message.value)) for who, request in self._waiting.pop(message.key, [])]
        return served

    def _forget(self, gone: Callable[[Any, int], bool]) -> None:
        for key, waiters in list(self._waiting.items()):
            left = [(who, request) for who, request in waiters if not gone(who, request)]
            if left:
                self._waiting[key] = left
            else:
                del self._waiting[key]


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
        handshake_seconds: float = HANDSHAKE_SECONDS,
        peer_timeout_seconds: float = 20.0,
        tls: TlsContext | None = None,
    ) -> None:
        self._store, self._roll = RendezvousStore(), LivenessTable()
        self._reception = MessageListener(
            secret,
            (host, port),
            me,
            MAX_MESSAGE_BYTES,
            self._receive,
            self._gone,
            handshake_seconds=handshake_seconds,
            peer_timeout_seconds=peer_timeout_seconds,
            tls=tls,
        )
        self.address = self._reception.address
        self._thread: threading.Thread | None = None
        #: When each agent was heard last.
        self._heard_at: dict[int, float] = {}

    def heard_at(self, agent: int) -> float:
        """When the agent of this number said something last, on the clock of ``time.monotonic()``; -inf: never."""
        return self._heard_at.get(agent, -math.inf)

    def start(self) -> None:
        """Start serving in a thread."""
        self._thread = threading.Thread(target=self._serve, name="reigen-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and close all connections. May be called twice."""
        self._reception.end()
        if self._thread is not None:
            self._thread.join()
        self._reception.close()

    def _serve(self) -> None:
        while self._turn():
            pass
        self._turn()  # last words that are there
        self._send(self._roll.flush())
        self._reception.flush_and_close_all()

    def _turn(self) -> bool:
        """Wait for what happens next and handle it; False: it is time to end."""
        goes_on = self._reception.turn(self._roll.due())
        self._send(self._roll.tick(time.monotonic()))
        return goes_on

    def _receive(self, guest: Connection, payload: bytes) -> None:
        message = REQUEST_CODEC.decode(payload)
        if guest.peer.role is ProcessRole.AGENT:
            self._heard_at[guest.peer.rank] = time.monotonic()
        if isinstance(message, EnterGroup | LeaveGroup | AbortMessage):
            self._send(self._roll.handle(guest, message, time.monotonic()))
        else:
            self._send(self._store.handle(guest, message))

    def _gone(self, guest: Connection, silent: bool) -> None:
        self._store.forget_all(guest)
        self._send(self._roll.lost(guest, time.monotonic(), silent=silent))

    def _send(self, replies: Sequence[tuple[Any, StoreReply | LivenessReply]]) -> None:
        for guest, reply in replies:
            self._reception.send(guest, _ALL_REPLIES_CODEC.encode(reply))


def check_entry(key: str, value: bytes) -> None:
    """Raise ArgumentError if a key or a value is too large."""
    if not 0 < len(key.encode()) <= MAX_KEY_BYTES:
        raise ArgumentError(f"a rendezvous key must have 1 to {MAX_KEY_BYTES} bytes, not {len(key.encode())}")
    if len(value) > MAX_VALUE_BYTES:
        raise ArgumentError(f"rendezvous key {key!r}: a value may have {MAX_VALUE_BYTES} bytes, not {len(value)}")
