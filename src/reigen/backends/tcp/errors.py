"""What goes wrong between the ranks of a TCP backend, and how it becomes one error that names who is to blame.

a. A connection ends: its rank has died. Who knows more about that (``failure``) is asked first, for a moment.
b. A rank gives up: it says why on all its connections, and that is what the others raise.
c. The deadline passes. Late are those who have not been heard of since the operation began, or, where all have, those
   who owe something. A rank tells for whom it waits, as in (b), and whoever hears that, and waits, too, tells for whom.
   So everybody listens for a moment to those who are blamed: who says something is excused, and those that it waits
   for are blamed. In the end all blame those who have said nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from reigen.backends.base import FailureCheck
from reigen.backends.tcp.connection import PeerConnection, TcpPeer
from reigen.cluster.membership.abort_message import AbortMessage, error_from_abort, format_ranks, make_abort_message
from reigen.cluster.membership.view import format_ranks_by_host
from reigen.errors import AuthenticationError, CollectiveError, DeadlineError, PeerLostError, WireError
from reigen.net.bulk_connection import PeerAborted

#: For how long to ask why a connection has ended, and to listen to who is late.
_REASON_SECONDS, _EXCUSE_SECONDS = 0.7, 0.3
#: For how long to finish messages in the middle of which this rank gives up: only behind them it can say why.
_ABORT_SEND_SECONDS = 0.3
_PAUSE_SECONDS = 0.01
#: Of an error that is told, so that it fits a link's ABORT: at most four bytes a character, five a rank.
_MAX_CHARACTERS, _MAX_RANKS = 180, 40


class FailureDiagnosis:
    """How one rank's operations fail.

    Args:
        rank: this rank.
        peers: the ranks that there are connections to; somebody else adds them.
        failure: what the job knows.
        hosts: of every rank, for messages.
    """

    def __init__(
        self, rank: int, peers: Mapping[int, TcpPeer], failure: FailureCheck, hosts: Mapping[int, str]
    ) -> None:
        self._rank, self._peers, self._failure, self._hosts = rank, peers, failure, hosts
        self._has_aborted = False

    def tell(self, error: CollectiveError) -> None:
        """Say on every connection that this rank gives up, and why. The first call counts."""
        if self._has_aborted:
            return
        self._has_aborted = True
        full = make_abort_message(error, self._rank)
        short = msgspec.structs.replace(full, reason=full.reason[:_MAX_CHARACTERS], ranks=full.ranks[:_MAX_RANKS])
        speaking = self._lanes(self._peers)
        for lane in speaking:
            lane.link.abort(msgspec.msgpack.encode(short))
        until = time.monotonic() + _ABORT_SEND_SECONDS
        while (speaking := [lane for lane in speaking if _flush_sends(lane)]) and time.monotonic() < until:
            time.sleep(_PAUSE_SECONDS)

    def listen(self, lanes: Iterable[PeerConnection], pending: Sequence[int]) -> None:
        """See whether somebody gives up from whom nothing is expected. That somebody has gone is no error.

        Raises:
            CollectiveError: somebody has given up.
        """
        for lane in lanes:
            reason = _read_abort(lane)
            if reason is not None:
                raise self._of_word(lane.peer.rank, reason, pending)

    def of_link(self, lane: PeerConnection, error: Exception, pending: Sequence[int]) -> CollectiveError:
        """What it means that a link does not work any more, while ``pending`` ranks are to send or to receive."""
        rank = lane.peer.rank
        if isinstance(error, WireError | AuthenticationError):
            return CollectiveError(f"rank {rank} and this one do not understand each other: {error}", ranks=[rank])
        reason = _decode_abort(rank, error) if isinstance(error, PeerAborted) else _read_abort(lane)
        if reason is not None:
            return self._of_word(rank, reason, pending)
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
        """A machine owes a sign of life."""
        return PeerLostError(
            f"rank {format_ranks_by_host([self._rank], self._hosts)} has heard nothing of the machine of rank "
            f"{format_ranks_by_host([rank], self._hosts)} for {seconds:g} s (REIGEN_PEER_TIMEOUT): it "
            f"crashed, or the network between "
            "the two is cut",
            ranks=[rank],
        )

    def of_deadline(self, pending: Sequence[int]) -> CollectiveError:
        """The deadline has passed while these ranks are to send or to receive."""
        late = self._late(pending)
        self.tell(_late_ranks_error(late))
        return self._blame(late, set()) or _late_ranks_error(late)

    def _of_word(self, teller: int, reason: CollectiveError, pending: Sequence[int]) -> CollectiveError:
        """What it means that a rank gives up. If its deadline has passed: who is late?"""
        if not isinstance(reason, DeadlineError):
            return reason
        late = self._late(pending)
        if late:
            self.tell(_late_ranks_error(late))
        return self._blame(late | set(reason.ranks), {teller, self._rank}) or reason

    def _late(self, pending: Sequence[int]) -> set[int]:
        peers = [self._peers[rank] for rank in pending]
        unheard = {peer.rank for peer in peers if not peer.is_heard}
        return unheard or {peer.rank for peer in peers if peer.owes_data} or set(pending)

    def _blame(self, late: set[int], excused: set[int]) -> CollectiveError | None:
        """Listen to those who seem to be late; None if in the end nobody is left to blame."""
        until = time.monotonic() + _EXCUSE_SECONDS
        while (asked := late - excused) and time.monotonic() < until:
            for lane in self._lanes(asked):
                word = _read_abort(lane)
                if isinstance(word, DeadlineError):
                    excused.add(lane.peer.rank)
                    late = late | set(word.ranks) - {self._rank}
                elif word is not None:
                    return word
            time.sleep(_PAUSE_SECONDS)
        return _late_ranks_error(asked) if asked else None

    def _lanes(self, ranks: Iterable[int]) -> list[PeerConnection]:
        return [lane for rank in ranks if rank in self._peers for lane in self._peers[rank].lanes]


def _flush_sends(lane: PeerConnection) -> bool:
    """Go on sending; whether there is a rest that the kernel does not take yet."""
    try:
        lane.link.advance_sends()
    except (ConnectionError, WireError, AuthenticationError):
        return False
    return lane.link.wants_to_send


def _read_abort(lane: PeerConnection) -> CollectiveError | None:
    """Why a rank gives up, if it says so behind what has come, for which nobody waits any more."""
    try:
        while lane.link.advance_receives():
            pass
    except PeerAborted as error:
        return _decode_abort(lane.peer.rank, error)
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
