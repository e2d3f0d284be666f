"""Messages by which members and voters of an elastic job agree on the next view.

The protocol, for the change from view e to view e + 1; `reigen.cluster.membership.views` says how it is used:

a. A member that sees evidence, or reaches a step at which somebody joins or leaves, stops its plane and sends Revoke to
   all others, who do the same. It sends nothing in e any more.
b. The leader, the lowest rank of e that is not known to be lost, sends Prepare to the voters of e, and Ask to members.
c. A voter answers with Promise, and what it has accepted; or with Preempted, if it has promised a higher ballot. A
   member answers with Report: what it has applied, and which sums it holds.
d. With a quorum of promises and a report of each member that it keeps, the leader sends Accept with the value that was
   accepted under the highest ballot, or else its own. Voters answer with Accepted.
e. When a quorum has accepted, the view is decided. The leader sends Decided to its members, to those that it leaves
   behind, and to the voters of both views. Whoever gets a message of a view that has passed answers with Decided, too.
f. A member of e + 1 builds its layouts, and sends Installed to rank 0 of e + 1, which sends Go when all have. No step
   is run before that, so none has begun anywhere before all members are there. A failure starts the next change.
   Building may take long. So whoever builds sends Building to rank 0 now and then, and rank 0 to all others: who is
   silent is taken for stuck long before one that is slow. So is it in d: a member in which an update of the weights has
   begun cannot report before that is over. When it is asked again it sends Building, and the leader to all others.
g. Who is asked about a view that it does not know answers with Behind, and is sent Decided.
h. A process that wants to become a member, and has a copy of the state, sends Ready. Rank 0 names a step at which the
   members stop for it (ChangeAt). A member that wants to leave names one itself. Who has applied that step runs no
   other one, and sends Reached to rank 0. Only when all have, rank 0 begins with a: what comes of the last step still
   travels where it must, and nobody is cut off in the middle of it.
i. Where every member leaves there is no next view: the leader says so (AllLeave), and all end. So it is where all are
   dead who held the state (StateLost). As long as one of these is only silent, it is waited for.
j. Where members are too few for a step they wait for others, all of them as long as the one that has waited longest: it
   says so (WaitOver), and who has come since ends with it; who is still building that view, when it would wait. The
   time is counted from the change that ended the steps.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from reigen.cluster.membership.messages import Count
from reigen.cluster.membership.views.record import MemberId, SamplePosition, View, ViewHost
from reigen.net.codec import MessageCodec

#: A view is the largest; with more than 1,024 ranks there is still room.
MAX_VIEW_MESSAGE_BYTES = 1 << 20


class Ballot(NamedTuple):
    """Number of an attempt to decide, higher ones win; no two leaders use the same one.

    Attributes:
        attempt: grows with each of a leader's attempts.
        rank: the leader's, in the view that decides.
    """

    attempt: int
    rank: int


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Message about the view ``epoch`` that is to be decided, or was."""

    epoch: Count


class PrepareView(_Message, frozen=True, tag=1):
    """Request to a voter to promise not to accept anything under a lower ballot."""

    ballot: Ballot


class ViewPromise(_Message, frozen=True, tag=2):
    """Promise of a voter, with the view that it has accepted, if any."""

    ballot: Ballot
    voter: Count
    accepted: Ballot | None = None
    value: View | None = None


class AcceptView(_Message, frozen=True, tag=3):
    """Request to a voter to accept a view."""

    ballot: Ballot
    value: View


class ViewAccepted(_Message, frozen=True, tag=4):
    """Acceptance of a voter."""

    ballot: Ballot
    voter: Count


class BallotPreempted(_Message, frozen=True, tag=5):
    """Refusal of a voter, which has promised a higher ballot."""

    ballot: Ballot
    promised: Ballot


class ViewDecided(_Message, frozen=True, tag=6):
    """A view that was decided: to its members the order to install it, to others the end of their membership."""

    value: View


class BehindView(_Message, frozen=True, tag=7):
    """Answer of one who knows no view before ``epoch``; the latest that it knows is ``known``, 0: none."""

    known: Count


class HeldSums(NamedTuple):
    """Sums of buckets that a member holds, of the step behind the latest that it has applied.

    Attributes:
        epoch: view in which they were made.
        buckets: their numbers.
        num_buckets: how many a step has.
    """

    epoch: int
    buckets: tuple[int, ...] = ()
    num_buckets: int = 1


class StepProgress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """State of a member that has stopped its plane.

    Attributes:
        applied: the latest step that it has applied.
        cursor: place in the samples behind that step.
        next_cursor: place behind the following step, if it has begun it.
        held: sums of the following step.
    """

    applied: Count
    cursor: SamplePosition
    next_cursor: SamplePosition
    held: HeldSums


class AskMember(_Message, frozen=True, tag=8):
    """Question of a leader to a member of the view before ``epoch``: how far it is."""

    leader: MemberId


class MemberReport(_Message, frozen=True, tag=9):
    """Answer: a member that says this has sent its last frame of the view before ``epoch``.

    Attributes:
        member: who says so.
        progress: how far it is.
        dead: members of which it has evidence that they are dead.
        unreachable: members that it cannot reach itself.
        is_leaving: it wants to be left out.
    """

    member: MemberId
    progress: StepProgress
    dead: tuple[MemberId, ...] = ()
    unreachable: tuple[MemberId, ...] = ()
    is_leaving: bool = False


class RevokeView(_Message, frozen=True, tag=10):
    """The plane of view ``epoch`` is stopped; ``lost``: members that are the cause."""

    lost: tuple[MemberId, ...] = ()


class ViewInstalled(_Message, frozen=True, tag=11):
    """A member has built what view ``epoch`` needs."""

    member: MemberId


class ViewGo(_Message, frozen=True, tag=12):
    """All members of view ``epoch`` have installed it."""


class ChangeAt(_Message, frozen=True, tag=13):
    """Members of view ``epoch`` stop for a change when they have applied ``step``; the earliest one counts.

    Attributes:
        step: where they stop.
        leaving: the member that leaves then, if one does.
    """

    step: Count
    leaving: MemberId | None = None


class StepReached(_Message, frozen=True, tag=15):
    """A member of view ``epoch`` has applied ``step``, at which all stop, and has stopped.

    Attributes:
        step: see `ChangeAt`.
        member: the one that has stopped.
    """

    step: Count
    member: MemberId


class MemberReady(_Message, frozen=True, tag=14):
    """A process that wants to be a member has the state of ``applied``, equal to the members' by its digest.

    Attributes:
        epoch: the latest view that it knows.
        host: the host with this member alone.
        applied: the step of its state, which was stable.
        unreached: hosts of that view of which it has heard no member; a member of one of them answers.
    """

    host: ViewHost
    applied: Count
    unreached: tuple[str, ...] = ()


class AllLeave(_Message, frozen=True, tag=20):
    """Every member of the view before ``epoch`` that lives has said that it leaves: there is no view ``epoch``."""


class StateLost(_Message, frozen=True, tag=22):
    """No member of the view before ``epoch`` is left that holds the state: there is no view ``epoch``.

    Attributes:
        reason: for the user.
    """

    reason: str


class WaitOver(_Message, frozen=True, tag=23):
    """View ``epoch`` has too few members, and one of them has waited for others as long as it may.

    Attributes:
        reason: for the user.
    """

    reason: str


class ViewBuilding(_Message, frozen=True, tag=21):
    """A member lives, and builds what view ``epoch`` needs, or ends an update in it; or it waits for those that do."""

    member: MemberId


ViewMessage = (
    PrepareView
    | ViewPromise
    | AcceptView
    | ViewAccepted
    | BallotPreempted
    | ViewDecided
    | BehindView
    | AskMember
    | MemberReport
    | RevokeView
    | ViewInstalled
    | ViewGo
    | ChangeAt
    | MemberReady
    | StepReached
    | AllLeave
    | StateLost
    | WaitOver
    | ViewBuilding
)
#: Every message of this protocol.
VIEW_CODEC: MessageCodec[ViewMessage] = MessageCodec(ViewMessage, MAX_VIEW_MESSAGE_BYTES)
