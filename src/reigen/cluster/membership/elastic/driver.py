"""Driver of an elastic member's state machine: its thread, timers, links and voter. See the package.

One lock guards the state machine. The driver's thread holds it while it handles an event and carries out what follows
from that; `ViewDriver.step_applied` holds it for one call, and leaves what follows to the driver's thread, which does
that before it handles anything else. So events and actions are in one order, as `views` demands, and a step costs no
change of threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Self

from reigen.cluster.membership.elastic.directory import ViewDirectory
from reigen.cluster.membership.elastic.links import MemberLinks
from reigen.cluster.membership.elastic.messages import (
    FinishNoted,
    LinkFrame,
    ProgramFinished,
    ToMember,
    ToVoter,
    VoterAnswer,
)
from reigen.cluster.membership.elastic.node import ElasticNode
from reigen.cluster.membership.elastic.plane import ViewPlane
from reigen.cluster.membership.views.candidate import CandidateAction, CandidateState, ElasticCandidate
from reigen.cluster.membership.views.events import (
    BuildLayouts,
    ChangeRequested,
    Copied,
    CopyStarted,
    EndProcess,
    Evidence,
    JoinView,
    KillMember,
    LayoutsBuilt,
    LeaveRequested,
    MemberAction,
    MemberEvent,
    PlaneRevoked,
    Received,
    RevokePlane,
    Rolled,
    RollTo,
    RunView,
    SendTo,
    StartTimer,
    StepApplied,
    TimerFired,
    UseFreshSegments,
    Verdict,
    ViewTimer,
)
from reigen.cluster.membership.views.member import ElasticMember, ElasticState, ViewTimeouts
from reigen.cluster.membership.views.messages import ViewDecided, ViewMessage
from reigen.cluster.membership.views.record import MemberId, View, VoterId
from reigen.net.event_loop import EventLoop, Timer
from reigen.net.fork_safety import close_in_children

if TYPE_CHECKING:
    from reigen.cluster.membership.rendezvous import Rendezvous

_log = logging.getLogger(__name__)

#: Where each epoch has memory of its own, nobody waits long for the end of a process that is killed.
DRIVER_TIMEOUTS = ViewTimeouts(stuck=10.0, kill=0.2)
#: How long `ViewDriver.finish` waits until the others know, and `ViewDriver.close` for the thread.
_FINISH_SECONDS, _CLOSE_SECONDS = 1.0, 5.0
#: Views in a row that this process could not build; one more ends it.
MAX_FAILED_VIEWS = 8
#: Where steps are run.
_STEPPING = {ElasticState.RUNNING, ElasticState.LEAVING}
#: Where the end of a member whose program is done asks for nothing.
_CALM = {ElasticState.RUNNING, ElasticState.LEAVING, ElasticState.WAITING}


class ViewDriver:
    """One process of an elastic job, from its first view, or from the lobby, until its end.

    Made by `start_first` or `start_candidate`. Its node is its own then. Methods may be called by any thread but the
    driver's, unless they say otherwise; none may be called with a lock held that the plane's methods take.

    Attributes:
        me: who this process is.
        finished: members whose programs are done, as they have said. Their ends begin no change; where one begins for
            another reason, they are left out.
        reason: why the latest change began, for the user; empty before the first.
    """

    @classmethod
    def start_first(
        cls, node: ElasticNode, view: View, plane: ViewPlane, rendezvous: Rendezvous, timeouts: ViewTimeouts
    ) -> Self:
        """Start as a member of the job's first view, which `meet_first_view` has made.

        `ViewPlane.build` is called for it at once, `ViewPlane.run` when all members have built it.

        Args:
            node: this process.
            view: the first view; this process is in it.
            plane: what is told.
            rendezvous: where rank 0 says which view runs; used by one other thread, so that nothing else waits for it.
            timeouts: see there; `DRIVER_TIMEOUTS`, with the user's.
        """

    @classmethod
    def start_candidate(
        cls, node: ElasticNode, plane: ViewPlane, rendezvous: Rendezvous, timeouts: ViewTimeouts
    ) -> Self:
        """Start as a process that wants to become a member: it looks for the members, and asks them.

        `ViewPlane.build` is called when a view has it, `ViewPlane.end` with 1 if none has after ``timeouts.wait``.
        Arguments as of `start_first`.
        """

    @property
    def view(self) -> View | None:
        """The latest view that this process knows to be decided; None: none yet."""

    @property
    def state(self) -> ElasticState | CandidateState:
        """Where this process is."""

    def step_applied(self, step: int, epoch: int | None = None) -> bool:
        """Say that this process has applied a step; returns when that is handled.

        Args:
            step: number of the step; it continues from the view's ``base.target``.
            epoch: the view in which it was made; None: the present one.

        Returns:
            True: a change begins, or has begun: this process must not go on in this view, and waits for
            `ViewPlane.run`.
        """

    def request_change(self, reason: str, epoch: int | None = None) -> None:
        """Have the members change to another view, perhaps of the same ones: something failed here.

        Args:
            reason: for the user, without a period.
            epoch: the view in which that was; nothing happens if it has passed. None: the present one.
        """

    def report(self, evidence: Evidence) -> None:
        """Say what is known of another member: that a collective waits for it in vain, say (`Verdict.STUCK`)."""

    def leave(self) -> None:
        """Leave in good order: at a step soon, by a change; `ViewPlane.end` is called with 0 then."""

    def finish(self) -> None:
        """Say that the program is done here; returns when all members know, or after a second.

        This process's end is no evidence of a death any more, and begins no change. It may be called twice. If a
        change begins while it is still there, it leaves. `close` comes next.
        """

    def close(self) -> None:
        """Stop the thread and close everything. May be called twice, and by any thread."""
