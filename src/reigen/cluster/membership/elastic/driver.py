"""Driver of an elastic member's state machine: its thread, timers, links and voter. See the package.

One lock guards the state machine. The driver's thread holds it while it handles an event and carries out what follows
from that; `ViewDriver.step_applied` holds it for one call, and leaves what follows to the driver's thread, which does
that before it handles anything else. So events and actions are in one order, as `views` demands, and a step costs no
change of threads.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from reigen.cluster.membership.elastic.build_failures import MAX_OTHERS_FAILURES
from reigen.cluster.membership.elastic.directory import ViewDirectory
from reigen.cluster.membership.elastic.links import LIMIT_ERRNOS, MemberLinks, first_reachable
from reigen.cluster.membership.elastic.messages import (
    FinishNoted,
    LinkFrame,
    ProgramFinished,
    StepTimes,
    ToMember,
    ToVoter,
    VoterAnswer,
    VoterReply,
    VoterRequest,
)
from reigen.cluster.membership.elastic.node import ElasticNode
from reigen.cluster.membership.elastic.plane import ViewPlane
from reigen.cluster.membership.elastic.straggler_reports import StragglerReports
from reigen.cluster.membership.elastic.witness import WITNESS_NAME, WitnessThread
from reigen.cluster.membership.stragglers import DEFAULT_STRAGGLER_RULE, StragglerRule
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
    MembersLate,
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
from reigen.cluster.membership.views.history import MAX_REASON, ChangeNote, ChangeReason, StepOutcome
from reigen.cluster.membership.views.member import ALL_LEFT_REASON, ElasticMember, ElasticState, ViewTimeouts
from reigen.cluster.membership.views.messages import (
    AskMember,
    ChangeAt,
    MemberReady,
    RevokeView,
    ViewDecided,
    ViewMessage,
)
from reigen.cluster.membership.views.record import MemberId, View, ViewHost, VoterId
from reigen.errors import AuthenticationError, ReigenError, format_ranks
from reigen.net.event_loop import EventLoop, Timer
from reigen.net.fork_safety import close_in_children

if TYPE_CHECKING:
    from reigen.cluster.membership.rendezvous import Rendezvous

_log = logging.getLogger(__name__)

#: Where each epoch has memory of its own, nobody waits long for the end of a process that is killed.
DRIVER_TIMEOUTS = ViewTimeouts(stuck=10.0, kill=0.2)
#: How long `ViewDriver.finish` waits until the others know, and `ViewDriver.close` for the thread.
_FINISH_SECONDS, _CLOSE_SECONDS = 1.0, 5.0
#: Of a grace, how much is left when others wait no longer for the step at which this process was to leave.
_LAST_SECONDS, _LAST_SHARE = 1.0, 0.25
#: Views in a row that this process could not begin to run; one more ends it. Whoever is at fault has ended by then.
MAX_FAILED_VIEWS = MAX_OTHERS_FAILURES + 4
#: Members of another host that are asked for its voter's answer at once; any of them has it.
NUM_WAYS_TO_VOTER = 2
#: Reason of a change for which all stop behind one step.
PLANNED_REASON = "processes come or leave"
#: Reason where no more is known here.
_ANY_FAILURE = "a collective failed"
#: Where steps are run.
_STEPPING = {ElasticState.RUNNING, ElasticState.LEAVING}
#: Where the end of a member whose program is done asks for nothing.
_CALM = {ElasticState.RUNNING, ElasticState.LEAVING, ElasticState.WAITING}


class ViewDriver:
    """One process of an elastic job, from its first view, or from the lobby, until its end.

    It is started by `begin` or `wait_for_view`, and ended by `close`; it closes its node. Methods may be called by any
    thread, and never with a lock held that the plane's methods take.

    Args:
        node: this process.
        plane: its collectives; methods of it may be called before `begin` and its like have returned.
        rendezvous: where rank 0 says which view runs; used by one other thread, so that nothing else waits for it.
            Stays the caller's, and is closed after the driver.
        timeouts: see there; `DRIVER_TIMEOUTS`, with the user's.
        straggler_rule: who is one.

    Attributes:
        me: who this process is.
        finished: members whose programs are done, as they have said. Their ends begin no change; where one begins for
            another reason, they are left out.
        cause: why the latest change began; its text is empty before the first.
        is_leaving: this process leaves the job, or has left it.
        launcher_knows: is set when the launcher has been told so.
        stragglers: is told how long steps take here.
        directory: this process's use of the rendezvous.
        note: what this process has told of the latest change, as rank 0 of the view behind it; None: nothing yet.
        is_planned: the latest change was one for which all had stopped behind one step (`ElasticMember.is_planned`).
        tells_outcomes: the program tells in each view what became of its step (`ChangeNote.outcome`).
    """

    def __init__(
        self,
        node: ElasticNode,
        plane: ViewPlane,
        rendezvous: Rendezvous,
        timeouts: ViewTimeouts = DRIVER_TIMEOUTS,
        straggler_rule: StragglerRule = DEFAULT_STRAGGLER_RULE,
    ) -> None:
        self.me = node.me
        self.finished: frozenset[MemberId] = frozenset()
        self.is_leaving = self.is_planned = False
        self.note: ChangeNote | None = None
        self.tells_outcomes = False
        self._node, self._plane, self._timeouts = node, plane, timeouts
        self._loop = EventLoop()
        self._links = MemberLinks(self._loop, node, self)
        self._witness = None if node.witness is None else WitnessThread(node.witness, self._on_witness)
        self.directory = ViewDirectory(rendezvous, lambda: node.voter.page.launcher)
        self.stragglers = StragglerReports(
            self.me, straggler_rule, self._post, self._links.send, self.directory.tell_straggler
        )
        self._thread = threading.Thread(target=self._serve, name="reigen-views", daemon=True)
        #: guards all that follows, but `_posted`
        self._lock = threading.RLock()
        card = node.card()
        self._machine: ElasticMember | ElasticCandidate = ElasticCandidate(self.me, card, timeouts.retry)
        self._view: View | None = None
        #: hosts of the present view and the one before, and this one, by name: ways to their voters
        self._hosts: dict[str, ViewHost] = {node.host: card}
        #: processes that want to become members, by the names of their hosts: ways to voters whose members are dead
        self._candidates: dict[MemberId, str] = {}
        self._timers: dict[ViewTimer, Timer] = {}
        #: what is to be done, before the next event; events; what other threads want to be done
        self._actions: deque[MemberAction | CandidateAction] = deque()
        self._events: deque[MemberEvent] = deque()
        self._posted: deque[Callable[[], None]] = deque()
        #: actions are being carried out: what happens meanwhile is taken in afterwards
        self._is_working = False
        #: the end of members whose programs are done, as long as no change needs to know
        self._held: dict[MemberId, Evidence] = {}
        #: this process's program is done; who does not know yet
        self._is_finished = False
        self._unaware: set[MemberId] = set()
        self._all_know = threading.Event()
        self._num_failed_views = 0
        #: why the latest change began, and when
        self.cause = ChangeReason()
        self._revoked_at: float | None = None
        #: the launcher has heard from here what is done again when a view runs, and none has run since
        self._is_outcome_announced = False
        self.launcher_knows = threading.Event()
        #: of a candidate: it may be a member
        self._is_ready = True
        self._required_size = 1
        #: why the voter has not answered at last
        self._voter_problem = ""
        self._has_ended = self._is_closed = False
        close_in_children(self)

    def begin(self, view: View) -> None:
        """Start as a member of the job's first view, which `meet_first_view` has made.

        `ViewPlane.build` is called for it at once, `ViewPlane.run` when all members have built it.

        Args:
            view: the first view; this process is in it.
        """
        self._post(partial(self._join, view))
        self._thread.start()

    def wait_for_view(self, *, is_ready: bool = True) -> None:
        """Start as a process that wants to become a member: it looks for the members, and asks them.

        `ViewPlane.build` is called when a view has it, `ViewPlane.end` with 1 if none has after ``timeouts.wait``.

        Args:
            is_ready: it may be a member at once; otherwise it only looks for the members, until `be_ready`.
        """
        self._is_ready = is_ready
        self._post(self._look_for_view)
        self._thread.start()

    def be_ready(self) -> None:
        """Ask the members to be one of them. A second call does nothing."""
        self._is_ready = True
        self._post(lambda: self._dispatch(Copied(0, matches=True)))  # it gets the state behind the change

    @property
    def view(self) -> View | None:
        """The latest view that this process knows to be decided; None: none yet."""
        return self._view

    @property
    def lost(self) -> frozenset[MemberId]:
        """Members of the present view that are known, or said, to be lost; for methods of the plane."""
        return frozenset(self._machine.lost) if isinstance(self._machine, ElasticMember) else frozenset()

    @property
    def state(self) -> ElasticState | CandidateState:
        """State of this process."""
        return self._machine.state

    def step_applied(self, step: int, epoch: int | None = None) -> bool:
        """Say that this process has applied a step; returns when that is handled.

        Args:
            step: number of the step; it continues from the view's ``base.target``.
            epoch: the view in which it was made; None: the present one.

        Returns:
            True: a change begins, or has begun: this process must not go on in this view, and waits for
            `ViewPlane.run`.
        """
        with self._lock:
            machine = self._machine
            if self._has_ended or self._is_closed or not isinstance(machine, ElasticMember):
                return True
            if machine.state not in _STEPPING or epoch not in {None, machine.view.epoch}:
                return True
            actions = machine.handle(StepApplied(step))
            self._actions.extend(actions)
            is_over = machine.state not in _STEPPING  # a moment later it may run the next view
            if is_over:
                self.cause = explain_change(machine.view, self.me, StepApplied(step))
        if actions:
            self._loop.wake()
        return is_over

    def request_change(self, reason: str, epoch: int | None = None) -> None:
        """Have the members change to another view, perhaps of the same ones: something failed here.

        A process that asks for it more than `MAX_FAILED_VIEWS` times before any view runs is ended.

        Args:
            reason: for the user, without a period; empty: a collective failed, and others may know why.
            epoch: the view in which that was; nothing happens if it has passed. None: the present one.
        """
        view = self._view
        if view is not None:
            self._post(partial(self._on_request, ChangeRequested(view.epoch if epoch is None else epoch, reason)))

    def require_size(self, size: int) -> None:
        """Have this process run steps only in views of so many members; all members do that alike.

        The present view is changed if it has fewer.
        """
        with self._lock:
            self._required_size = size
            if isinstance(self._machine, ElasticMember):
                self._machine.required_size = size
        if self._view is not None and self._view.size < size:
            self.request_change(f"the program needs {size} members")

    def report(self, evidence: Evidence | MembersLate) -> None:
        """Give evidence about other members.

        Of those that are late, who is stopped is left out at once, and who does not answer in the next change. Others
        may only be slow.
        """
        handle = self._on_late if isinstance(evidence, MembersLate) else self.on_evidence
        self._post(partial(handle, evidence))  # type: ignore[arg-type]  # each takes what it is chosen for

    def leave(self, grace_seconds: float = 10.0, *, at_once: bool = False) -> None:
        """Leave in good order: at a step soon, by a change; `ViewPlane.end` is called with 0 then.

        May be called by a signal handler. A second call does nothing.

        Args:
            grace_seconds: then this process ends anyway: no step was made, or no change was decided.
            at_once: do not wait for a step: the others undo the one that is under way.
        """
        self._post(partial(self._begin_leaving, grace_seconds, at_once=at_once))

    @property
    def all_leave(self) -> bool:
        """True if this process has left together with all other members."""
        return self._machine.state is ElasticState.GONE and self._machine.reason == ALL_LEFT_REASON

    def finish(self) -> None:
        """Say that the program is done here; returns when all members know, or after a second.

        This process's end is no evidence of a death any more, and begins no change. It may be called twice. If a
        change begins while it is still there, it leaves. `close` comes next.
        """
        until = time.monotonic() + _FINISH_SECONDS
        if not self._is_finished:
            is_public = threading.Event()
            self._node.voter.page.write_finished(self.me.slot)
            self.directory.tell_finished(self.me, is_public.set)
            self._post(self._begin_finish)
            self._all_know.wait(_FINISH_SECONDS)
            is_public.wait(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Stop the thread and close everything. May be called twice, and by any thread."""
        self._is_closed = True
        self._loop.wake()
        if self._thread.ident is None:  # it was never started
            self._release()
        elif self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def close_descriptors(self) -> None:
        """Close the loop only; see `reigen.net.fork_safety`."""
        self._loop.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                with self._lock:
                    self._work()
                self._loop.wait()
        except Exception as error:  # noqa: BLE001  a thread's last word
            self._fail(error)
        finally:
            self._release()

    def _release(self) -> None:
        with self._lock:  # a thread of the program may carry out actions
            self._has_ended = True
        self._all_know.set()
        self._links.close()
        self._node.close()
        self._loop.close()
        self.directory.close()
        if self._witness is not None:
            self._witness.close()

    def _post(self, job: Callable[[], None]) -> None:
        """Have the thread do something, by any thread."""
        self._posted.append(job)
        self._loop.wake()

    def _dispatch(self, *events: MemberEvent) -> None:
        """Take in events; by the thread."""
        with self._lock:
            if not self._has_ended:
                self._events.extend(events)
            if not self._is_working:
                self._work()

    def _work(self) -> None:
        """Carry out actions, then handle events, until there are none."""
        self._is_working = True
        try:
            while not self._has_ended:
                if self._actions:
                    self._carry(self._actions.popleft())
                elif self._events:
                    self._handle(self._events.popleft())
                elif self._posted:
                    self._posted.popleft()()
                else:
                    return
        except Exception as error:  # noqa: BLE001  of the plane: not to be taken for one of a link
            self._fail(error)
        finally:
            self._is_working = False

    def _fail(self, error: Exception) -> None:
        """End this process because of a limit, or a bug, of ours or of the plane's: the others go on without it."""
        if isinstance(error, OSError) and error.errno in LIMIT_ERRNOS:
            self._end(1, f"it cannot connect to other processes of its elastic job: {error.strerror}")
            return
        _log.error("the driver of an elastic member has failed", exc_info=error)
        self._end(1, f"the driver of process {tuple(self.me)} of an elastic job has failed: {error!r}")

    def _handle(self, event: MemberEvent) -> None:
        before = self._machine.state
        if isinstance(self._machine, ElasticMember):
            self._machine.is_ending = self._is_finished or bool(self.finished)
        self._actions.extend(self._machine.handle(event))
        self._look_at_view()
        is_changed = self._machine.state is not before and self._machine.state not in _CALM
        if self._view is not None and (
            (is_changed and before in _CALM)
            or (is_changed and before is ElasticState.PAUSED and not belongs_to_stop(event))
            or (before is ElasticState.CHANGING and self.cause.is_hearsay and isinstance(event, Evidence))
        ):
            is_waiting = before is ElasticState.WAITING
            self.cause = explain_change(self._view, self.me, event, is_waiting=is_waiting)
        if is_changed:
            self._take_in_finished(event)

    def _look_at_view(self, *, joins: bool = False) -> None:
        """Take in a view of which the state machine has just learned, before anything is sent because of it."""
        view = self._machine.view
        if view is None or (view is self._view and not joins):
            return
        is_member = isinstance(self._machine, ElasticMember)
        self.is_planned = isinstance(self._machine, ElasticMember) and self._machine.is_planned
        old, self._view = self._view, view
        self._hosts = {self._node.host: self._node.card()}
        self._candidates = {each: name for each, name in self._candidates.items() if each in self._links.linked}
        for each in (*(() if old is None else old.hosts), *view.hosts):
            self._hosts[each.name] = each
        self._links.enter(view, is_member=is_member)
        if is_member:
            self._vote(ViewDecided(view.epoch, view))
            dead = [Evidence(member, Verdict.DEAD, detail) for member, detail in self._links.dead().items()]
            self._events.extend(each for each in dead if each.member in view.ranks)

    # -- actions ------------------------------------------------------------------------------------------------------

    def _carry(self, action: MemberAction | CandidateAction) -> None:  # noqa: C901  one table
        match action:
            case SendTo(receiver, message):
                self._send(receiver, message)
            case StartTimer(timer, seconds):
                if timer in self._timers:
                    self._timers[timer].cancel()
                due = time.monotonic() + seconds
                self._timers[timer] = self._loop.call_at(due, partial(self._dispatch, TimerFired(timer)))
            case RevokePlane(epoch):
                self._revoked_at = self._revoked_at or time.monotonic()
                self._plane.revoke(
                    epoch, lambda progress: self._post(partial(self._dispatch, PlaneRevoked(epoch, progress)))
                )
            case KillMember(member):
                self._links.kill(member)
            case UseFreshSegments(members):
                _log.debug("%s do not die; each view has memory of its own", members)
            case BuildLayouts(view):
                self._plane.build(view, partial(self._post, partial(self._dispatch, LayoutsBuilt(view.epoch))))
            case RollTo(view):
                if view.ranks[self.me] == 0:
                    self._announce(view)
                self._plane.roll(view, partial(self._post, partial(self._dispatch, Rolled(view.epoch))))
            case RunView(view):
                self._num_failed_views, self._revoked_at, self._is_outcome_announced = 0, None, False
                self.stragglers.enter(view, max(view.min_size, self._required_size))
                self._plane.run(view)
            case JoinView(view):
                self._join(view)
            case EndProcess(exit_code, reason):
                self._end(exit_code, reason)

    def _join(self, view: View) -> None:
        """Become a member."""
        self._machine = ElasticMember(self.me, view, self._timeouts)
        self._machine.required_size = self._required_size
        self._look_at_view(joins=True)
        self._actions.extend(self._machine.start())

    def _end(self, exit_code: int, reason: str) -> None:
        with self._lock:
            if not self._has_ended:
                self._has_ended = True
                self._all_know.set()
                self._plane.end(exit_code, reason)

    def _send(self, receiver: MemberId | VoterId, message: ViewMessage) -> None:
        if isinstance(receiver, MemberId):
            self._links.send(receiver, ToMember(message))
            return
        assert isinstance(message, VoterRequest), "voters are asked nothing else"
        if receiver.name == self._node.host:
            self._vote(message)
            return
        if receiver.name == WITNESS_NAME:
            if self._witness is not None:
                self._witness.ask(message)
            return
        host = self._hosts.get(receiver.name)
        members = [] if host is None else [each.id for each in host.members]
        members += [each for each, name in self._candidates.items() if name == receiver.name and each not in members]
        alive = [each for each in members if each not in self._links.dead()]
        for member in first_reachable(alive, self._links.linked)[:NUM_WAYS_TO_VOTER]:
            self._links.send(member, ToVoter(receiver, message))

    def _announce(self, view: View) -> None:
        """Tell the launcher and the witness of a view, as its rank 0."""
        if self._revoked_at is not None:
            seconds = time.monotonic() - self._revoked_at
            is_planned = self.is_planned or self._is_outcome_announced
            outcome = first_outcome(is_planned=is_planned, tells_outcomes=self.tells_outcomes)
            self._is_outcome_announced = self._is_outcome_announced or outcome is StepOutcome.COMMIT
            least = max(view.min_size, self._required_size)
            self.note = make_note(view.epoch, self.cause, seconds, outcome, least)
            self.directory.tell_change(self.note)
        self.directory.announce(view)
        if view.witness is not None:
            self._send(view.witness.voter, ViewDecided(view.epoch, view))

    def _on_witness(self, voter: VoterId, reply: VoterReply) -> None:
        """Take an answer of the witness, by its thread."""
        self._post(partial(self._dispatch, Received(voter, reply)))

    # -- voting -------------------------------------------------------------------------------------------------------

    def _vote(self, message: VoterRequest, asked_by: MemberId | None = None) -> None:
        """Have this host's voter answer a member; None: this one."""
        try:
            reply = self._node.voter.handle(message)
        except (ReigenError, OSError) as error:
            if str(error) != self._voter_problem:  # it is asked again and again
                self._voter_problem = str(error)
                _log.warning("the voter of host %s does not answer: %s", self._node.host, error)
            return
        if reply is None:
            return
        if asked_by is None:
            self._events.append(Received(self._node.voter.id, reply))
        else:
            self._links.send(asked_by, VoterAnswer(self._node.voter.id, reply))

    # -- what comes by links ------------------------------------------------------------------------------------------

    def on_frame(self, sender: MemberId, frame: LinkFrame) -> None:
        """Take a frame of another process; see `LinkOwner`."""
        with self._lock:
            match frame:
                case ToMember(message):
                    if isinstance(message, MemberReady):
                        self._candidates[sender] = message.host.name
                    self._dispatch(Received(sender, message))
                    if isinstance(message, RevokeView) and self._view is not None and self._view.epoch == message.epoch:
                        for evidence in self._links.find_stopped(message.lost, "another member has given it up"):
                            self.on_evidence(evidence)
                    if self._is_finished and isinstance(message, ChangeAt):  # it makes no more steps
                        self._dispatch(ChangeRequested(message.epoch, "its program is done"))
                case VoterAnswer(voter, message):
                    self._dispatch(Received(voter, message))
                case ToVoter(voter, message):
                    if voter.name == self._node.host:
                        self._vote(message, sender)
                case ProgramFinished():
                    self.finished |= {sender}
                    self._links.send(sender, FinishNoted())
                case FinishNoted():
                    self._note_aware(sender)
                case StepTimes():
                    self.stragglers.take(sender, frame)

    def on_linked(self, member: MemberId, *, is_finished: bool) -> None:
        """Take note of a link; see `LinkOwner`."""
        with self._lock:
            if is_finished:
                self.finished |= {member}
            if self._is_finished and member in self._unaware:
                self._links.send(member, ProgramFinished())

    def on_evidence(self, evidence: Evidence) -> None:
        """Take evidence about another process; see `LinkOwner`."""
        with self._lock:
            if evidence.verdict is Verdict.DEAD:
                self._note_aware(evidence.member)
            is_expected = evidence.member in self.finished or self._is_finished
            if is_expected and self._machine.state in _CALM:
                self._held[evidence.member] = evidence
                return
            self._dispatch(evidence)

    # -- changes that are asked for, and the end of the program -------------------------------------------------------

    def _on_request(self, request: ChangeRequested) -> None:
        view = self._view
        if view is None or request.epoch != view.epoch:
            return
        if self._machine.state is ElasticState.CHANGING:
            if request.reason and self.cause.is_hearsay:
                self.cause = explain_change(view, self.me, request)
            return
        if self._machine.state is ElasticState.PAUSED:
            return  # the change comes, and does not cut off those that are still in the step at which all stop
        if self._machine.state not in _CALM:
            self._num_failed_views += 1
            if self._num_failed_views > MAX_FAILED_VIEWS:
                reason = request.reason or _ANY_FAILURE
                self._end(1, f"{MAX_FAILED_VIEWS + 1} views in a row failed here, at last because: {reason}")
                return
        self._dispatch(request)

    def _on_late(self, event: MembersLate) -> None:
        self._dispatch(event)
        reason = "a collective has waited for it (REIGEN_DEADLINE)"
        if self._view is not None and self._view.epoch == event.epoch:
            for evidence in self._links.find_stopped(event.members, reason):
                self.on_evidence(evidence)

    def _begin_leaving(self, grace_seconds: float, *, at_once: bool) -> None:
        if self.is_leaving or self._has_ended:
            return
        self.is_leaving = True
        self.directory.tell_leaving(self.me, self.launcher_knows.set)
        reason = f"left after a grace of {grace_seconds:g} s, before the others have agreed"
        now = time.monotonic()
        last_seconds = min(_LAST_SECONDS, grace_seconds * _LAST_SHARE)
        self._loop.call_at(now + grace_seconds, partial(self._end, 0, reason))
        self._loop.call_at(now + grace_seconds - last_seconds, self._leave_now)
        self._dispatch(LeaveRequested())
        if at_once:
            self._leave_now()

    def _leave_now(self) -> None:
        """Wait for no step: the members change now."""
        if self._view is not None and self._machine.state in {ElasticState.LEAVING, ElasticState.PAUSED}:
            self._dispatch(ChangeRequested(self._view.epoch, "it leaves, and cannot wait for the end of a step"))

    def _begin_finish(self) -> None:
        self._is_finished = self._links.is_finished = True
        members = () if self._view is None else self._view.members
        self._unaware = {*members, *self._links.linked} - {self.me} - self._links.dead().keys()
        for member in sorted(self._unaware):
            self._links.send(member, ProgramFinished())
        self._note_aware(self.me)
        if self._machine.state is ElasticState.CHANGING:
            self._dispatch(LeaveRequested())

    def _note_aware(self, member: MemberId) -> None:
        self._unaware.discard(member)
        if self._is_finished and not self._unaware:
            self._all_know.set()

    def _take_in_finished(self, event: MemberEvent) -> None:
        """A change begins or goes on: it must know whose programs are done, this one's too."""
        self._events.extend(self._held.values())
        self._held.clear()
        if self._is_finished and self._machine.state is ElasticState.CHANGING and not isinstance(event, LeaveRequested):
            self._events.appendleft(LeaveRequested())

    # -- a candidate --------------------------------------------------------------------------------------------------

    def _look_for_view(self) -> None:
        self.directory.look_for_view(
            self._on_view_found, lambda error: self._post(partial(self._end, 1, _explain_refusal(error)))
        )
        self._loop.call_at(time.monotonic() + self._timeouts.wait, self._stop_waiting)

    def _on_view_found(self, view: View) -> bool:
        """Take a view that is at the rendezvous; by the directory's thread. Returns whether to look no more."""
        if not isinstance(self._machine, ElasticCandidate):
            return True
        self._post(partial(self._take_found, view))
        return False

    def _take_found(self, view: View) -> None:
        machine = self._machine
        if not isinstance(machine, ElasticCandidate):
            return
        self._dispatch(CopyStarted(view))
        if self._is_ready:
            # it gets the state behind the change, together with the others: it has that of no step
            self._dispatch(Copied(0, matches=True))

    def _stop_waiting(self) -> None:
        with self._lock:
            if isinstance(self._machine, ElasticCandidate) and not self._has_ended:
                view = self._view
                if view is not None and (not self._is_ready or view.size >= view.max_size):  # a spare, for any time
                    self._loop.call_at(time.monotonic() + self._timeouts.wait, self._stop_waiting)
                    return
                known = (
                    "none of them has said who they are" if view is None else f"the latest known view is {view.epoch}"
                )
                self._end(1, f"the members have not taken this process in within {self._timeouts.wait:g} s ({known})")


def first_outcome(*, is_planned: bool, tells_outcomes: bool) -> StepOutcome:
    """Return the outcome of a change, as far as it is known when the next view begins.

    Args:
        is_planned: all had stopped behind one step.
        tells_outcomes: see `ViewDriver`.
    """
    if is_planned:
        return StepOutcome.NOTHING
    return StepOutcome.PENDING if tells_outcomes else StepOutcome.COMMIT


def make_note(epoch: int, cause: ChangeReason, seconds: float, outcome: StepOutcome, least_size: int = 1) -> ChangeNote:
    """Return the note that rank 0 gives the launcher of a change when the view behind it begins."""
    is_known = cause.text == PLANNED_REASON or cause.is_of_death
    reason = "" if is_known else cause.text[:MAX_REASON]
    return ChangeNote(epoch, reason, cause.is_hearsay, seconds, outcome, least_size=least_size)


def belongs_to_stop(event: MemberEvent) -> bool:
    """Return whether an event that begins a change belongs to the planned stop of a member that has stopped.

    It does if it is a word of others that the change begins, and nobody is lost: all have stopped, as far as it knows.
    """
    match event:
        case Received(_, RevokeView(lost=lost)):
            return not lost
        case Evidence() | TimerFired() | ChangeRequested():
            return False
        case _:
            return True


def explain_change(view: View, me: MemberId, event: MemberEvent, *, is_waiting: bool = False) -> ChangeReason:
    """Return why a view ends.

    Args:
        view: the one that ends.
        me: this member.
        event: by which the change has begun.
        is_waiting: there were not enough members to run steps.
    """
    match event:
        case Evidence(member, verdict, detail):
            text = f"rank {view.ranks.get(member)} {verdict.value}{detail and ': '}{detail}"
            return ChangeReason(text, is_of_death=verdict is Verdict.DEAD)
        case ChangeRequested(_, reason):
            return ChangeReason(f"rank {view.ranks.get(me)}: {reason or _ANY_FAILURE}")
        case Received(MemberId() as sender, RevokeView(lost=lost)) if lost:
            ranks = format_ranks(view.ranks[member] for member in lost if member in view.ranks)
            text = f"rank(s) {ranks} are lost (told by rank {view.ranks.get(sender)})"
            return ChangeReason(text, is_hearsay=True)
        case Received(MemberId() as sender, RevokeView() | AskMember()):
            return ChangeReason(f"rank {view.ranks.get(sender)} asked for it", is_hearsay=True)
        case TimerFired() if is_waiting:
            return ChangeReason("processes that come do not reach a host: who is stopped there is left out")
        case TimerFired():
            return ChangeReason("not all have come to the step at which they were to stop")
        case _:
            return ChangeReason(PLANNED_REASON)


def _explain_refusal(error: ReigenError) -> str:
    """Explain why a process cannot become a member, and what to do."""
    if not isinstance(error, AuthenticationError):
        return str(error)
    return (
        f"{error}: the secret of this process on host {socket.gethostname()} (REIGEN_SECRET) is not that of the job. "
        "The job's launcher sets it: start the process by nothing else, and by nothing that changes that variable"
    )
