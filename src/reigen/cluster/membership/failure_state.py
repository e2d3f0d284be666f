"""What a rank knows of the ends of the others, and what follows for whoever waits for them. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from reigen.cluster.membership.abort_message import error_from_abort, left_error
from reigen.cluster.membership.liveness import LivenessEvent, RankAborted, RankLeft, RanksDied
from reigen.errors import CollectiveError, PeerLostError, format_ranks


def format_ranks_by_host(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """``1, 2 (host h1), 4 (host h2)``: ranks with their hosts, where these are known."""
    by_host: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_host.setdefault(hosts.get(rank, ""), []).append(rank)
    return ", ".join(
        f"{format_ranks(some)} (host {host})" if host else format_ranks(some) for host, some in by_host.items()
    )


class FailureState:
    """The ends of a room's ranks, as far as one of them has been told.

    Args:
        rank: this rank.
        peer_timeout_seconds: after how long a silent machine counts as lost; for messages.

    Attributes:
        gone: ranks whose end is known to be the end of their process.
    """

    def __init__(self, rank: int, peer_timeout_seconds: float) -> None:
        self._rank = rank
        self._peer_timeout_seconds = peer_timeout_seconds
        self._died: list[RanksDied] = []
        self._left: dict[int, str] = {}
        self._abort: CollectiveError | None = None
        self._service: PeerLostError | None = None
        self.gone: set[int] = set()

    def learn(self, event: LivenessEvent) -> None:
        """Take in what the service tells."""
        if isinstance(event, RanksDied):
            self._died.append(event)
            self.gone.update(event.ranks)
        elif isinstance(event, RankLeft):
            self._left[event.rank] = event.host
        elif self._abort is None:
            self._abort = self._told_by(event)

    def give_up(self, error: CollectiveError) -> None:
        """This rank itself cannot go on."""
        if self._abort is None:
            self._abort = error

    def lose_service(self, error: PeerLostError) -> None:
        """The service has gone, and with it all knowledge of what comes."""
        if self._service is None:
            self._service = error

    def failure(self, needed: Sequence[int]) -> CollectiveError | None:
        """Why what waits for the ranks ``needed`` will never succeed, or None while it may.

        Ranks that died without a word are the cause of what the others did then, so they are named first, and those
        that were lost first before others. Then comes what a rank said that gave up; ranks that left; the service.
        """
        wanted = set(needed)
        for death in self._died:
            if wanted.intersection(death.ranks) or self._rank in death.ranks:
                return self._death(death, [rank for rank in death.ranks if rank in wanted or death.silent])
        if self._abort is not None:
            return self._abort
        left = sorted(rank for rank in self._left if rank in wanted and rank != self._rank)
        if left:
            return left_error(format_ranks_by_host(left, self._left), left)
        return self._service

    def _death(self, death: RanksDied, ranks: Sequence[int]) -> PeerLostError:
        host = death.host
        if self._rank in death.ranks:
            reason = (
                f"this rank, {self._rank}, was given up by the others: nothing was heard of its host, {host}, for "
                f"{self._peer_timeout_seconds:g} s (REIGEN_PEER_TIMEOUT); was it suspended, or the network cut?"
            )
        elif death.silent:
            reason = (
                f"host {host} was lost, and rank(s) {format_ranks(ranks)} with it: nothing was heard of it for "
                f"{self._peer_timeout_seconds:g} s (REIGEN_PEER_TIMEOUT); it crashed, or the network to it is cut"
            )
        elif death.whole_host:
            reason = (
                f"host {host} was lost, or all its processes were killed: its rank(s) "
                f"{format_ranks(death.ranks)} died at "
                "once while others wait for them"
            )
        else:
            reason = f"rank(s) {format_ranks(ranks)} (host {host}) died while others wait for them"
        return PeerLostError(reason, ranks=death.ranks if death.whole_host else ranks)

    def _told_by(self, event: RankAborted) -> CollectiveError:
        return error_from_abort(
            event.abort, "" if event.rank == self._rank else f"rank {event.rank}, host {event.host}"
        )
