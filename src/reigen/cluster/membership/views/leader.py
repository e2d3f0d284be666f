"""Leader of one change of views: it asks voters and members, and proposes the next view. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from reigen.cluster.membership.views.events import SendTo
from reigen.cluster.membership.views.messages import (
    AskMember,
    Ballot,
    BallotPreempted,
    MemberReady,
    MemberReport,
    ViewAccepted,
    ViewDecided,
    ViewPromise,
)
from reigen.cluster.membership.views.paxos import Proposer
from reigen.cluster.membership.views.planning import explain_lost_state, plan_view
from reigen.cluster.membership.views.record import MemberId, View


class ChangeLeader:
    """One attempt after the other to have the view decided that follows ``view``.

    Args:
        view: the one that ends.
        me: the member that leads.

    Attributes:
        proposer: the latest attempt.
        reports: of members that have answered.
        reason: why there is no decision yet, or what was proposed.
        backs_off: it waits to begin another attempt.
    """

    def __init__(self, view: View, me: MemberId) -> None:
        self._view, self._me = view, me
        self.proposer = Proposer(view, Ballot(1, view.ranks[me]))
        self.reports: dict[MemberId, MemberReport] = {}
        self.reason = ""
        self.backs_off = False

    @property
    def is_preempted(self) -> bool:
        """True if a voter prefers another attempt."""
        return self.proposer.preempted is not None

    def try_again(self) -> None:
        """Begin another attempt, with a ballot above all that are known."""
        preempted = self.proposer.preempted or self.proposer.ballot
        attempt = max(preempted.attempt, self.proposer.ballot.attempt) + 1
        self.proposer = Proposer(self._view, Ballot(attempt, self._view.ranks[self._me]))
        self.backs_off = False

    def requests(self) -> Iterator[SendTo]:
        """Yield what voters and members are asked and have not answered."""
        answered = self.proposer.promised_by if self.proposer.proposed is None else self.proposer.accepted_by
        request = self.proposer.request()
        for number, voter in enumerate(self._view.voters):
            if number not in answered:
                yield SendTo(voter, request)
        ask = AskMember(self.proposer.epoch, self._me)
        for member in self._view.members:
            if member != self._me and member not in self.reports:
                yield SendTo(member, ask)

    def take(self, reply: ViewPromise | ViewAccepted | BallotPreempted) -> None:
        """Take in a voter's answer."""
        self.proposer = self.proposer.take(reply)

    def missing(self, lost: Collection[MemberId]) -> list[MemberId]:
        """Return members that have not reported, and of which nothing speaks against it."""
        return [member for member in self._view.members if member not in self.reports and member not in lost]

    @property
    def _is_free(self) -> bool:
        """True if this leader may propose a view of its own, and has proposed none."""
        return self.proposer.proposed is None and self.proposer.may_propose[0] and self.proposer.adopted is None

    def explain_lost_state(self, dead: Collection[MemberId]) -> str:
        """Return why no view can follow, because all holders of the state are dead; empty: one may."""
        return explain_lost_state(self._view, self.reports, dead) if self._is_free else ""

    def is_abandoned(self, dead: Collection[MemberId]) -> bool:
        """Return whether no view can follow, because every member leaves, but for the dead; nothing was proposed."""
        if not self._is_free:
            return False
        leaving = {member for member, report in self.reports.items() if report.is_leaving}
        return all(member in leaving or member in dead for member in self._view.members)

    def advance(
        self,
        lost: Collection[MemberId],
        candidates: Mapping[MemberId, MemberReady],
        voter_lives: Mapping[str, int],
    ) -> Iterator[SendTo]:
        """Propose as soon as that is possible; yields what to send to voters then.

        Args:
            lost: members and candidates that are not to be in the next view.
            candidates: processes that want to be in it.
            voter_lives: see `plan_view`.
        """
        if self.proposer.proposed is not None or self.is_preempted:
            return
        may_propose, self.reason = self.proposer.may_propose
        if not may_propose:
            return
        value = None
        if self.proposer.adopted is None:
            if waiting := self.missing(lost):
                ranks = ", ".join(str(self._view.ranks[member]) for member in waiting)
                self.reason = f"rank(s) {ranks} have not said how far they are"
                return
            ready = [candidate for _, candidate in sorted(candidates.items())]
            value, self.reason = plan_view(self._view, self.reports, ready, lost, voter_lives)
            if value is None:
                return
        self.proposer = self.proposer.propose(value)
        yield from self.requests()

    def announcements(self, decided: View) -> Iterator[SendTo]:
        """Yield the decision for members and voters of both views."""
        message = ViewDecided(decided.epoch, decided)
        for member in dict.fromkeys((*self._view.members, *decided.members)):
            if member != self._me:
                yield SendTo(member, message)
        # the witness learns of views in which it does not vote, too
        witness = () if decided.witness is None else (decided.witness.voter,)
        for voter in dict.fromkeys((*self._view.voters, *decided.voters, *witness)):
            yield SendTo(voter, message)
