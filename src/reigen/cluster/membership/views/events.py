"""Events that a member of an elastic job takes in, and the actions that it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from reigen.cluster.membership.views.messages import StepProgress, ViewMessage
from reigen.cluster.membership.views.record import MemberId, View, VoterId

#: Exit code of a process that others have left behind in a view that has passed: temporary failure, as in sysexits.h.
FENCED_EXIT_CODE = 75


class Verdict(Enum):
    """Meaning of evidence about a member."""

    #: pidfd, the agent's word, a connection that its kernel has closed, the engine's word that the host is gone
    DEAD = "is dead"
    #: its host or the network is silent; it may run
    UNREACHABLE = "cannot be reached"
    #: it is alive and has not come until the deadline
    STUCK = "did not come until the deadline"


class ViewTimer(Enum):
    """Timers of a member. Each is there once: starting it again replaces it."""

    #: messages that may have been lost are sent again
    RETRY = "retry"
    #: who leads a change, or waits for others, takes them for stuck
    STUCK = "stuck"
    #: members that a collective has waited for until its deadline are taken for stuck if they are silent
    LATE = "late"
    #: another attempt of a leader that was preempted
    BACK_OFF = "back_off"
    #: who builds what a view needs says that it lives, and looks who has said so
    PROGRESS = "progress"
    #: killed processes of this host are not waited for any more
    KILL = "kill"
    #: the end of a change that finds no quorum
    CHANGE = "change"
    #: the end of waiting for more members
    WAIT = "wait"


# -- events ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """A message has come from a member, a candidate or a voter, by a connection that proves who it is."""

    sender: MemberId | VoterId
    message: ViewMessage


@dataclass(frozen=True, slots=True)
class Evidence:
    """Something is known about another member.

    Attributes:
        detail: how, for the user.
        is_hearsay: another member has said so; it may be that one that is cut off.
    """

    member: MemberId
    verdict: Verdict
    detail: str = ""
    is_hearsay: bool = False


@dataclass(frozen=True, slots=True)
class MembersLate:
    """A collective of the view ``epoch`` has waited for these members until its deadline.

    Their programs may only be slow. A change begins for another reason; who is silent then is stuck.
    """

    epoch: int
    members: tuple[MemberId, ...]


@dataclass(frozen=True, slots=True)
class PlaneRevoked:
    """`RevokePlane` is done: nothing is sent or written any more in that view."""

    epoch: int
    progress: StepProgress


@dataclass(frozen=True, slots=True)
class LayoutsBuilt:
    """`BuildLayouts` is done."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Rolled:
    """`RollTo` is done: this member has applied the view's ``base.target``, and nothing behind it."""

    epoch: int


@dataclass(frozen=True, slots=True)
class StepApplied:
    """A step was applied by this member."""

    step: int


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """Request to leave in good order: a notice, `job.leave()`."""


@dataclass(frozen=True, slots=True)
class ChangeRequested:
    """Request for a change by a member that cannot go on in the view ``epoch``: an engine gave up, a build failed.

    The next view may have the same members. ``reason`` is empty where a collective failed, and no more is known.
    """

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class CopyStarted:
    """A candidate is chosen to get the state; ``view`` is the members' one."""

    view: View


@dataclass(frozen=True, slots=True)
class Copied:
    """A candidate has the state of the stable step ``step``; ``matches``: its digest is that of the sources."""

    step: int
    matches: bool


@dataclass(frozen=True, slots=True)
class TimerFired:
    """A timer has ended."""

    timer: ViewTimer


MemberEvent = (
    Received
    | Evidence
    | MembersLate
    | PlaneRevoked
    | LayoutsBuilt
    | Rolled
    | StepApplied
    | LeaveRequested
    | ChangeRequested
    | CopyStarted
    | Copied
    | TimerFired
)

# -- actions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send a message; it may be lost."""

    receiver: MemberId | VoterId
    message: ViewMessage


@dataclass(frozen=True, slots=True)
class RevokePlane:
    """Stop collectives of this view, and the building of layouts; then `PlaneRevoked`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class KillMember:
    """SIGKILL for a process of this host, by its pidfd; its end is `Evidence`."""

    member: MemberId


@dataclass(frozen=True, slots=True)
class UseFreshSegments:
    """Take new memory, and unmap that which these processes have mapped: they do not die."""

    members: tuple[MemberId, ...]


@dataclass(frozen=True, slots=True)
class BuildLayouts:
    """Build connections, layouts and process sets of a view; then `LayoutsBuilt`."""

    view: View


@dataclass(frozen=True, slots=True)
class RollTo:
    """Bring this member's state to the view's ``base.target``, from others or by undoing a step; then `Rolled`."""

    view: View


@dataclass(frozen=True, slots=True)
class RunView:
    """Run steps in this view."""

    view: View


@dataclass(frozen=True, slots=True)
class StartTimer:
    """Start a timer; then `TimerFired`."""

    timer: ViewTimer
    seconds: float


@dataclass(frozen=True, slots=True)
class JoinView:
    """Make an `ElasticMember` of a candidate, with this view, and start it."""

    view: View


@dataclass(frozen=True, slots=True)
class EndProcess:
    """End this process within a second; with another code than 0 it touches no shared memory, and writes no checkpoint.

    With one exception: where the code is 1, a durable checkpoint of the latest stable step may be written.
    """

    exit_code: int
    reason: str


MemberAction = (
    SendTo | RevokePlane | KillMember | UseFreshSegments | BuildLayouts | RollTo | RunView | StartTimer | EndProcess
)
