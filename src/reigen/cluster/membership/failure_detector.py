"""Failure detection over several hosts: deaths seen on this one, and news of the control service."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from reigen.cluster.local_peers import LocalPeers
from reigen.cluster.membership.abort_message import has_left
from reigen.cluster.membership.client import MembershipClient
from reigen.errors import CollectiveError, PeerLostError, format_ranks

#: A connection that has ended is explained by the control service within this time, or never.
_EXPLANATION_SECONDS = 1.0


class FailureDetector:
    """`reigen.engine.transport.PeerMonitor` over several hosts. Ranks are numbers in the job.

    Args:
        membership: this rank's connection to the control service.
        local_peers: the ranks of this host; None if there is no other.
        lost: ranks whose connection for control messages has ended, and how; somebody else writes it.
    """

    def __init__(self, membership: MembershipClient, local_peers: LocalPeers | None, lost: Mapping[int, str]) -> None:
        self._membership = membership
        self._local_peers = local_peers
        self._monitors: list[LocalPeers | MembershipClient]
        self._monitors = [membership] if local_peers is None else [local_peers, membership]
        self._lost = lost
        #: when the first connection was seen to have ended
        self._lost_at: float | None = None

    def failure(self, needed: Sequence[int]) -> CollectiveError | None:
        """Return why waiting for these ranks will never succeed, or None while it may.

        A death on this host is seen at once, others when the service tells. A connection that ended without either is
        a failure by itself, a moment later. What comes from other hosts is told on this one: a rank that waits for one
        that is about to leave because of it must not take that for the cause.

        That a rank has left in good order is none while it is connected. The service may tell it before things arrive
        that were said earlier: on the connections for control messages, goodbyes come in their turn.
        """
        error = self.exit_error(needed)
        if has_left(error) and self._lost.keys().isdisjoint(error.ranks):
            return self._unexplained(needed)
        return error

    def exit_error(self, needed: Sequence[int]) -> CollectiveError | None:
        """Return the same for callers that see by themselves whether more comes: ranks that have left count, too."""
        local_error: CollectiveError | None = None
        if self._local_peers is not None:
            local = self._local_peers.ranks
            local_error = self._local_peers.failure([local.index(rank) for rank in needed if rank in local])
        if local_error is not None and not has_left(local_error):
            return local_error
        remote_error = self._membership.failure(needed) or self._unexplained(needed)
        if remote_error is not None and not has_left(remote_error) and self._local_peers is not None:
            self._local_peers.abort(remote_error)
        return local_error if remote_error is None else remote_error

    def linger(self, ranks: Sequence[int], over: Callable[[], bool] = lambda: False) -> None:
        """Give ranks that are lost a moment to end, unless it is ``over``."""
        elsewhere = list(ranks)
        if self._local_peers is not None:
            self._local_peers.linger(ranks, over)
            elsewhere = [rank for rank in ranks if rank not in self._local_peers.ranks]
        if elsewhere:
            self._membership.linger(elsewhere, over)

    def abort(self, error: CollectiveError) -> None:
        """Tell the others that this rank cannot go on, and why; the first call counts."""
        for each in self._monitors:
            each.abort(error)

    def leave(self) -> None:
        """Tell the others that this rank is going in good order."""
        for each in self._monitors:
            each.leave()

    def close(self) -> None:
        """Close both watches."""
        for each in reversed(self._monitors):
            each.close()

    def _unexplained(self, needed: Sequence[int]) -> CollectiveError | None:
        ended = sorted(rank for rank in self._lost if rank in needed)
        if not ended:
            return None
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
        if now < self._lost_at + _EXPLANATION_SECONDS:
            return None
        return PeerLostError(
            f"the connection for control messages to rank(s) {format_ranks(ended)} broke ({self._lost[ended[0]]})",
            ranks=ended,
        )
