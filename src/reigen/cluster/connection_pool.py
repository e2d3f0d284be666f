"""Authenticated connections between any two ranks of a job, made when somebody needs them.

a. Every rank listens at an address of its own and puts it at the rendezvous, under ``mesh/RANK``.
b. Of two ranks that open a connection to each other, for the same purpose, the higher one connects and the lower one
   accepts. The purpose is part of the handshake, so neither can take one connection for another.
c. A connection for a purpose that this rank has not asked for yet is kept until it does.
d. An attempt that the other end drops during the handshake is repeated until the deadline; one that is refused, for a
   moment only: whoever has put its address at the rendezvous listens until it ends.

A rank accepts while it is in `ConnectionPool.open`; before, connections queue in the kernel. Everything is bounded: how
many connections are kept, how many may be unproven, and for how long.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reigen.cluster.fork_safety import close_in_children
from reigen.cluster.membership.rendezvous import Rendezvous, split_address
from reigen.errors import AuthenticationError, DeadlineError, PeerLostError, format_ranks
from reigen.net.auth import ClientHandshake, Identity, ProcessRole, ServerHandshake
from reigen.net.sockets import bound_retransmit_backoff, set_keepalive
from reigen.net.stream import HANDSHAKE_SECONDS, AuthenticatedStream, StreamProtocol

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext

#: The largest payload of a stream. Bulk data goes through links, which have no such bound.
MAX_PAYLOAD_BYTES = 1 << 20
#: Connections that have not proven themselves; one more closes the oldest of them.
MAX_UNAUTHENTICATED = 128
#: Connections that nobody has asked for yet, for each rank of the job; more are dropped.
MAX_KEPT_PER_RANK = 32
_BACKLOG = 1024
#: How often to look for news while nothing arrives.
_SLICE_SECONDS = 0.1
#: For how long a rank that refuses connections is asked again, and how long to wait in between.
_REFUSED_SECONDS, _AGAIN_SECONDS = 0.7, 0.05

#: Told about ten times a second which ranks a call of `ConnectionPool.open` still waits for. What it raises ends the
#: call.
WaitingCallback = Callable[[Sequence[int]], None]


@dataclass(eq=False)
class _PendingConnection:
    """A connection whose handshake is going on.

    Attributes:
        deadline: until when the other end must have proven itself.
    """

    connection: socket.socket
    conversation: StreamProtocol
    deadline: float

    @property
    def events(self) -> int:
        return select.POLLIN | (select.POLLOUT if self.conversation.outgoing else 0)

    def advance(self) -> bool:
        """Do what is possible now; whether both ends are proven.

        Raises:
            OSError, AuthenticationError: this connection leads nowhere.
        """
        with contextlib.suppress(BlockingIOError):
            while True:
                self._flush()
                if self.conversation.peer is not None:
                    return True
                data = self.connection.recv(self.conversation.num_wanted_bytes)
                if not data:
                    raise ConnectionResetError("the other end closed the connection during the handshake")
                self.conversation.receive(data)
        return False

    def _flush(self) -> None:
        outgoing = self.conversation.outgoing
        while outgoing:
            del outgoing[: self.connection.send(outgoing)]


@dataclass
class _MissingPeer:
    """A rank that a call of `ConnectionPool.open` waits for.

    Attributes:
        address: where it listens, if this rank is to connect; empty until the rendezvous knows.
        half: the connection that is being made, if there is one.
        again: when to try again.
        refused_since: since when it has refused connections, if it does.
        problem: how the last try ended.
    """

    address: str = ""
    half: _PendingConnection | None = None
    again: float = 0.0
    refused_since: float | None = None
    problem: str = ""


@dataclass
class _OpenCall:
    """One call of `ConnectionPool.open`."""

    purpose: str
    deadline: float
    found: dict[int, _PendingConnection] = field(default_factory=dict)
    missing: dict[int, _MissingPeer] = field(default_factory=dict)


class ConnectionPool:
    """One rank's connections. One thread at a time may use it.

    Args:
        rank: this rank.
        size: how many ranks the job has.
        rendezvous: where addresses are exchanged.
        secret: the job's 32 bytes.
        address: the address of this host, IPv4 or IPv6, at which the other ranks reach it.
        peer_timeout_seconds: after so much silence a machine counts as lost (`reigen.net.sockets.set_keepalive`).
        tls: encrypt everything; so must all ranks.

    Attributes:
        rank: this rank.
        size: how many ranks the job has.
        address: ``host:port`` where this rank listens.
        peer_timeout_seconds: as above.

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
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address = f"{address}:{self._listener.getsockname()[1]}"
        #: where other ranks listen, as far as it is known
        self._addresses: dict[int, str] = {}
        #: connections that came here and have not proven themselves
        self._strangers: list[_PendingConnection] = []
        #: connections that have, and that nobody has asked for
        self._kept: dict[tuple[int, str], _PendingConnection] = {}
        #: how many connections were refused, and why the last one was
        self._num_refused, self._last_refusal = 0, ""
        try:
            rendezvous.put(f"mesh/{rank}", self.address.encode())
        except BaseException:
            self._listener.close()
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
    ) -> dict[int, AuthenticatedStream]:
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
            PeerLostError: nobody listens at a peer's address any more.
            AuthenticationError: whoever listens there does not know the secret.
        """
        call = _OpenCall(purpose, deadline)
        for peer in peers:
            kept = self._kept.pop((peer, purpose), None)
            if kept is None:
                call.missing[peer] = _MissingPeer(self._addresses.get(peer, ""))
            else:
                call.found[peer] = kept
        try:
            self._complete(call, waiting)
            for half in call.found.values():
                set_keepalive(half.connection, self.peer_timeout_seconds, bulk=bulk)
        except BaseException:
            for half in call.found.values():
                half.connection.close()
            raise
        finally:
            for missing in call.missing.values():
                if missing.half is not None:
                    missing.half.connection.close()
        return {peer: AuthenticatedStream(half.connection, half.conversation) for peer, half in call.found.items()}

    def close(self) -> None:
        """Stop listening, and close what nobody has asked for. May be called twice."""
        self.close_descriptors()
        self._strangers.clear()
        self._kept.clear()

    def close_descriptors(self) -> None:
        """See `reigen.cluster.fork_safety`."""
        self._listener.close()
        for half in [*self._strangers, *self._kept.values()]:
            half.connection.close()

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
                self._exchange(call, min(_AGAIN_SECONDS, call.deadline - now))

    def _exchange(self, call: _OpenCall, timeout_seconds: float) -> None:
        """Wait until something arrives, and serve it."""
        own = {m.half.connection.fileno(): (peer, m) for peer, m in call.missing.items() if m.half is not None}
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        for half in self._strangers + [m.half for _, m in own.values() if m.half is not None]:
            poll.register(half.connection, half.events)
        ready = {fd for fd, _ in poll.poll(timeout_seconds * 1000)}
        for fd in ready & own.keys():
            self._advance_own(call, *own[fd])
        for half in [h for h in self._strangers if h.connection.fileno() in ready]:
            self._advance_stranger(call, half)
        if self._listener.fileno() in ready:
            self._accept()
        now = time.monotonic()
        for half in [h for h in self._strangers if h.deadline <= now]:
            self._refuse(half, "did not prove in time that it knows this job's secret")

    # -- to lower ranks -----------------------------------------------------------------------------------------------

    def _connect(self, call: _OpenCall) -> None:
        """Find out where the lower ranks listen, as far as they have told, and connect to them."""
        for peer, missing in list(call.missing.items()):
            if peer > self.rank or missing.half is not None or missing.again > time.monotonic():
                continue
            if not missing.address:
                try:
                    found = self._rendezvous.get(f"mesh/{peer}", _AGAIN_SECONDS)
                except TimeoutError:
                    return  # first those who have come here
                missing.address = self._addresses[peer] = found.decode()
            problem = self._start(call, missing)
            self._advance_own(call, peer, missing, problem)

    def _start(self, call: _OpenCall, missing: _MissingPeer) -> int:
        """Begin to connect; returns the number of the error if that is over already."""
        host, port = split_address(missing.address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        handshake = ClientHandshake(self._secret, Identity(ProcessRole.RANK, self.rank, call.purpose))
        channel = None if self._tls is None else self._tls.connects()
        missing.half = _PendingConnection(
            connection, StreamProtocol(handshake, MAX_PAYLOAD_BYTES, channel), call.deadline
        )
        self._prepare(connection)
        problem = connection.connect_ex((host, port))
        return 0 if problem == errno.EINPROGRESS else problem  # how it ends, the first send tells

    def _advance_own(self, call: _OpenCall, peer: int, missing: _MissingPeer, problem: int = 0) -> None:
        half = missing.half
        assert half is not None, "only while connecting"
        now = time.monotonic()
        try:
            if problem:
                raise OSError(problem, os.strerror(problem))
            if half.advance():
                call.found[peer] = half
                del call.missing[peer]
            return
        except ConnectionResetError as error:  # it has too many strangers, or is about to end
            missing.problem = str(error)
        except OSError as error:
            missing.problem = error.strerror or str(error)
            if missing.refused_since is None:
                missing.refused_since = now
            if now - missing.refused_since >= _REFUSED_SECONDS:
                raise PeerLostError(
                    f"rank {peer} cannot be reached at {missing.address} ({missing.problem}): it has ended, or hosts "
                    "cannot talk to each other there (--network-interfaces, REIGEN_NETWORK_INTERFACES)",
                    ranks=[peer],
                ) from None
        except AuthenticationError as error:
            raise AuthenticationError(f"rank {peer} at {missing.address}: {error}") from None
        half.connection.close()
        missing.half, missing.again = None, now + _AGAIN_SECONDS

    # -- from higher ranks --------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone again, or no descriptors are left: then strangers give theirs back
            if self._strangers:
                self._refuse(self._strangers[0], "took the last descriptor of this process")
            else:
                time.sleep(_AGAIN_SECONDS)  # the listener stays readable: without a pause this would spin
            return
        self._prepare(connection)
        handshake = ServerHandshake(self._secret, Identity(ProcessRole.RANK, self.rank))
        channel = None if self._tls is None else self._tls.accepts()
        conversation = StreamProtocol(handshake, MAX_PAYLOAD_BYTES, channel)
        self._strangers.append(_PendingConnection(connection, conversation, time.monotonic() + HANDSHAKE_SECONDS))
        if len(self._strangers) > MAX_UNAUTHENTICATED:
            self._refuse(self._strangers[0], f"was the oldest of more than {MAX_UNAUTHENTICATED} without a proof")

    def _advance_stranger(self, call: _OpenCall, half: _PendingConnection) -> None:
        try:
            if not half.advance():
                return
        except (OSError, AuthenticationError) as error:
            self._refuse(half, str(error))
            return
        peer = half.conversation.peer
        assert peer is not None, "both ends are proven"
        if peer.role is not ProcessRole.RANK or not self.rank < peer.rank < self.size:
            self._refuse(half, f"comes from {peer}, which has no reason to connect to rank {self.rank}")
            return
        self._strangers.remove(half)
        self._hand_over(call, peer, half)

    def _hand_over(self, call: _OpenCall, peer: Identity, half: _PendingConnection) -> None:
        if peer.purpose == call.purpose and peer.rank in call.missing:
            call.found[peer.rank] = half
            del call.missing[peer.rank]
            return
        before = self._kept.pop((peer.rank, peer.purpose), None)
        if before is not None:  # given up: a rank makes one connection for a purpose at a time
            before.connection.close()
        if sum(rank == peer.rank for rank, _ in self._kept) < MAX_KEPT_PER_RANK:
            self._kept[peer.rank, peer.purpose] = half
        else:
            half.connection.close()

    def _refuse(self, half: _PendingConnection, why: str) -> None:
        self._num_refused += 1
        self._last_refusal = why
        self._strangers.remove(half)
        half.connection.close()

    @staticmethod
    def _prepare(connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound_retransmit_backoff(connection)

    def _too_late(self, call: _OpenCall) -> DeadlineError:
        late = sorted(call.missing)
        refused = f"; {self._num_refused} connection(s) were refused, the last of which {self._last_refusal}"
        details = {}
        for peer, missing in call.missing.items():
            if peer > self.rank:
                details[peer] = f"has not connected to {self.address}" + (refused if self._num_refused else "")
            elif not missing.address:
                details[peer] = "has not told at the rendezvous where it listens"
            else:
                details[peer] = f"did not answer at {missing.address}" + f" ({missing.problem})" * bool(missing.problem)
        reason = (
            f"no connection to rank(s) {format_ranks(late)} in time: they did not come this far, or their "
            f"hosts cannot reach "
            "this one (--network-interfaces, REIGEN_NETWORK_INTERFACES)"
        )
        return DeadlineError(reason, ranks=late, details=details)
