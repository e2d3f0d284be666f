"""Rendezvous of a job's ranks: a key-value store in which they publish their addresses.

A key-value service in the launcher, for the few hundred bytes that a rank must know of the others before they can talk
directly. `cluster.membership.control_service` is the service and states its protocol; here are the ranks' ends of it.
"""

from __future__ import annotations

import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from reigen.cluster.membership.control_service import (
    EXCHANGED_CODEC,
    REQUEST_CODEC,
    STORE_REPLY_CODEC,
    CancelGet,
    ExchangeValues,
    ForgetKeys,
    GetValue,
    PutValue,
    StoreReply,
    check_entry,
)
from reigen.cluster.membership.messages import MAX_MESSAGE_BYTES
from reigen.errors import ArgumentError, AuthenticationError, ConfigError, PeerLostError, WireError
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import Connection, open_connection

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext

#: Requests that are answered.
StoreMessage = PutValue | GetValue | ForgetKeys | ExchangeValues

__all__ = [
    "LocalRendezvous",
    "PrefixRendezvous",
    "ReconnectingRendezvous",
    "Rendezvous",
    "RendezvousClient",
    "split_address",
]


class Rendezvous(ABC):
    """Interface of a rendezvous to a rank; `RendezvousClient` names the errors of one over a network."""

    def put(self, key: str, value: bytes) -> None:
        """Make ``value`` known under ``key``; a later value replaces it."""
        self.request(PutValue(0, key, value))

    def put_first(self, key: str, value: bytes) -> bytes:
        """Make ``value`` known under ``key`` unless there is one already; returns the one that there is then."""
        kept = self.request(PutValue(0, key, value, only_first=True))
        return value if kept is None else kept

    def get(self, key: str, timeout_seconds: float) -> bytes:
        """The value of ``key``, waited for.

        Raises:
            TimeoutError: nobody put it in time; the message names the key.
        """
        value = self.request(GetValue(0, key), timeout_seconds)
        if value is None:
            raise WireError("the rendezvous answered a Get without a value")
        return value

    def peek(self, key: str) -> bytes | None:
        """The value of ``key`` if there is one now."""
        return self.request(GetValue(0, key, wait=False))

    def exchange(
        self, prefix: str, names: Sequence[str], own: int, value: bytes, timeout_seconds: float
    ) -> list[bytes]:
        """Make ``value`` known under ``prefix/name`` of this rank's name; return all values, when they are there.

        Args:
            prefix: see above.
            names: of all who exchange.
            own: place of this rank's name.
            value: see above; all together may have half a megabyte.
            timeout_seconds: how long to wait for the others. The value stays, and it may be tried again.

        Raises:
            TimeoutError: not all values came in time.
        """
        answer = self.request(ExchangeValues(0, prefix, tuple(names), own, value), timeout_seconds)
        if answer is None:
            raise WireError("the rendezvous answered an Exchange without values")
        return EXCHANGED_CODEC.decode(answer)

    def forget(self, prefix: str) -> None:
        """Drop the values of all keys that begin with ``prefix``."""
        self.request(ForgetKeys(0, prefix))

    @abstractmethod
    def request(self, message: StoreMessage, timeout_seconds: float = 0.0) -> bytes | None:
        """Have a request served; returns the answer's value, if any. ``timeout_seconds``: for one that waits."""

    @abstractmethod
    def close(self) -> None:
        """Leave; all values stay. May be called twice."""


class LocalRendezvous(Rendezvous):
    """Rendezvous in memory, for ranks that are threads of one process. All of them share one object."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def request(self, message: StoreMessage, timeout_seconds: float = 0.0) -> bytes | None:
        """Serve a request; raises TimeoutError."""
        check_entry(message)
        if isinstance(message, ForgetKeys):
            with self._changed:
                for key in [key for key in self._values if key.startswith(message.prefix)]:
                    del self._values[key]
            return None
        values = self._values
        if isinstance(message, ExchangeValues):
            keys = message.keys()
            with self._changed:
                values[keys[message.own]] = message.value
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: all(key in values for key in keys), timeout_seconds):
                    raise _key_timeout_error(message.prefix, timeout_seconds)
                return EXCHANGED_CODEC.encode([values[key] for key in keys])
        key = message.key
        with self._changed:
            if isinstance(message, PutValue) and not (message.only_first and key in values):
                values[key] = message.value
                self._changed.notify_all()
            is_wait = isinstance(message, GetValue) and message.wait
            if is_wait and not self._changed.wait_for(lambda: key in values, timeout_seconds):
                raise _key_timeout_error(key, timeout_seconds)
            return values.get(key)

    def close(self) -> None:
        """Do nothing: the others may still need it."""


class PrefixRendezvous(Rendezvous):
    """Part of a rendezvous with keys of its own, for ranks that meet apart from the others.

    Args:
        rendezvous: the whole.
        name: the same for all who meet here.
    """

    def __init__(self, rendezvous: Rendezvous, name: str) -> None:
        self._rendezvous, self._name = rendezvous, name

    def request(self, message: StoreMessage, timeout_seconds: float = 0.0) -> bytes | None:
        """Have a request served under the key in this room."""
        if isinstance(message, ForgetKeys | ExchangeValues):
            message = msgspec.structs.replace(message, prefix=f"{self._name}/{message.prefix}")
        else:
            message = msgspec.structs.replace(message, key=f"{self._name}/{message.key}")
        return self._rendezvous.request(message, timeout_seconds)

    def close(self) -> None:
        """Leave the whole rendezvous."""
        self._rendezvous.close()


class ReconnectingRendezvous(Rendezvous):
    """Rendezvous whose service may end, and be followed by another one elsewhere. One thread uses it.

    Args:
        find_address: returns where the service is now.
        connect: connects to it; its errors are those of a request, too.
    """

    def __init__(self, find_address: Callable[[], str], connect: Callable[[str], RendezvousClient]) -> None:
        self._find_address, self._connect = find_address, connect
        self._client: RendezvousClient | None = None
        self._connected_to = ""

    def request(self, message: StoreMessage, timeout_seconds: float = 0.0) -> bytes | None:
        """Have a request served, by a new connection where the last one has failed, or the service has moved."""
        address = self._find_address()
        if address != self._connected_to:
            self.close()
        if self._client is None:
            self._client, self._connected_to = self._connect(address), address
        try:
            return self._client.request(message, timeout_seconds)
        except (OSError, PeerLostError, AuthenticationError, WireError):
            self.close()
            raise

    def close(self) -> None:
        """Leave; all values stay. May be called twice."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


class RendezvousClient(Rendezvous):
    """Authenticated connection of a rank to the launcher's service. Threads that share one take turns.

    Args:
        address: ``host:port``.
        secret: the job's 32 bytes.
        rank: who connects.
        timeout_seconds: how long connecting, and each later ``put``, may take.
        tls: encrypt everything; the service must do so, too.

    Raises:
        AuthenticationError: whoever listens there does not know the secret.
        PeerLostError: nobody listens there any more. Later calls raise it when the launcher has gone.
        TimeoutError: it did not answer in time.
    """

    def __init__(
        self, address: str, secret: bytes, rank: int, timeout_seconds: float, tls: TlsContext | None = None
    ) -> None:
        self._address = address
        self._host: Identity | None = None
        #: how long each later request that does not wait may take
        self.timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._num_requests = 0
        deadline = time.monotonic() + timeout_seconds
        try:
            self._stream: Connection = open_connection(
                split_address(address), secret, Identity(ProcessRole.RANK, rank), MAX_MESSAGE_BYTES, deadline, tls
            )
        except TimeoutError:
            raise TimeoutError(f"the rendezvous at {address} did not answer within {timeout_seconds:g} s") from None
        except OSError as error:
            raise self._lost(error) from None
        self._host = self._stream.peer

    def request(self, message: StoreMessage, timeout_seconds: float = 0.0) -> bytes | None:
        """Have a request served; one that does not wait, within `timeout_seconds`.

        Raises:
            ArgumentError: key or value are too large, or the service is full.
            PeerLostError: the launcher has gone.
            TimeoutError: it did not answer in time, or nobody put the value.
        """
        check_entry(message)
        waits = isinstance(message, ExchangeValues) or (isinstance(message, GetValue) and message.wait)
        seconds = timeout_seconds if waits else self.timeout_seconds
        with self._lock:
            self._num_requests += 1
            reply = self._call(msgspec.structs.replace(message, request=self._num_requests), seconds)
        if reply.problem:
            raise ArgumentError(f"rendezvous key {_key_of(message)!r}: {reply.problem}")
        return reply.value

    @property
    def is_idle(self) -> bool:
        """Return whether the connection is there, and nothing has come that was not asked for: its end, say."""
        if self._stream.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(self._stream, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Leave; all values stay. May be called twice."""
        self._stream.close()

    def _call(self, message: StoreMessage, timeout_seconds: float) -> StoreReply:
        deadline = time.monotonic() + timeout_seconds
        try:
            self._stream.send(REQUEST_CODEC.encode(message), deadline)
            while True:
                reply = STORE_REPLY_CODEC.decode(self._stream.receive(deadline))
                if reply.request == message.request:
                    return reply
        except TimeoutError:
            self._give_up(message.request)
            raise _key_timeout_error(_key_of(message), timeout_seconds) from None
        except OSError as error:
            raise self._lost(error) from None

    def _give_up(self, request: int) -> None:
        try:
            self._stream.send(REQUEST_CODEC.encode(CancelGet(request)), time.monotonic() + 1.0)
        except (OSError, AuthenticationError, WireError):
            self._stream.close()

    def _lost(self, error: OSError) -> PeerLostError:
        return service_lost_error(self._address, self._host, error.strerror or str(error))


def service_lost_error(address: str, host: Identity | None, detail: str) -> PeerLostError:
    """Make the error of a control service that cannot be used any more.

    Args:
        address: ``host:port``.
        host: who was there, None where nobody answered.
        detail: what the kernel says.
    """
    if host is not None and host.role is ProcessRole.RANK:
        return PeerLostError(
            f"rank {host.rank} has ended, and with it the job's control service at {address} ({detail})",
            ranks=(host.rank,),
        )
    whose = "the job's" if host is None else "the launcher's"
    ended = "`reigen run`, or rank 0 if it hosts it," if host is None else "`reigen run`"
    return PeerLostError(f"{whose} control service at {address} has gone ({detail}): {ended} has ended or was killed")


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[host]:port``.

    Raises:
        ConfigError: it has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()):
        raise ConfigError(f"the rendezvous address {address!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _key_of(message: StoreMessage) -> str:
    return message.prefix if isinstance(message, ForgetKeys | ExchangeValues) else message.key


def _key_timeout_error(key: str, timeout_seconds: float) -> TimeoutError:
    return TimeoutError(f"no process put {key!r} at the rendezvous within {timeout_seconds:g} s")
