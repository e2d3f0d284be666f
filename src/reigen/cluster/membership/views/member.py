"""State machine of a member of an elastic job: events in, actions out. No I/O, no clock, no threads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from reigen.cluster.membership.views.events import (
    FENCED_EXIT_CODE,
    ChangeRequested,
    EndProcess,
    Evidence,
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
    Verdict,
    ViewTimer,
)
from reigen.cluster.membership.views.installation import Installation
from reigen.cluster.membership.views.late_members import BusyMembers, LateMembers, MemberShortage, SilentHosts
from reigen.cluster.membership.views.leader import ChangeLeader
from reigen.cluster.membership.views.messages import (
    AllLeave,
    AskMember,
    BallotPreempted,
    BehindView,
    ChangeAt,
    MemberReady,
    MemberReport,
    RevokeView,
    StateLost,
    StepProgress,
    StepReached,
    ViewAccepted,
    ViewBuilding,
    ViewDecided,
    ViewGo,
    ViewInstalled,
    ViewMessage,
    ViewPromise,
    WaitOver,
)
from reigen.cluster.membership.views.planned_stop import PlannedStop
from reigen.cluster.membership.views.planning import reaches
from reigen.cluster.membership.views.record import MemberId, View, VoterId

#: Why a member is gone where every other one is, too.
ALL_LEFT_REASON = "all members have left in good order"
_MOST_BACK_OFF_DOUBLINGS = 6
#: Looks in `ViewTimeouts.stuck` whether those live that build a view.
_NUM_LOOKS = 5


class ElasticState(Enum):
    """State of a member of an elastic job."""

    #: it runs steps
    RUNNING = "running"
    #: the plane is stopped, nothing is sent in the view any more; the next view is being decided
    CHANGING = "changing"
    #: the next view is decided; connections and layouts are built
    INSTALLING = "installing"
    #: its state is brought to the view's step
    ROLLING = "rolling"
    #: there are fewer members than steps may be run with; it keeps its state
    WAITING = "waiting"
    #: it runs its last steps
    LEAVING = "leaving"
    #: it has applied the step at which members come or leave, and waits until all have
    PAUSED = "paused"
    #: it has left in good order
    GONE = "gone"
    #: others have gone on without it
    FENCED = "fenced"
    #: no view could be decided, not enough members came, or nobody is left that holds the state
    STOPPED = "stopped"


_OVER = {ElasticState.GONE, ElasticState.FENCED, ElasticState.STOPPED}
_STEPPING = {ElasticState.RUNNING, ElasticState.LEAVING}


@dataclass(frozen=True)
class ViewTimeouts:
    """Times of a member, in seconds.

    Attributes:
        retry: between two sendings of what was not answered.
        stuck: until who leads takes members for stuck that are silent, or rank 0 those that build a view and are
            silent; others take a leader, or rank 0, for stuck after twice as long.
        late: the same for members that a collective had waited for until its deadline, before the change began.
        install: until who leads takes members for stuck that say that an update has begun, and rank 0 those that build
            what a view needs, and do not end; others take these two for stuck after twice as long.
        kill: until a killed process of the host is not waited for any more.
        change: without a decision, until a member stops.
        wait: for more members.
        back_off: of a preempted leader, times its rank and one, doubled with each attempt, and less than two ``stuck``.
    """

    retry: float = 0.1
    stuck: float = 5.0
    late: float = 2.0
    install: float = 60.0
    kill: float = 0.5
    change: float = 600.0
    wait: float = 600.0
    back_off: float = 0.02


def revoke_neighbours(rank: int, size: int) -> list[int]:
    """Return ranks at distances of powers of two in both directions, on a ring.

    So everybody hears of a change in log2(size) steps, with 2 * log2(size) messages of each, and as many may be dead.
    """
    distances = [1 << bit for bit in range(size.bit_length()) if 1 << bit < size]
    return sorted({(rank + sign * distance) % size for distance in distances for sign in (1, -1)} - {rank})


def _send_to_others(view: View, me: MemberId, message: ViewMessage) -> Iterator[SendTo]:
    """Yield a message to all other members of a view."""
    return (SendTo(member, message) for member in view.members if member != me)


def _find_certain(lost: Mapping[MemberId, Evidence]) -> set[MemberId]:
    """Return members that are not waited for: of two who cannot reach each other, each says that of the other."""
    return {member for member, evidence in lost.items() if not evidence.is_hearsay or evidence.verdict is Verdict.DEAD}


class ElasticMember:
    """A member.

    Args:
        me: who it is.
        view: the first view that has it; it begins with `ElasticState.INSTALLING`.
        timeouts: see there.

    Attributes:
        state: where it is.
        view: the latest that it knows to be decided; epochs only grow.
        lost: members that are dead, cannot be reached or are stuck, with how that is known.
        reason: why the latest change took place, or why there is no decision.
        required_size: with fewer members its program does not run, whatever the view's ``min_size``; the same on all.
        is_planned: all who go on had stopped at the step that was named for that when the view was decided.
        is_ending: the program is done on some member: nobody needs the state any more, and all end by themselves.
    """

    def __init__(self, me: MemberId, view: View, timeouts: ViewTimeouts | None = None) -> None:
        self.me, self.view, self._timeouts = me, view, timeouts or ViewTimeouts()
        self.state = ElasticState.INSTALLING
        self.lost: dict[MemberId, Evidence] = {}
        self.reason, self.required_size, self.is_planned, self.is_ending = "", 1, False, False
        #: how far it was when the plane was stopped; None: it still runs, or is being stopped
        self._progress: StepProgress | None = None
        #: leaders of the next view that wait for this member's report
        self._asked_by: dict[MemberId, None] = {}
        self._leader: ChangeLeader | None = None
        #: of voters that have lost their memory: by name, their present lives
        self._voter_lives: dict[str, int] = {}
        #: processes that want to be members, by their latest word
        self._candidates: dict[MemberId, MemberReady] = {}
        self._installation = Installation(me, view)
        self._applied = 0
        #: at which step to stop for a change; and who has said that it leaves
        self._stop = PlannedStop(me, view)
        self._leaving: set[MemberId] = set()
        self._late, self._busy = LateMembers(me, view, self._timeouts.late), BusyMembers(0)
        #: hosts that newcomers do not reach; and whether they are given some time, while members wait
        self._silent_hosts, self._is_doubting = SilentHosts(), False
        self._shortage = MemberShortage(self._timeouts.wait)
        #: steps may have been run in the view
        self._has_run = False

    def start(self) -> list[MemberAction]:
        """Return the first actions."""
        return self._begin_install(self._installation)

    def handle(self, event: MemberEvent) -> list[MemberAction]:
        """Take in an event; returns actions, in order. A process whose end was asked for does nothing any more."""
        if self.state in _OVER:
            return []
        handler = self._HANDLERS.get(type(event))
        return [] if handler is None else handler(self, event)

    @property
    def rank(self) -> int:
        """Rank in the view."""
        return self.view.ranks[self.me]

    @property
    def _least_size(self) -> int:
        """Number of members with which steps are run."""
        return max(self.view.min_size, self.required_size)

    # -- evidence, and the beginning of a change ----------------------------------------------------------------------

    def _on_evidence(self, event: Evidence) -> list[MemberAction]:
        known = self.lost.get(event.member)
        if event.member != self.me and (known is None or known.is_hearsay or known.verdict is not Verdict.DEAD):
            self.lost[event.member] = event
        if event.verdict is Verdict.DEAD:
            self._installation.dying.discard(event.member)
            self._candidates.pop(event.member, None)
        if self.state is ElasticState.INSTALLING:
            return [*self._installation.advance(), *self._react()]
        return self._react()

    def _react(self) -> list[MemberAction]:
        """Begin a change because of evidence, or go on with it."""
        if self.state is ElasticState.CHANGING:
            return [*self._consider_leading(), *self._advance()]
        if any(member in self.view.ranks for member in self.lost):
            return self._begin_change()
        return []

    def _begin_change(self) -> list[MemberAction]:
        """Tell all others, and stop the plane.

        In this order: stopping it waits for an update that has begun. Meanwhile the others need not wait for this
        member's word to stop theirs; who leads asks again and again, and is told that this member lives.
        """
        if self.state is ElasticState.CHANGING:
            return []
        if self.state is ElasticState.WAITING:
            self._silent_hosts.note_change(self._candidates.values())
        self.state, self._progress, self._leader = ElasticState.CHANGING, None, None
        self._asked_by.clear()
        self._busy = BusyMembers(math.ceil(self._timeouts.install / self._timeouts.stuck) - 1)
        leads = self._consider_leading()
        return [
            *self._flood_revoke(),
            *(action for action in leads if isinstance(action, SendTo)),
            RevokePlane(self.view.epoch),
            *self._shortage.begin(),
            self._shortage.limit_change(self._timeouts.change, self._timeouts.stuck),
            StartTimer(ViewTimer.STUCK, self._timeouts.stuck * 2),
            StartTimer(ViewTimer.RETRY, self._timeouts.retry),
            StartTimer(ViewTimer.PROGRESS, self._timeouts.stuck / _NUM_LOOKS),
            *self._late.watch(),
            *(action for action in leads if isinstance(action, StartTimer)),
        ]

    def _flood_revoke(self) -> Iterator[SendTo]:
        """Tell neighbours, which tell theirs; the leader asks all."""
        lost = tuple(member for member in self.lost if member in self.view.ranks)
        message = RevokeView(self.view.epoch, lost)
        yield from (SendTo(self.view.members[rank], message) for rank in revoke_neighbours(self.rank, self.view.size))

    def _on_plane_revoked(self, event: PlaneRevoked) -> list[MemberAction]:
        if self.state is not ElasticState.CHANGING or event.epoch != self.view.epoch:
            return []
        self._progress = event.progress
        report = self._report()
        actions: list[MemberAction] = [SendTo(leader, report) for leader in self._asked_by]
        self._asked_by.clear()
        return [*actions, *self._advance()]

    def _report(self) -> MemberReport:
        assert self._progress is not None
        own = {member: evidence.verdict for member, evidence in self.lost.items() if not evidence.is_hearsay}
        dead = tuple(member for member, verdict in own.items() if verdict is Verdict.DEAD)
        unreachable = tuple(member for member, verdict in own.items() if verdict is Verdict.UNREACHABLE)
        is_leaving = self.me in self._leaving
        return MemberReport(self.view.epoch + 1, self.me, self._progress, dead, unreachable, is_leaving)

    # -- leading a change ---------------------------------------------------------------------------------------------

    def _consider_leading(self) -> list[MemberAction]:
        """Lead if all lower ranks are lost."""
        if self._leader is not None or any(
            member not in self.lost for member in self.view.members[: self.view.ranks[self.me]]
        ):
            return []
        self._leader = ChangeLeader(self.view, self.me)
        return [*self._leader.requests(), StartTimer(ViewTimer.STUCK, self._timeouts.stuck)]

    def _advance(self) -> list[MemberAction]:
        """Go on with the change that this member leads."""
        if self._leader is None or self._progress is None:
            return []
        leader = self._leader
        leader.reports[self.me] = self._report()
        actions: list[MemberAction] = [*leader.advance(_find_certain(self.lost), self._candidates, self._voter_lives)]
        self.reason = leader.reason
        if leader.is_preempted and leader.backs_off:
            return actions  # what happens meanwhile must not put it off
        if leader.is_preempted:
            leader.backs_off = True
            doublings = min(leader.proposer.ballot.attempt, _MOST_BACK_OFF_DOUBLINGS)
            seconds = self._timeouts.back_off * (self.rank + 1) * 2**doublings
            # whoever preempted it may be dead by now, and the change has its own limit
            most = self._timeouts.stuck * (1 + self.rank / self.view.size)
            return [*actions, StartTimer(ViewTimer.BACK_OFF, min(seconds, most))]
        if leader.proposer.is_decided:
            decided = leader.proposer.proposed
            assert decided is not None
            return [*actions, *leader.announcements(decided), *self._adopt(decided)]
        dead = {each for each, evidence in self.lost.items() if evidence.verdict is Verdict.DEAD}
        if leader.is_abandoned(dead):
            return [
                *actions,
                *_send_to_others(self.view, self.me, AllLeave(self.view.epoch + 1)),
                *self._end(ElasticState.GONE, 0, ALL_LEFT_REASON),
            ]
        if not self.is_ending and (reason := leader.explain_lost_state(dead)):
            return [
                *actions,
                *_send_to_others(self.view, self.me, StateLost(self.view.epoch + 1, reason)),
                *self._end(ElasticState.STOPPED, 1, reason),
            ]
        return actions

    def _on_voter_reply(
        self, message: ViewPromise | ViewAccepted | BallotPreempted, _: MemberId | VoterId
    ) -> list[MemberAction]:
        if self._leader is None or self.state is not ElasticState.CHANGING:
            return []
        before = self._leader.proposer
        self._leader.take(message)
        return [] if self._leader.proposer is before else self._advance()

    def _on_report(self, message: MemberReport, _: MemberId | VoterId) -> list[MemberAction]:
        if message.epoch != self.view.epoch + 1 or self.state is not ElasticState.CHANGING or self._leader is None:
            return self._answer_late(message.epoch - 1, message.member)
        self._leader.reports[message.member] = message
        for member in message.dead:
            if member != self.me:
                detail = f"told by rank {self.view.ranks.get(message.member, -1)}"
                self.lost.setdefault(member, Evidence(member, Verdict.DEAD, detail, is_hearsay=True))
        if message.is_leaving:
            self._leaving.add(message.member)
        return self._advance()

    # -- messages of other members ------------------------------------------------------------------------------------

    def _on_received(self, event: Received) -> list[MemberAction]:
        sender, message = event.sender, event.message
        evidence = self.lost.get(sender) if isinstance(sender, MemberId) else None
        if evidence is not None and evidence.verdict is not Verdict.DEAD:
            del self.lost[evidence.member]  # it lives, and is heard
        if isinstance(sender, MemberId):
            self._installation.hear(sender)
            self._late.hear(sender)
            if isinstance(message, ViewBuilding):
                self._busy.hear(sender)
        if isinstance(sender, VoterId):
            self._voter_lives[sender.name] = max(sender.incarnation, self._voter_lives.get(sender.name, 0))
        handler: Callable[..., list[MemberAction]] | None = self._MESSAGE_HANDLERS.get(type(message))
        return [] if handler is None else handler(self, message, sender)

    def _answer_late(self, epoch: int, sender: MemberId | VoterId) -> list[MemberAction]:
        """Answer a message of the view ``epoch``, if it is not this member's."""
        if epoch < self.view.epoch:
            return [SendTo(sender, ViewDecided(self.view.epoch, self.view))]
        return [SendTo(sender, BehindView(epoch, self.view.epoch))] if epoch > self.view.epoch else []

    def _on_revoke(self, message: RevokeView, sender: MemberId | VoterId) -> list[MemberAction]:
        if message.epoch != self.view.epoch:
            return self._answer_late(message.epoch, sender)
        for member in message.lost:
            if member != self.me and member in self.view.ranks and isinstance(sender, MemberId) and member != sender:
                detail = f"told by rank {self.view.ranks.get(sender, -1)}"
                self.lost.setdefault(member, Evidence(member, Verdict.UNREACHABLE, detail, is_hearsay=True))
        return self._begin_change() or self._react()

    def _on_ask(self, message: AskMember, sender: MemberId | VoterId) -> list[MemberAction]:
        if message.epoch != self.view.epoch + 1:
            return self._answer_late(message.epoch - 1, sender)
        actions = self._begin_change()
        if self._progress is not None:
            return [*actions, SendTo(message.leader, self._report())]
        if message.leader in self._asked_by:
            actions.append(SendTo(message.leader, ViewBuilding(self.view.epoch, self.me)))
        self._asked_by[message.leader] = None
        return actions

    def _on_state_lost(self, message: StateLost, _: MemberId | VoterId) -> list[MemberAction]:
        if message.epoch != self.view.epoch + 1 or self._progress is None or self.is_ending:
            return []
        is_holder = self._progress.applied >= self.view.base.stable_step
        return [] if is_holder else self._end(ElasticState.STOPPED, 1, message.reason)

    # -- a view that was decided --------------------------------------------------------------------------------------

    def _adopt(self, view: View) -> list[MemberAction]:
        """Go on in a view that was decided, or without the others."""
        if view.epoch <= self.view.epoch:
            return []
        if self.me in view.ranks and view.epoch == self.view.epoch + 1 and self._progress is not None:
            return self._install(view)
        if self.me in self._leaving:
            return self._end(ElasticState.GONE, 0, "left in good order")
        # in a later view than the next there may be a candidate of its name, which it was before it became a member
        missed = view.epoch if self.me not in view.ranks else view.epoch - 1
        reason = f"view {missed} was decided without this process: it was silent, stopped or cut off"
        return self._end(ElasticState.FENCED, FENCED_EXIT_CODE, reason)

    def _end(self, state: ElasticState, exit_code: int, reason: str) -> list[MemberAction]:
        self.state, self.reason = state, reason
        return [EndProcess(exit_code, reason)]

    def _install(self, view: View) -> list[MemberAction]:
        """Install the next view; layouts wait until no process but members can write to memory of this host."""
        old, self.view = self.view, view
        # where no step was run in the view that ends, it is as it was
        has_run = self._has_run or old.base.target != view.base.target
        self.is_planned = self._stop.is_kept(view.base) if has_run else self.is_planned
        self._has_run = False
        dead = {member for member, evidence in self.lost.items() if evidence.verdict is Verdict.DEAD}
        gone = {member for member in old.neighbours(self.me) if member not in view.ranks}
        installation = Installation(self.me, view, self._installation.dying | gone - dead)
        kills = installation.kill(self._leaving)
        self._leader, self._progress, self._stop = None, None, PlannedStop(self.me, view)
        self._late = LateMembers(self.me, view, self._timeouts.late)
        # of others' word the leader has made what it could, and whoever was silent has answered it
        silent = {each for each, evidence in self.lost.items() if evidence.verdict is Verdict.STUCK}
        known = (_find_certain(self.lost) - silent) & view.ranks.keys()
        self.lost = {each: evidence for each, evidence in self.lost.items() if each in known}
        self._candidates = {each: ready for each, ready in self._candidates.items() if each not in view.ranks}
        actions: list[MemberAction] = [*kills, *self._begin_install(installation)]
        self._leaving &= view.ranks.keys()
        return [*actions, *self._react()]  # an adopted view may have members that are lost

    def _begin_install(self, installation: Installation) -> list[MemberAction]:
        self.state, self._installation = ElasticState.INSTALLING, installation
        actions: list[MemberAction] = [
            StartTimer(ViewTimer.STUCK, self._timeouts.install * (1 if self.rank == 0 else 2)),
            StartTimer(ViewTimer.RETRY, self._timeouts.retry),
            StartTimer(ViewTimer.PROGRESS, self._timeouts.stuck / _NUM_LOOKS),
        ]
        if installation.dying:
            actions.append(StartTimer(ViewTimer.KILL, self._timeouts.kill))
        return [*actions, *installation.advance()]

    def _on_layouts_built(self, event: LayoutsBuilt) -> list[MemberAction]:
        if self.state is not ElasticState.INSTALLING or event.epoch != self.view.epoch:
            return []
        self._installation.installed.add(self.me)
        return self._say_installed()

    def _say_installed(self) -> list[MemberAction]:
        """Tell rank 0, or go on as rank 0 when all have installed the view."""
        if self.rank:
            return [*self._installation.announcement()]
        if not self._installation.is_complete:
            return []
        return [*_send_to_others(self.view, self.me, ViewGo(self.view.epoch)), *self._roll()]

    def _on_installed(self, message: ViewInstalled, sender: MemberId | VoterId) -> list[MemberAction]:
        if message.epoch != self.view.epoch or self.rank != 0:
            return self._answer_late(message.epoch, sender)
        if self.state is ElasticState.CHANGING:
            return [SendTo(message.member, RevokeView(self.view.epoch))]
        self._installation.installed.add(message.member)
        if self.state is not ElasticState.INSTALLING:
            return [SendTo(message.member, ViewGo(self.view.epoch))]
        return self._say_installed()

    def _on_progress(self) -> list[MemberAction]:
        """Say that this member lives, as those do that build a view, and who leads a change; give up who is silent."""
        message = ViewBuilding(self.view.epoch, self.me)
        again = StartTimer(ViewTimer.PROGRESS, self._timeouts.stuck / _NUM_LOOKS)
        if self.state is ElasticState.CHANGING:
            return [*(() if self._leader is None else _send_to_others(self.view, self.me, message)), again]
        if self.state is not ElasticState.INSTALLING:
            return []
        actions: list[MemberAction]
        if self.rank == 0:
            actions = [*_send_to_others(self.view, self.me, message), again]
            awaited = {*self.view.members} - self._installation.installed - {self.me}
            silent = self._installation.find_silent(awaited, _NUM_LOOKS)
        else:
            actions = [SendTo(self.view.members[0], message), again]
            silent = self._installation.find_silent(self.view.members[:1], 2 * _NUM_LOOKS)
        for member in silent:
            self.lost[member] = Evidence(member, Verdict.STUCK, "silent while a view is built")
        return [*actions, *self._react()]

    def _on_go(self, message: ViewGo, sender: MemberId | VoterId) -> list[MemberAction]:
        if message.epoch == self.view.epoch and self.state is ElasticState.INSTALLING:
            return self._roll() if self.me in self._installation.installed else []
        return self._answer_late(message.epoch, sender)

    def _roll(self) -> list[MemberAction]:
        self.state = ElasticState.ROLLING
        return [RollTo(self.view)]

    def _on_rolled(self, event: Rolled) -> list[MemberAction]:
        if self.state is not ElasticState.ROLLING or event.epoch != self.view.epoch:
            return []
        self._applied = self.view.base.target
        if self.view.size < self._least_size:
            self.state, self._is_doubting = ElasticState.WAITING, False
            if self._shortage.has_expired:
                return self._on_wait_timeout()
            return [*self._shortage.begin(), *self._take_candidates()]
        self.state, self._has_run = ElasticState.RUNNING, True
        self._shortage.end()
        leaving = self._on_leave() if self.me in self._leaving else []
        return [RunView(self.view), *leaving, *self._take_candidates()]

    # -- who comes and goes in good order -----------------------------------------------------------------------------

    def _on_step_applied(self, event: StepApplied) -> list[MemberAction]:
        self._applied = event.step
        return self._consider_pause()

    def _consider_pause(self) -> list[MemberAction]:
        """Run no more steps if the one is applied at which all stop; as rank 0, begin the change when all have."""
        actions: list[MemberAction] = []
        if self.state in _STEPPING and self._stop.is_due(self._applied):
            self.state = ElasticState.PAUSED
            self._stop.reached.add(self.me)
            actions += self._stop.messages() if self.rank else ()
            actions.append(StartTimer(ViewTimer.RETRY, self._timeouts.retry))
            actions.append(StartTimer(ViewTimer.STUCK, self._timeouts.stuck))
        is_complete = self.rank == 0 and self.state is ElasticState.PAUSED and self._stop.is_complete
        return [*actions, *self._begin_change()] if is_complete else actions

    def _on_reached(self, message: StepReached, sender: MemberId | VoterId) -> list[MemberAction]:
        if message.epoch != self.view.epoch or self.rank != 0:
            return self._answer_late(message.epoch, sender)
        if self.state is ElasticState.CHANGING:
            return [SendTo(message.member, RevokeView(self.view.epoch))]
        self._stop.reached.add(message.member)
        self._stop.name(message.step)
        return self._consider_pause()

    def _on_leave(self, _: LeaveRequested | None = None) -> list[MemberAction]:
        self._leaving.add(self.me)
        if self.state is ElasticState.WAITING:
            return self._begin_change()
        if self.state is not ElasticState.RUNNING:
            return []
        self.state = ElasticState.LEAVING
        return self._change_soon(self.me)

    def _change_soon(self, leaving: MemberId | None) -> list[MemberAction]:
        """Name a step at which all stop; some may be one step ahead, and the message takes time."""
        if self._stop.step is None or leaving is not None:
            step = self._stop.name(self._applied + 2)
            return [*_send_to_others(self.view, self.me, ChangeAt(self.view.epoch, step, leaving))]
        return []

    def _on_change_at(self, message: ChangeAt, sender: MemberId | VoterId) -> list[MemberAction]:
        if message.epoch != self.view.epoch:
            return self._answer_late(message.epoch, sender) if message.epoch < self.view.epoch else []
        if message.leaving is not None:
            self._leaving.add(message.leaving)
        self._stop.name(message.step)
        return self._consider_pause()

    def _on_ready(self, message: MemberReady, sender: MemberId | VoterId) -> list[MemberAction]:
        candidate = message.host.members[0].id
        if candidate in self.view.ranks:
            return self._answer_late(message.epoch, sender)
        for other in [each for each in self._candidates if each.slot == candidate.slot and each < candidate]:
            del self._candidates[other]
        here = self.view.hosts[self.view.host_numbers[self.me]].name
        unreached = tuple(name for name in message.unreached if name != here)
        self._candidates[candidate] = MemberReady(message.epoch, message.host, message.applied, unreached)
        answer = self._answer_late(message.epoch, sender)
        if not answer and here in message.unreached:
            answer = [SendTo(sender, BehindView(message.epoch, self.view.epoch))]
        return [*answer, *self._take_candidates()]

    def _take_candidates(self) -> list[MemberAction]:
        """Begin a change, as rank 0, if there are candidates that are to be members.

        While members wait, a change may also be needed to find out who is stopped on a host that candidates do not
        reach, rank 0 perhaps.
        """
        hosts = [host.name for host in self.view.hosts]
        num = sum(reaches(candidate, hosts) for candidate in self._candidates.values())
        if self.view.size >= self.view.max_size:
            return []
        if self.state is ElasticState.WAITING:
            if num and self.rank == 0 and self.view.size + num >= self._least_size:
                return self._begin_change()
            candidates = self._candidates.values()
            if self._is_doubting or not self._silent_hosts.newcomers(self.view, candidates, self._least_size):
                return []
            self._is_doubting = True
            return [StartTimer(ViewTimer.STUCK, self._timeouts.stuck * (1 if self.rank == 0 else 2))]
        return self._change_soon(None) if num and self.rank == 0 and self.state in _STEPPING else []

    # -- timers -------------------------------------------------------------------------------------------------------

    def _on_retry(self) -> list[MemberAction]:
        """Send again what may have been lost."""
        again: list[MemberAction] = [StartTimer(ViewTimer.RETRY, self._timeouts.retry)]
        if self.state is ElasticState.CHANGING:
            if self._leader is None or self._leader.is_preempted:
                return [*self._flood_revoke(), *again]
            return [*self._leader.requests(), *self._flood_revoke(), *again]
        if self.state is ElasticState.INSTALLING:
            return [*self._say_installed(), *again]
        if self.state is ElasticState.PAUSED:
            return [*self._stop.messages(), *again]
        return []

    def _on_stuck(self) -> list[MemberAction]:
        """Give up those who do not answer: members as a leader or rank 0, otherwise these two.

        Nobody is given up because he has not come to the step at which all stop: they stop where they are.
        """
        if self.state is ElasticState.PAUSED:
            return self._begin_change()
        if self.state is ElasticState.WAITING and self._is_doubting:
            self._is_doubting = False
            is_needed = self._silent_hosts.newcomers(self.view, self._candidates.values(), self._least_size)
            return self._begin_change() if is_needed else []
        if self.state not in {ElasticState.CHANGING, ElasticState.INSTALLING}:
            return []
        members = [member for member in self.view.members if member not in self.lost]
        if self.state is ElasticState.INSTALLING and self._installation.dying:
            silent: list[MemberId] = []
        elif self.state is ElasticState.INSTALLING and self.rank == 0:
            silent = [member for member in members if member not in self._installation.installed]
        elif self.state is ElasticState.CHANGING and self._leader is not None:
            silent = self._busy.find_silent(self._leader.missing(_find_certain(self.lost)))
        else:
            silent = self._busy.find_silent(members[:1])
        for member in silent:
            if member != self.me:
                self.lost[member] = Evidence(member, Verdict.STUCK)
        leads = self._leader is not None or self.rank == 0
        seconds = self._timeouts.install if self.state is ElasticState.INSTALLING else self._timeouts.stuck
        return [StartTimer(ViewTimer.STUCK, seconds * (1 if leads else 2)), *self._react()]

    def _on_back_off(self) -> list[MemberAction]:
        if self.state is not ElasticState.CHANGING or self._leader is None or not self._leader.is_preempted:
            return []
        self._leader.try_again()
        return [*self._leader.requests()]

    def _on_change_timeout(self) -> list[MemberAction]:
        if self.state is not ElasticState.CHANGING:
            return []
        missing = ", ".join(
            f"rank {rank} {self.lost[member].verdict.value}"
            for member, rank in self.view.ranks.items()
            if member in self.lost
        )
        why = self.reason or "no member that may lead answered"
        return self._end(
            ElasticState.STOPPED, 1, f"no view could follow view {self.view.epoch}: {why} ({missing or 'all answer'})"
        )

    def _on_wait_timeout(self, heard: WaitOver | None = None) -> list[MemberAction]:
        """Give up waiting for more members: the time is over here, or the message ``heard`` says so.

        Who builds the view, or is in a change, looks first whether there are enough after all.
        """
        if heard is None:
            self._shortage.expire()
        elif heard.epoch == self.view.epoch and self.state not in _STEPPING | {ElasticState.PAUSED}:
            self._shortage.join()
        else:
            return []
        if not self._shortage.has_expired:
            return []
        if self.state is ElasticState.CHANGING:
            return [self._shortage.limit_change(self._timeouts.change, self._timeouts.stuck)]
        if self.state is not ElasticState.WAITING:
            return []
        if heard is not None:
            return self._end(ElasticState.STOPPED, 1, heard.reason)
        reason = self._shortage.explain(self.view.size, self._least_size)
        over = _send_to_others(self.view, self.me, WaitOver(self.view.epoch, reason))
        return [*over, *self._end(ElasticState.STOPPED, 1, reason)]

    # -- what is always true ------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Assert the invariants of one member, which hold after every event."""
        self._installation.validate()
        if self.state in _OVER:
            return
        assert self.me in self.view.ranks, "members are in their view"
        assert self._leader is None or self.state is ElasticState.CHANGING, "only a change is led"
        assert self._progress is None or self.state is ElasticState.CHANGING, "only who has stopped reports"
        assert self.me not in self.lost, "it lives"

    _HANDLERS: ClassVar[dict[type[Any], Callable[[ElasticMember, Any], list[MemberAction]]]] = {
        Received: _on_received,
        Evidence: _on_evidence,
        PlaneRevoked: _on_plane_revoked,
        LayoutsBuilt: _on_layouts_built,
        Rolled: _on_rolled,
        StepApplied: _on_step_applied,
        MembersLate: lambda self, event: [*self._late.take(event, is_changing=self.state is ElasticState.CHANGING)],
        LeaveRequested: _on_leave,
        # what failed in a view that has passed is over
        ChangeRequested: lambda self, event: self._begin_change() if event.epoch == self.view.epoch else [],
        TimerFired: lambda self, event: self._TIMER_HANDLERS[event.timer](self),
    }
    _MESSAGE_HANDLERS: ClassVar[dict[type[Any], Callable[..., list[MemberAction]]]] = {
        RevokeView: _on_revoke,
        AskMember: _on_ask,
        MemberReport: _on_report,
        ViewPromise: _on_voter_reply,
        ViewAccepted: _on_voter_reply,
        BallotPreempted: _on_voter_reply,
        BehindView: lambda self, message, sender: (
            self._answer_late(message.known, sender) if message.known < self.view.epoch else []
        ),
        ViewDecided: lambda self, message, _: self._adopt(message.value),
        ViewInstalled: _on_installed,
        ViewBuilding: lambda self, message, sender: self._answer_late(message.epoch, sender),
        ViewGo: _on_go,
        ChangeAt: _on_change_at,
        StepReached: _on_reached,
        AllLeave: lambda self, message, _: (
            self._end(ElasticState.GONE, 0, ALL_LEFT_REASON)
            if message.epoch == self.view.epoch + 1 and self.state is ElasticState.CHANGING and self.me in self._leaving
            else []
        ),
        StateLost: _on_state_lost,
        WaitOver: lambda self, message, _: self._on_wait_timeout(message),
        MemberReady: _on_ready,
    }
    _TIMER_HANDLERS: ClassVar[dict[ViewTimer, Callable[[ElasticMember], list[MemberAction]]]] = {
        ViewTimer.RETRY: _on_retry,
        ViewTimer.STUCK: _on_stuck,
        ViewTimer.LATE: lambda self: (
            [action for each in self._late.evidence() for action in self._on_evidence(each)]
            if self.state is ElasticState.CHANGING
            else []
        ),
        ViewTimer.BACK_OFF: _on_back_off,
        ViewTimer.PROGRESS: _on_progress,
        ViewTimer.KILL: lambda self: (
            [*self._installation.give_up_killing()] if self.state is ElasticState.INSTALLING else []
        ),
        ViewTimer.CHANGE: _on_change_timeout,
        ViewTimer.WAIT: _on_wait_timeout,
    }
