"""Authenticated connections between any two ranks of a job, made on demand.

a. Every rank listens at an address of its own and puts it at the rendezvous, under ``mesh/RANK``.
b. Of two ranks that open a connection to each other, for the same purpose, the higher one connects and the lower one
   accepts. The purpose is part of the handshake, so neither can take one connection for another.
c. A connection for a purpose that this rank has not asked for yet is kept until it does.
d. An attempt that the other end drops during the handshake is repeated until the deadline; one that is refused, for a
   moment only: a rank that has put its address at the rendezvous listens until it ends.

A rank accepts while it is in `ConnectionPool.open`; before, connections queue in the kernel. Everything is bounded: how
many connections are kept, how many may be unproven, and for how long.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from reigen.cluster.membership.rendezvous import Rendezvous, split_address
from reigen.errors import AuthenticationError, DeadlineError, PeerLostError, format_ranks
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import Connection, ConnectionOptions
from reigen.net.event_loop import EventLoop
from reigen.net.fork_safety import close_in_children
from reigen.net.listener import Listener, open_listening_socket

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext

#: The largest payload of a stream. Bulk data goes through links, which have no such bound.
MAX_PAYLOAD_BYTES = 1 << 20
#: Connections that were not asked for yet, for each rank of the job; more are dropped.
MAX_KEPT_PER_RANK = 32
#: How often to look for news while nothing arrives.
_SLICE_SECONDS = 0.1
#: For how long a rank that refuses connections is asked again, and how long to wait in between.
_REFUSED_SECONDS, _AGAIN_SECONDS = 0.7, 0.05

#: Told about ten times a second which ranks a call of `ConnectionPool.open` still waits for. What it raises ends the
#: call.
WaitingCallback = Callable[[Sequence[int]], None]


@dataclass
class _MissingPeer:
    """A rank that a call of `ConnectionPool.open` waits for.

    Attributes:
        address: where it listens, if this rank is to connect; empty until the rendezvous knows.
        connection: the one that is being made, if there is one.
        again: when to try again.
        refused_since: since when it has refused connections, if it does.
        problem: how the last try ended.
    """

    address: str = ""
    connection: Connection | None = None
    again: float = 0.0
    refused_since: float | None = None
    problem: str = ""


@dataclass
class _OpenCall:
    """One call of `ConnectionPool.open`."""

    purpose: str
    deadline: float
    found: dict[int, Connection] = field(default_factory=dict)
    missing: dict[int, _MissingPeer] = field(default_factory=dict)


class ConnectionPool:
    """One rank's connections. One thread at a time may use it.

    Args:
        rank: this rank.
        size: how many ranks the job has.
        rendezvous: where addresses are exchanged.
        secret: the job's 32 bytes.
        address: the address of this host, IPv4 or IPv6, at which the other ranks reach it.
        peer_timeout_seconds: after so much silence a host counts as lost (`reigen.net.sockets.set_keepalive`).
        tls: encrypt everything; so must all ranks.

    Attributes:
        address: ``host:port`` where this rank listens. ``rank``, ``size`` and ``peer_timeout_seconds`` are as above.

    Raises:
        OSError: this host has no such address.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        rendezvous: Rendezvous,
        secret: bytes,
        address: str,
        peer_timeout_seconds: float,
        tls: TlsContext | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._rendezvous, self._secret, self._tls = rendezvous, secret, tls
        self.peer_timeout_seconds = peer_timeout_seconds
        listening, self.address = open_listening_socket(address)
        self._loop = EventLoop()
        self._listener = Listener(self._loop, listening, self._options(""), self._on_authenticated)
        self._call: _OpenCall | None = None
        #: where other ranks listen, as far as it is known
        self._addresses: dict[int, str] = {}
        #: connections that came here, and that were not asked for
        self._kept: dict[tuple[int, str], Connection] = {}
        try:
            rendezvous.put(f"mesh/{rank}", self.address.encode())
        except BaseException:
            self.close()
            raise
        close_in_children(self)

    def open(
        self,
        peers: Sequence[int],
        purpose: str,
        deadline: float,
        waiting: WaitingCallback | None = None,
        *,
        bulk: bool = False,
    ) -> dict[int, Connection]:
        """A new connection to each of ``peers``, each of which opens one to this rank for the same purpose.

        Args:
            peers: ranks of the job; not this one.
            purpose: what for, at most 32 ASCII characters; used once between two ranks.
            deadline: on the clock of ``time.monotonic()``.
            waiting: told about ten times a second who is missing; may raise.
            bulk: see `reigen.net.sockets.set_keepalive`.

        Returns:
            By rank, a stream on which nothing has been said yet. The caller closes them.

        Raises:
            DeadlineError: peers did not come by the deadline; says how far it got with each.
            PeerLostError: no process listens at a peer's address any more.
            AuthenticationError: the process that listens there does not know the secret.
        """
        call = _OpenCall(purpose, deadline)
        for peer in peers:
            kept = self._kept.pop((peer, purpose), None)
            if kept is None:
                call.missing[peer] = _MissingPeer(self._addresses.get(peer, ""))
            else:
                call.found[peer] = kept
        self._call = call
        try:
            self._complete(call, waiting)
            for connection in call.found.values():
                connection.keep_alive(self.peer_timeout_seconds, bulk=bulk)
        except BaseException:
            for connection in call.found.values():
                connection.close()
            raise
        finally:
            self._call = None
            for missing in call.missing.values():
                self._end_attempt(missing)
        return call.found

    def close(self) -> None:
        """Stop listening, and close connections that were not asked for. May be called twice."""
        self._listener.close()
        self.close_descriptors()
        self._kept.clear()

    def close_descriptors(self) -> None:
        """Close the sockets only; see `reigen.net.fork_safety`."""
        self._loop.close()
        for connection in self._kept.values():
            connection.close()

    def _complete(self, call: _OpenCall, waiting: WaitingCallback | None) -> None:
        next_look = time.monotonic() + _SLICE_SECONDS
        while call.missing:
            self._connect(call)
            now = time.monotonic()
            if waiting is not None and now >= next_look:
                waiting(sorted(call.missing))
                next_look = now + _SLICE_SECONDS
            if now >= call.deadline:
                raise self._too_late(call)
            if call.missing:
                self._loop.wait(min(_AGAIN_SECONDS, call.deadline - now))

    # -- to lower ranks -----------------------------------------------------------------------------------------------

    def _connect(self, call: _OpenCall) -> None:
        """Look up the addresses of lower ranks, as far as they are known, and connect to them."""
        for peer, missing in list(call.missing.items()):
            if peer > self.rank or missing.connection is not None or missing.again > time.monotonic():
                continue
            if not missing.address:
                try:
                    found = self._rendezvous.get(f"mesh/{peer}", _AGAIN_SECONDS)
                except TimeoutError:
                    return  # first those who have come here
                missing.address = self._addresses[peer] = found.decode()
            options = self._options(call.purpose)
            try:
                missing.connection = options.start_connecting(split_address(missing.address))
            except OSError as error:
                self._fail(peer, missing, error)
            else:
                self._advance(call, peer, missing)

    def _advance(self, call: _OpenCall, peer: int, missing: _MissingPeer) -> None:
        connection = missing.connection
        assert connection is not None, "only while connecting"
        try:
            is_proven = connection.advance()
        except AuthenticationError as error:
            raise AuthenticationError(f"rank {peer} at {missing.address}: {error}") from None
        except OSError as error:
            self._fail(peer, missing, error)
            return
        if not is_proven:
            step = partial(self._advance, call, peer, missing)
            self._loop.watch(connection, step, step if connection.num_unsent_bytes else None)
            return
        self._loop.unwatch(connection)
        call.found[peer] = connection
        del call.missing[peer]

    def _fail(self, peer: int, missing: _MissingPeer, error: OSError) -> None:
        """End an attempt to connect, to try again in a moment; raise PeerLostError where that lasts too long."""
        now = time.monotonic()
        missing.problem = error.strerror or str(error)
        if not isinstance(error, ConnectionResetError):  # as where it has too many strangers, or is about to end
            if missing.refused_since is None:
                missing.refused_since = now
            if now - missing.refused_since >= _REFUSED_SECONDS:
                raise PeerLostError(
                    f"rank {peer} cannot be reached at {missing.address} ({missing.problem}): it has ended, or hosts "
                    "cannot talk to each other there (--network-interfaces, REIGEN_NETWORK_INTERFACES)",
                    ranks=[peer],
                ) from None
        self._end_attempt(missing)
        missing.again = now + _AGAIN_SECONDS

    def _end_attempt(self, missing: _MissingPeer) -> None:
        if missing.connection is not None:
            self._loop.unwatch(missing.connection)
            missing.connection.close()
            missing.connection = None

    # -- from higher ranks --------------------------------------------------------------------------------------------

    def _on_authenticated(self, connection: Connection) -> None:
        peer = connection.peer
        if peer.role is not ProcessRole.RANK or not self.rank < peer.rank < self.size:
            self._listener.refuse(f"comes from {peer}, which has no reason to connect to rank {self.rank}")
            connection.close()
            return
        call = self._call
        if call is not None and peer.purpose == call.purpose and peer.rank in call.missing:
            call.found[peer.rank] = connection
            del call.missing[peer.rank]
            return
        before = self._kept.pop((peer.rank, peer.purpose), None)
        if before is not None:  # given up: a rank makes one connection for a purpose at a time
            before.close()
        if sum(rank == peer.rank for rank, _ in self._kept) < MAX_KEPT_PER_RANK:
            self._kept[peer.rank, peer.purpose] = connection
        else:
            connection.close()

    def _options(self, purpose: str) -> ConnectionOptions:
        me = Identity(ProcessRole.RANK, self.rank, purpose)
        return ConnectionOptions(self._secret, me, MAX_PAYLOAD_BYTES, self._tls)

    def _too_late(self, call: _OpenCall) -> DeadlineError:
        late = sorted(call.missing)
        num_refused, last_refusal = self._listener.num_refused, self._listener.last_refusal
        refused = f"; {num_refused} connection(s) were refused, the last of which {last_refusal}" if num_refused else ""
        details = {}
        for peer, missing in call.missing.items():
            if peer > self.rank:
                details[peer] = f"has not connected to {self.address}" + refused
            elif not missing.address:
                details[peer] = "has not told at the rendezvous where it listens"
            else:
                details[peer] = f"did not answer at {missing.address}" + f" ({missing.problem})" * bool(missing.problem)
        reason = (
            f"no connection to rank(s) {format_ranks(late)} in time: they did not come this far, or their hosts cannot "
            "reach this one (--network-interfaces, REIGEN_NETWORK_INTERFACES)"
        )
        return DeadlineError(reason, ranks=late, details=details)
