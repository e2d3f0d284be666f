"""Membership of a rank: its connection to the control service, open for as long as it is in the job.

The connection is what the others know of this rank's life: when the process ends, however it ends, the kernel closes
it; when the host goes silent, keepalive does. `cluster.membership.messages` states the protocol,
`cluster.membership.view` what follows.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from reigen.cluster.host_discovery import host_identity
from reigen.cluster.local_peers import LINGER_SECONDS, LINGER_SLICE_SECONDS
from reigen.cluster.membership.abort_message import AbortMessage
from reigen.cluster.membership.messages import (
    MAX_MESSAGE_BYTES,
    MEMBER_CODEC,
    MEMBERSHIP_REPLY_CODEC,
    LeaveJob,
    MemberRefused,
    RegisterMember,
)
from reigen.cluster.membership.rendezvous import service_lost_error, split_address
from reigen.cluster.membership.view import JobView
from reigen.errors import ArgumentError, AuthenticationError, CollectiveError, PeerLostError, WireError
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import Connection, open_connection
from reigen.net.event_loop import wait_ready
from reigen.net.fork_safety import close_in_children
from reigen.net.listener import SILENCE_ERRNOS
from reigen.net.sockets import wait_until_delivered

if TYPE_CHECKING:  # OpenSSL is loaded by those who want TLS
    from reigen.net.tls import TlsContext

#: How long saying a last message may take.
_GOODBYE_SECONDS = 1.0


class MembershipClient:
    """Membership of one rank among those of its group. Threads may share one.

    Args:
        address: ``host:port`` of the control service.
        secret: the job's 32 bytes.
        group: the same for all ranks of one job, and different from that of earlier and later ones.
        rank: this one's number in the group.
        size: how many ranks belong there.
        timeout_seconds: how long connecting may take.
        peer_timeout_seconds: after so much silence a host counts as lost.
        host_id: see `reigen.cluster.host_discovery.host_identity`.
        tls: encrypt everything; the service must do so, too.

    Raises:
        ArgumentError: the service has had a rank of this number in the group, or expects another size.
        AuthenticationError: the process that listens there does not know the secret.
        PeerLostError: no process listens there any more.
        TimeoutError: it did not answer in time.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        group: str,
        rank: int,
        size: int,
        *,
        timeout_seconds: float,
        peer_timeout_seconds: float,
        host_id: str = "",
        tls: TlsContext | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self._address, self._peer_timeout_seconds = address, peer_timeout_seconds
        own_host_id, self._host = host_identity(host_id)
        me = RegisterMember(
            "rank", rank, self._host, 1 + secrets.randbits(62), {"rank": size}, group=group, host_id=own_host_id
        )
        self._view = JobView(me, peer_timeout_seconds=peer_timeout_seconds)
        self._lock = threading.Lock()
        self._has_ended = False
        deadline = time.monotonic() + timeout_seconds
        try:
            identity = Identity(ProcessRole.RANK, rank, "membership")
            self._connection: Connection = open_connection(
                split_address(address), secret, identity, MAX_MESSAGE_BYTES, deadline, tls
            )
            self._register(deadline)
        except TimeoutError:
            raise TimeoutError(
                f"the job's control service at {address} did not answer within {timeout_seconds:g} s"
            ) from None
        except OSError as error:
            raise self._loss(error) from None
        close_in_children(self)

    def fileno(self) -> int:
        """Readable when there is news; -1 when closed."""
        return self._connection.fileno()

    def failure(self, needed: Sequence[int]) -> CollectiveError | None:
        """Return why waiting for the ranks ``needed`` will never succeed, or None while it may. Does not wait.

        See `JobView.rank_error` for which of several reasons is told.
        """
        with self._lock:
            self._receive()
            return self._view.rank_error(needed)

    def abort(self, error: CollectiveError) -> None:
        """Tell the others that this rank cannot go on, and why; the first call counts."""
        with self._lock:
            self._send_last(self._view.abort(error))

    def leave(self) -> None:
        """Tell the others that this rank is going in good order, if it has not given up."""
        with self._lock:
            self._send_last(LeaveJob())

    def linger(self, ranks: Sequence[int], over: Callable[[], bool] = lambda: False) -> None:
        """Give ranks that are lost a moment to end, as `LocalPeers.linger` does, unless it is ``over``.

        That a rank's process has ended is only known here where it died; one that has left gets all of the time.
        """
        until = time.monotonic() + LINGER_SECONDS
        while not over() and (left := until - time.monotonic()) > 0:
            with self._lock:
                self._receive()
                if all(rank == self.rank or ("rank", rank) in self._view.lost for rank in ranks):
                    return
            self.wait_for_death(min(left, LINGER_SLICE_SECONDS))

    def wait_for_death(self, timeout_seconds: float) -> None:
        """Return when there is news, or after the time given."""
        if self.fileno() < 0:
            time.sleep(timeout_seconds)  # nothing more will be known
        else:
            wait_ready(self._connection, timeout_seconds)

    def close(self) -> None:
        """Close the connection: for the others this rank has died, unless it said something before. Repeatable.

        Where packets are lost that takes a while: what it said must have arrived. But a host that is silent for the
        peer timeout, some of which has passed before, gets nothing any more.
        """
        with self._lock:
            if self._has_ended:
                wait_until_delivered(self._connection.socket, self._peer_timeout_seconds)
            self._connection.close()

    def close_descriptors(self) -> None:
        """Close the connection in a child: `reigen.net.fork_safety`."""
        self._connection.close()

    def _register(self, deadline: float) -> None:
        try:
            self._connection.keep_alive(self._peer_timeout_seconds)
            self._connection.send(MEMBER_CODEC.encode(self._view.registration()), deadline)
            reply = MEMBERSHIP_REPLY_CODEC.decode(self._connection.receive(deadline))
            if isinstance(reply, MemberRefused):
                raise ArgumentError(f"the control service at {self._address} refuses rank {self.rank}: {reply.reason}")
            self._view.take(reply)
        except BaseException:
            self._connection.close()
            raise

    def _send_last(self, message: LeaveJob | AbortMessage) -> None:
        if self._has_ended or self.fileno() < 0:
            return
        self._has_ended = True
        with contextlib.suppress(OSError, AuthenticationError, WireError):  # who cannot be told learns it otherwise
            self._connection.send(MEMBER_CODEC.encode(message), time.monotonic() + _GOODBYE_SECONDS)

    def _receive(self) -> None:
        """Take in all news that is there."""
        if self.fileno() < 0:
            return
        try:
            while payloads := self._connection.read():
                for payload in payloads:
                    self._view.take(MEMBERSHIP_REPLY_CODEC.decode(payload))
        except (OSError, AuthenticationError, WireError) as error:
            self._view.fail(self._loss(error))
            self._connection.close()

    def _loss(self, error: Exception) -> PeerLostError:
        if isinstance(error, OSError) and error.errno in SILENCE_ERRNOS:
            return PeerLostError(
                f"nothing was heard of the job's control service at {self._address} for "
                f"{self._peer_timeout_seconds:g} s (REIGEN_PEER_TIMEOUT): its host is down, or this host, "
                f"{self._host}, is cut off from it"
            )
        detail = (error.strerror if isinstance(error, OSError) else None) or str(error)
        service = self._connection.peer if self._view.is_assigned else None
        return service_lost_error(self._address, service, detail)
