"""Failures between the ranks of a TCP backend: diagnosis as one error that names the ranks at fault.

a. A connection ends: its rank has died. ``failure``, which may know more, is asked first, for a moment.
b. A rank gives up: it sends the reason on all its connections, and the others raise that.
c. The deadline passes. Late are ranks that have sent nothing since the operation began, or, where all have, ranks that
   owe something. A rank reports the ranks that it waits for, as in (b), and one that receives that, and waits, too,
   reports its own. So every rank listens for a moment to those that are suspected: one that reports is cleared, and
   those that it waits for are suspected. In the end all suspect the silent ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from reigen.backends.base import FailureCheck
from reigen.backends.tcp.connection import PeerConnection, TcpPeer
from reigen.cluster.membership.abort_message import AbortMessage, error_from_abort, make_abort_message
from reigen.cluster.membership.view import format_ranks_by_host
from reigen.errors import AuthenticationError, CollectiveError, DeadlineError, PeerLostError, WireError, format_ranks
from reigen.net.bulk_connection import PeerAborted

#: Seconds of asking why a connection has ended, and of listening to late ranks.
_REASON_SECONDS, _LISTEN_SECONDS = 0.7, 0.3
#: Seconds of finishing messages in the middle of which this rank gives up: only behind them it can send the reason.
_ABORT_SEND_SECONDS = 0.3
_PAUSE_SECONDS = 0.01
#: Limits of a reported error, so that it fits a link's ABORT: at most four bytes a character, five a rank.
_MAX_CHARACTERS, _MAX_RANKS = 180, 40


class FailureDiagnosis:
    """Diagnosis of failures of one rank's operations.

    ``peers`` are the connected ranks, which the caller adds; ``hosts``, of every rank, are for messages.
    """

    def __init__(
        self, rank: int, peers: Mapping[int, TcpPeer], failure: FailureCheck, hosts: Mapping[int, str]
    ) -> None:
        self._rank, self._peers, self._failure, self._hosts = rank, peers, failure, hosts
        self._has_aborted = False

    def send_abort(self, error: CollectiveError) -> None:
        """Report on every connection that this rank gives up, and why. The first call counts."""
        if self._has_aborted:
            return
        self._has_aborted = True
        full = make_abort_message(error, self._rank)
        short = msgspec.structs.replace(full, reason=full.reason[:_MAX_CHARACTERS], ranks=full.ranks[:_MAX_RANKS])
        unsent = self._connections(self._peers)
        for connection in unsent:
            connection.link.abort(msgspec.msgpack.encode(short))
        until = time.monotonic() + _ABORT_SEND_SECONDS
        while (
            unsent := [connection for connection in unsent if _flush_sends(connection)]
        ) and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)

    def listen(self, connections: Iterable[PeerConnection], pending: Sequence[int]) -> None:
        """Raise the error of a rank that gives up, of those that owe nothing. An end of connection is no error."""
        for connection in connections:
            reason = _read_abort(connection)
            if reason is not None:
                raise self._of_abort(connection.peer.rank, reason, pending)

    def of_link(self, connection: PeerConnection, error: Exception, pending: Sequence[int]) -> CollectiveError:
        """Explain a broken link, while ``pending`` ranks are to send or to receive."""
        rank = connection.peer.rank
        if isinstance(error, WireError | AuthenticationError):
            return CollectiveError(f"rank {rank} and this one do not understand each other: {error}", ranks=[rank])
        reason = _decode_abort(rank, error) if isinstance(error, PeerAborted) else _read_abort(connection)
        if reason is not None:
            return self._of_abort(rank, reason, pending)
        until = time.monotonic() + _REASON_SECONDS
        while time.monotonic() < until:
            known = self._failure(sorted({rank, *pending}))
            if known is not None:
                return known
            time.sleep(_PAUSE_SECONDS)
        who = format_ranks_by_host([rank], self._hosts)
        lost = f"rank {who} died, or was cut off, in the middle of a collective ({error})"
        return PeerLostError(lost, ranks=[rank])

    def of_silence(self, rank: int, seconds: float) -> CollectiveError:
        """Explain the silence of a rank's host."""
        return PeerLostError(
            f"rank {format_ranks_by_host([self._rank], self._hosts)} has heard nothing of the host of rank "
            f"{format_ranks_by_host([rank], self._hosts)} for {seconds:g} s (REIGEN_PEER_TIMEOUT): it crashed, or the "
            "network between the two is cut",
            ranks=[rank],
        )

    def of_deadline(self, pending: Sequence[int]) -> CollectiveError:
        """Explain a passed deadline while these ranks are to send or to receive."""
        late = self._late(pending)
        self.send_abort(_late_ranks_error(late))
        return self._resolve_late(late, set()) or _late_ranks_error(late)

    def _of_abort(self, sender: int, reason: CollectiveError, pending: Sequence[int]) -> CollectiveError:
        """Explain a rank that gives up; if its deadline has passed, find the late ranks."""
        if not isinstance(reason, DeadlineError):
            return reason
        late = self._late(pending)
        if late:
            self.send_abort(_late_ranks_error(late))
        return self._resolve_late(late | set(reason.ranks), {sender, self._rank}) or reason

    def _late(self, pending: Sequence[int]) -> set[int]:
        peers = [self._peers[rank] for rank in pending]
        silent = {peer.rank for peer in peers if not peer.is_heard}
        return silent or {peer.rank for peer in peers if peer.owes_data} or set(pending)

    def _resolve_late(self, late: set[int], cleared: set[int]) -> CollectiveError | None:
        """Listen to ranks that seem to be late; None if all are cleared in the end."""
        until = time.monotonic() + _LISTEN_SECONDS
        while (suspected := late - cleared) and time.monotonic() < until:
            for connection in self._connections(suspected):
                report = _read_abort(connection)
                if isinstance(report, DeadlineError):
                    cleared.add(connection.peer.rank)
                    late = late | set(report.ranks) - {self._rank}
                elif report is not None:
                    return report
            time.sleep(_PAUSE_SECONDS)
        return _late_ranks_error(suspected) if suspected else None

    def _connections(self, ranks: Iterable[int]) -> list[PeerConnection]:
        return [connection for rank in ranks if rank in self._peers for connection in self._peers[rank].connections]


def _flush_sends(connection: PeerConnection) -> bool:
    """Go on sending; return whether there is a rest that the kernel does not take yet."""
    try:
        connection.link.advance_sends()
    except (ConnectionError, WireError, AuthenticationError):
        return False
    return connection.link.wants_to_send


def _read_abort(connection: PeerConnection) -> CollectiveError | None:
    """Return the reason why a rank gives up, if it follows the received data, which are not waited for any more."""
    try:
        while connection.link.advance_receives():
            pass
    except PeerAborted as error:
        return _decode_abort(connection.peer.rank, error)
    except (ConnectionError, WireError, AuthenticationError):
        pass
    return None


def _decode_abort(rank: int, aborted: PeerAborted) -> CollectiveError:
    try:
        return error_from_abort(msgspec.msgpack.decode(aborted.reason, type=AbortMessage), f"rank {rank}")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return CollectiveError(f"rank {rank} gave up", ranks=[rank])


def _late_ranks_error(ranks: Iterable[int]) -> DeadlineError:
    late = sorted(ranks)
    return DeadlineError(f"rank(s) {format_ranks(late)} did not take their part in time (REIGEN_DEADLINE)", ranks=late)
