"""Agreement on one view among the voters of the view before it: single-decree Paxos. Pure.

L. Lamport, "Paxos Made Simple", 2001. One decree for each epoch: views change rarely, so there is no log. A voter that
has learned that a view was decided drops what it knew of the decision, and answers whoever comes late with the view.
"""

from __future__ import annotations

from typing import Self

import msgspec

from reigen.cluster.membership.views.messages import (
    AcceptView,
    Ballot,
    BallotPreempted,
    BehindView,
    PrepareView,
    ViewAccepted,
    ViewDecided,
    ViewPromise,
)
from reigen.cluster.membership.views.record import View, VoterId

VoterRequest = PrepareView | AcceptView | ViewDecided
VoterReply = ViewPromise | ViewAccepted | BallotPreempted | BehindView | ViewDecided


class Acceptor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Memory of a voter; it must be written (`encode_slot`) before the answer that comes with it is sent.

    Attributes:
        id: who it is; it votes in no view that has another incarnation of it.
        view: the latest that it knows to be decided; None: it came after the first.
        promised: it accepts nothing under a lower ballot as the view after ``view``.
        accepted, value: what it has accepted as that, and under which ballot.
    """

    id: VoterId
    view: View | None = None
    promised: Ballot | None = None
    accepted: Ballot | None = None
    value: View | None = None

    def handle(self, message: VoterRequest) -> tuple[Acceptor, VoterReply | None]:
        """Return the new state, which may be the same object, and what to answer, if anything."""
        if isinstance(message, ViewDecided):
            if self.view is None or message.epoch > self.view.epoch:
                return Acceptor(self.id, message.value), None
            return self, None
        if self.view is None or message.epoch > self.view.epoch + 1:
            return self, BehindView(message.epoch, 0 if self.view is None else self.view.epoch)
        # also without a vote: the answer shows a life in which it has one from the next view on
        if message.epoch <= self.view.epoch or self.id not in self.view.voters:
            return self, ViewDecided(self.view.epoch, self.view)
        if self.promised is not None and message.ballot < self.promised:
            return self, BallotPreempted(message.epoch, message.ballot, self.promised)
        voter = self.view.voters.index(self.id)
        if isinstance(message, PrepareView):
            promise = ViewPromise(message.epoch, message.ballot, voter, self.accepted, self.value)
            return msgspec.structs.replace(self, promised=message.ballot), promise
        accepting = Acceptor(self.id, self.view, message.ballot, message.ballot, message.value)
        return accepting, ViewAccepted(message.epoch, message.ballot, voter)


class Proposer(msgspec.Struct, frozen=True):
    """One attempt of a leader to have a view decided.

    Attributes:
        view: the one whose voters decide.
        ballot: of this attempt.
        promised_by: numbers of voters that have promised.
        accepted, adopted: the highest ballot under which one of these has accepted a view, and that view.
        proposed: the view that voters were asked to accept.
        accepted_by: numbers of voters that have accepted it.
        preempted: the highest ballot that a voter prefers; this attempt is over.
    """

    view: View
    ballot: Ballot
    promised_by: frozenset[int] = frozenset()
    accepted: Ballot | None = None
    adopted: View | None = None
    proposed: View | None = None
    accepted_by: frozenset[int] = frozenset()
    preempted: Ballot | None = None

    @property
    def epoch(self) -> int:
        """Number of the view that is to be decided."""
        return self.view.epoch + 1

    @property
    def may_propose(self) -> tuple[bool, str]:
        """Decide if a quorum has promised; and the reason."""
        return self.view.has_quorum(self.promised_by)

    @property
    def is_decided(self) -> bool:
        """True if a quorum has accepted the proposal."""
        return self.proposed is not None and self.view.has_quorum(self.accepted_by)[0]

    def request(self) -> PrepareView | AcceptView:
        """Make the message to all voters; it may be sent again."""
        if self.proposed is None:
            return PrepareView(self.epoch, self.ballot)
        return AcceptView(self.epoch, self.ballot, self.proposed)

    def propose(self, value: View | None) -> Self:
        """Return the state in which voters are asked to accept the adopted view, or else ``value``."""
        assert self.proposed is None, "an attempt has one proposal"
        proposed = self.adopted or value
        assert proposed is not None
        assert proposed.epoch == self.epoch, "a view follows the one before"
        return msgspec.structs.replace(self, proposed=proposed)

    def take(self, reply: ViewPromise | ViewAccepted | BallotPreempted) -> Self:
        """Return the state with a voter's answer; answers to other attempts are ignored."""
        if reply.epoch != self.epoch or reply.ballot != self.ballot:
            return self
        if isinstance(reply, BallotPreempted):
            return msgspec.structs.replace(self, preempted=max(reply.promised, self.preempted or reply.promised))
        if isinstance(reply, ViewAccepted):
            return msgspec.structs.replace(self, accepted_by=self.accepted_by | {reply.voter})
        if self.proposed is not None:  # late promises have no say
            return self
        promised_by = self.promised_by | {reply.voter}
        if reply.accepted is None or (self.accepted is not None and reply.accepted <= self.accepted):
            return msgspec.structs.replace(self, promised_by=promised_by)
        return msgspec.structs.replace(self, promised_by=promised_by, accepted=reply.accepted, adopted=reply.value)
