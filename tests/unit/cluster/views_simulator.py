"""Elastic jobs under random schedules: processes are killed and stopped, hosts vanish, networks are cut, messages are
late, lost and doubled, processes come and leave. Members, leaders, voters and their slots are the real ones; time is
made up, and so is training: a step has two buckets, to which each member of the view contributes.

What a member has applied is its *history*: for each step the epoch of the view in which its sums were made, for no view
makes the sums of a step twice. Contributions go to members of the same host through memory, where nobody looks at
epochs, and to others as frames, which carry one.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from reigen.cluster.membership.views.candidate import CandidateState, ElasticCandidate
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
from reigen.cluster.membership.views.messages import VIEW_CODEC, HeldSums, StepProgress
from reigen.cluster.membership.views.paxos import Acceptor
from reigen.cluster.membership.views.record import (
    MemberId,
    SamplePosition,
    StepBase,
    View,
    ViewHost,
    ViewMember,
    VoterId,
    Witness,
)
from reigen.cluster.membership.views.slots import NUM_SLOTS, decode_slots, encode_slot

NUM_BUCKETS = 2
TIMEOUTS = ViewTimeouts(retry=0.2, stuck=1.0, install=6.0, kill=0.3, change=12.0, wait=12.0)
PEER_SECONDS = 0.6
DEADLINE_SECONDS = 1.5
#: Kinds of faults, and how often they are drawn.
FAULTS = {
    "kill": 2,
    "stop": 2,
    "cut": 2,
    "one way": 1,
    "link": 1,
    "host": 1,
    "join": 1,
    "leave": 1,
    "all leave": 1,
    "pause": 1,
    "tear": 1,
    "forget": 1,
    "request": 1,
    "slow build": 1,
}
#: How long after the last fault, or a slow build that was under way then, all must run again, or have ended.
SETTLE_SECONDS = 25.0
#: How long after a plane was revoked the others in it see its connections closed, if they reach it.
CLOSED_SECONDS = 0.2
_ENDED = {ElasticState.GONE, ElasticState.FENCED, ElasticState.STOPPED}


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Rules:
    """Rules of the planes that may be broken on purpose."""

    epoch_in_frames: bool = True
    copies_are_stable: bool = True
    checkpoints_are_stable: bool = True
    #: who reads the state while a step is made contributes to the step when it has all of it
    reads_before_it_contributes: bool = True
    #: who might write to memory in use is looked at, and not only what comes of it
    memory_is_checked: bool = True
    #: warm spares make each step, though they take no samples
    spares_follow: bool = True


@dataclass
class Plan:
    """What one seed stands for."""

    hosts: tuple[int, ...]
    witness: bool
    min_size: int
    max_size: int
    faults: list[str]
    fault_seconds: float
    loss: float
    doubling: float
    travel: float
    step_seconds: float
    encodes: bool
    heals: bool = True
    #: how many of ``max_size`` are warm spares
    num_spares: int = 0


def make_plan(rng: random.Random) -> Plan:
    """Draw a schedule's parameters."""
    hosts = rng.choice(((1, 1), (2, 1), (2, 2), (3,), (2,), (1, 1, 1), (2, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1, 1)))
    size = sum(hosts)
    return Plan(
        hosts,
        witness=rng.random() < 0.4,
        min_size=rng.choice((1, 1, 1, min(2, size))),
        max_size=size + rng.choice((0, 0, 1)),
        faults=rng.choices([*FAULTS], [*FAULTS.values()], k=rng.choice((1, 1, 2, 3, 4, 6, 10))),
        fault_seconds=rng.choice((0.05, 0.5, 2.0, 4.0)),
        loss=rng.choice((0.0, 0.0, 0.1, 0.3)),
        doubling=rng.choice((0.0, 0.1)),
        travel=rng.choice((0.002, 0.02, 0.1)),
        step_seconds=rng.choice((0.1, 0.4)),
        encodes=rng.random() < 0.1,
    )


@dataclass
class Host:
    """A host, or the witness: what votes."""

    name: str
    acceptor: Acceptor
    slots: list[bytes] = field(default_factory=lambda: [b""] * NUM_SLOTS)
    is_alive: bool = True
    #: messages that have come while it is stopped; None: it is not
    waiting: deque[Any] | None = None
    tears: bool = False


@dataclass
class Process:
    """A process: its member's state machine, and its plane."""

    id: MemberId
    host: str
    member: ElasticMember | ElasticCandidate
    is_alive: bool = True
    #: what has happened while it is stopped; None: it is not
    waiting: deque[Callable[[], None]] | None = None
    #: SIGKILL takes a second
    is_unkillable: bool = False
    #: how long it builds what a view needs, besides
    build_seconds: float = 0.0
    timers: dict[ViewTimer, int] = field(default_factory=dict)
    #: when it has begun to wait for more members, at last; and when it has ended
    waits_since: float = math.inf
    ended_at: float = math.inf
    history: tuple[int, ...] = ()
    #: the latest step of which it knows that all members of its view have applied it
    stable: int = 0
    #: the view in which it may contribute; None: revoked
    plane: View | None = None
    #: (step, bucket): contributions by ranks: (epoch, step, size)
    inbox: dict[tuple[int, int], dict[int, tuple[int, int, int]]] = field(default_factory=dict)
    #: frames of a view that it does not run yet
    early: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    held_epoch: int = 0
    #: its memory, and which memory of others it has mapped
    segment: int = 0
    mapped: dict[MemberId, int] = field(default_factory=dict)
    exit: EndProcess | None = None
    wants_to_leave: bool = False
    #: it has no state yet, and gets it while the others make the first step of the view
    is_reading: bool = False

    @property
    def applied(self) -> int:
        return len(self.history)

    @property
    def is_member(self) -> bool:
        return self.is_alive and isinstance(self.member, ElasticMember) and self.member.state not in _ENDED


class Simulator:
    """One schedule.

    Args:
        seed: of the schedule.
        rules: of the planes.
        plan: instead of the seed's.
        log: gets a line for each event, if there is one.
    """

    def __init__(
        self, seed: int, rules: Rules | None = None, plan: Plan | None = None, log: list[str] | None = None
    ) -> None:
        self.rng, self.log, self.rules = random.Random(seed), log, rules or Rules()
        self.plan = plan or make_plan(self.rng)
        self.seen: Counter[str] = Counter()
        self.now = 0.0
        self.num_events = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.hosts: dict[str, Host] = {}
        self.processes: dict[MemberId, Process] = {}
        #: pairs of hosts: nothing travels from the first to the second
        self.cuts: set[tuple[str, str]] = set()
        self.dead_hosts: set[str] = set()
        #: views that were installed, by epoch; what their members have applied when they begin
        self.views: dict[int, View] = {}
        self.bases: dict[int, tuple[int, ...]] = {}
        self.stable: tuple[int, ...] = ()
        #: by step, the history that the first checkpoint of that step holds
        self.checkpoints: dict[int, tuple[int, ...]] = {}
        self.is_calm = False
        self.steps_since_calm = 0
        #: how long after the last fault all ran again, and the last member began a new view
        self.settle_seconds = self.resume_seconds = 0.0
        #: when the last build will be over
        self.built_at = 0.0
        self._fault_at = 0.0
        #: of newcomers that read the state late, so that schedules without them stay as they are
        self._readers = random.Random(seed)
        self.transitions: set[tuple[str, str]] = set()
        #: by epoch, after how many steps its members stopped
        self.stops: dict[int, set[int]] = {}
        self._set_up()

    # -- time ---------------------------------------------------------------------------------------------------------

    def note(self, *parts: object) -> None:
        if self.log is not None:
            self.log.append(" ".join([f"{self.now:.4f}", *map(str, parts)]))

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (self.now + seconds, self._number, action))

    def _until(self, end: Callable[[], bool], last: float) -> bool:
        """Let things happen until a condition holds, which is looked at now and then, or time is over."""
        look = self.now
        while self._queue and self._queue[0][0] <= last:
            self.now, _, action = heapq.heappop(self._queue)
            self.num_events += 1
            action()
            if self.now >= look:
                if end():
                    return True
                look = self.now + 0.1
        return end()

    def run(self) -> Simulator:
        self.note(self.plan)
        for kind in self.plan.faults:
            self.at(0.05 + self.rng.random() * self.plan.fault_seconds, lambda kind=kind: self._fault(kind))
        self._until(lambda: False, self.plan.fault_seconds + self.rng.choice((0.3, 1.5)))
        self._calm()
        calm_at = self.now
        settled = self._until(self._is_settled, max(self.now, self.built_at) + SETTLE_SECONDS)
        self.settle_seconds = self.now - calm_at
        self._check_end(settled)
        return self

    # -- the job ------------------------------------------------------------------------------------------------------

    def _set_up(self) -> None:
        hosts, slot = [], 0
        for number, count in enumerate(self.plan.hosts):
            members = tuple(ViewMember(slot + place, 1, 1) for place in range(count))
            slot += count
            hosts.append(ViewHost(f"h{number}", 1, "", members))
        witness = Witness("w", 1, "") if self.plan.witness else None
        sizes = self.plan.min_size, self.plan.max_size
        view = View.make(1, hosts, base=StepBase(), sizes=sizes, witness=witness, num_spares=self.plan.num_spares)
        for voter in (*(host.voter for host in hosts), *([witness.voter] if witness else [])):
            self.hosts[voter.name] = Host(voter.name, Acceptor(voter, view))
        for host in hosts:
            for each in host.members:
                member = ElasticMember(each.id, view, TIMEOUTS)
                process = self.processes[each.id] = Process(each.id, host.name, member)
                self._check_view(process, view)
        for process in self.processes.values():
            assert isinstance(process.member, ElasticMember)
            self._carry(process, process.member.start())

    def _reaches(self, sender: str, receiver: str) -> bool:
        if sender == receiver:
            return True
        return (sender, receiver) not in self.cuts and not {sender, receiver} & self.dead_hosts

    def _is_lossy(self) -> bool:
        return not self.is_calm and self.rng.random() < self.plan.loss

    def _travel(self, sender: str, receiver: str) -> float:
        return self.rng.random() * (0.001 if sender == receiver else self.plan.travel)

    def do(self, process: Process, event: Any) -> None:
        """Something happens to a process, as soon as it runs."""
        if not process.is_alive:
            return
        if process.waiting is not None:
            process.waiting.append(lambda: self.do(process, event))
            return
        member, state = process.member, process.member.state
        before = 0 if member.view is None else member.view.epoch
        self.note(process.id, state.value, before, event)
        actions = member.handle(event)
        if member.state is not state:
            self.transitions.add((state.value, member.state.value))
        if isinstance(member, ElasticMember):
            self._check_member(process, member, event, before, state is ElasticState.RUNNING)
        self._carry(process, actions)

    def _check_member(self, process: Process, member: ElasticMember, event: Any, before: int, ran: bool) -> None:
        member.validate()
        if member.view.epoch < before:
            raise Violation(f"1: {process.id} goes back from view {before} to {member.view.epoch}")
        if member.view.epoch > before:
            self._check_view(process, member.view)
        is_stranger = isinstance(event, Evidence) and event.member not in member.view.ranks
        if is_stranger and ran and member.state is not ElasticState.RUNNING:
            raise Violation(f"9: {process.id} stops because of {event.member}, which is no member")

    def _carry(self, process: Process, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case SendTo(receiver, message):
                    self._send(process.host, process.id, receiver, message)
                case StartTimer(timer, seconds):
                    process.waits_since = self.now if timer is ViewTimer.WAIT else process.waits_since
                    self._number += 1
                    token = process.timers[timer] = self._number
                    self.at(seconds, lambda timer=timer, token=token: self._fire(process, timer, token))
                case RevokePlane(epoch):
                    self.at(self.rng.random() * 0.005, lambda epoch=epoch: self._revoked(process, epoch))
                case KillMember(member):
                    seconds = 1.0 if self.processes[member].is_unkillable else self.rng.random() * 0.05
                    self.at(seconds, lambda member=member: self._die(self.processes[member]))
                    self.seen["shot"] += 1
                case UseFreshSegments():
                    process.segment += 1
                    self.seen["fresh segments"] += 1
                case BuildLayouts(view):
                    self._build(process, view)
                case RollTo(view):
                    self.at(self.rng.random() * 0.02, lambda view=view: self._roll(process, view, self.now))
                case RunView(view):
                    self._run_view(process, view)
                case JoinView(view):
                    process.member = ElasticMember(process.id, view, TIMEOUTS)
                    self._check_view(process, view)
                    self._carry(process, process.member.start())
                case EndProcess():
                    process.exit, process.ended_at = action, self.now
                    self.seen[process.member.state.value] += 1
                    self._die(process)

    def _fire(self, process: Process, timer: ViewTimer, token: int) -> None:
        if process.timers.get(timer) == token:
            self.do(process, TimerFired(timer))

    def _send(self, host: str, sender: Any, receiver: Any, message: Any) -> None:
        target = receiver.name if isinstance(receiver, VoterId) else self.processes[receiver].host
        if self.plan.encodes:
            message = VIEW_CODEC.decode(VIEW_CODEC.encode(message))
        copies = 1 + (not self.is_calm and self.rng.random() < self.plan.doubling)
        for _ in range(copies):
            if not self._is_lossy():
                self.at(self._travel(host, target), lambda: self._deliver(host, target, sender, receiver, message))

    def _deliver(self, host: str, target: str, sender: Any, receiver: Any, message: Any) -> None:
        if not self._reaches(host, target):
            return
        if isinstance(receiver, MemberId):
            self.do(self.processes[receiver], Received(sender, message))
        else:
            self._vote(self.hosts[target], sender, message)

    def _vote(self, host: Host, sender: MemberId, message: Any) -> None:
        if not host.is_alive:
            return
        if host.waiting is not None:
            host.waiting.append((sender, message))
            return
        acceptor, reply = host.acceptor.handle(message)
        self.note(host.name, message, "->", reply)
        if acceptor is not host.acceptor and (self.plan.encodes or host.tears):
            stored = decode_slots(host.slots)
            written = encode_slot(stored.sequence + 1, acceptor)
            if host.tears and stored.acceptor is not None:
                host.tears, written, reply = False, written[: self.rng.randrange(len(written))], None
                self.seen["tear"] += 1
                acceptor = stored.acceptor
            host.slots[stored.next_slot] = written
            if reply is not None and decode_slots(host.slots).acceptor != acceptor:
                raise Violation(f"{host.name} has not written what it answers")
        host.acceptor = acceptor
        if reply is not None:
            self._send(host.name, host.acceptor.id, sender, reply)

    # -- planes -------------------------------------------------------------------------------------------------------

    def _revoked(self, process: Process, epoch: int) -> None:
        if not process.is_alive:
            return
        if process.waiting is not None:
            process.waiting.append(lambda: self._revoked(process, epoch))
            return
        process.plane = None
        held = HeldSums(process.held_epoch, tuple(sorted(process.held)), NUM_BUCKETS)
        step = process.applied
        if not process.is_reading:
            self.stops.setdefault(epoch, set()).add(step)
        self.do(
            process, PlaneRevoked(epoch, StepProgress(step, SamplePosition(0, step), SamplePosition(0, step + 1), held))
        )
        for other in self.processes.values():
            if other is not process:
                self.at(CLOSED_SECONDS, lambda other=other: self._see_closed(process.host, other, epoch))

    def _see_closed(self, host: str, process: Process, epoch: int) -> None:
        """A plane's connections to ``host`` are closed: who still waits for them sees it, as soon as it can."""
        member = process.member
        if not process.is_alive or not isinstance(member, ElasticMember) or member.view.epoch != epoch:
            return
        if member.state is not ElasticState.RUNNING or {host, process.host} & self.dead_hosts:
            return
        if self._both_ways(host, process.host):
            self.do(process, ChangeRequested(epoch, "a connection was closed"))
        else:
            self.at(CLOSED_SECONDS, lambda: self._see_closed(host, process, epoch))

    def _build(self, process: Process, view: View) -> None:
        process.inbox.clear()
        self._sense(process)
        for other in self.processes.values() if self.rules.memory_is_checked else ():
            is_mapped = other.mapped.get(process.id) == process.segment
            if is_mapped and other.is_alive and other.host == process.host and other.id not in view.ranks:
                raise Violation(f"8: {process.id} uses memory that {other.id} may write to")
        seconds = self.rng.random() * 0.02 + process.build_seconds
        self.built_at = max(self.built_at, self.now + seconds)
        self.at(seconds, lambda: self._built(process, view))

    def _built(self, process: Process, view: View) -> None:
        for member in view.neighbours(process.id):
            process.mapped[member] = self.processes[member].segment
        self.do(process, LayoutsBuilt(view.epoch))

    def _roll(self, process: Process, view: View, begun: float) -> None:
        """Bring a member to the view's step, as soon as those can be reached who have what it lacks."""
        member = process.member
        if not process.is_alive or member.state is not ElasticState.ROLLING or member.view != view:
            return
        if process.waiting is not None:
            process.waiting.append(lambda: self._roll(process, view, begun))
            return
        process.is_reading = self._may_read_later(process, view)
        if process.is_reading:
            process.history, process.stable = (), 0
            self.do(process, Rolled(view.epoch))
            return
        missed = view.base.stable_step - process.applied
        missing = self._take_state(process, view)
        if missing:
            self.at(0.1, lambda: self._roll(process, view, begun))
            if self.now - begun > DEADLINE_SECONDS:
                for each in missing:
                    self.do(process, Evidence(each, Verdict.STUCK))
            return
        self._check_relief(process, view, missed)
        process.held.clear()
        process.stable = max(process.stable, view.base.stable_step)
        if process.applied != view.base.target:
            raise Violation(f"4: {process.id} begins view {view.epoch} at step {process.applied}")
        if self.bases.setdefault(view.epoch, process.history) != process.history:
            raise Violation(f"3: {process.id} begins view {view.epoch} with {process.history}, others otherwise")
        self._check_stable(process)
        self.do(process, Rolled(view.epoch))

    def _may_read_later(self, process: Process, view: View) -> bool:
        """Whether a newcomer gets the state in the first step of its view; half of them do."""
        joined = {each.id: each.joined for host in view.hosts for each in host.members}
        is_new = joined[process.id] == view.epoch and process.applied <= view.base.step
        if not is_new or not view.base.target or view.base.completes or view.ranks[process.id] == 0:
            return False
        return self._readers.random() < 0.5

    def _read_state(self, process: Process, view: View) -> None:
        """A newcomer reads the state from a member that makes a step, and has not applied it."""
        if not process.is_alive or process.plane is not view or not process.is_reading:
            return
        if process.waiting is not None:
            process.waiting.append(lambda: self._read_state(process, view))
            return
        members = [self.processes[member] for rank, member in enumerate(view.members) if rank not in view.base.behind]
        holders = [each for each in members if each.plane == view and not each.is_reading]
        ready = [each for each in holders if self._can_fetch(process, each)]
        if not ready:
            self.at(0.1, lambda: self._read_state(process, view))
            return
        if any(each.applied != view.base.target for each in ready):
            raise Violation(f"9: {process.id} reads a state that is changed")
        process.history, process.stable, process.is_reading = ready[0].history, view.base.stable_step, False
        self._check_stable(process)
        self.seen["read"] += 1
        self._begin_step(process, view)
        for bucket in range(NUM_BUCKETS):
            if (process.applied + 1, bucket) in process.inbox:
                self._complete(process, process.applied + 1, bucket)

    def _take_state(self, process: Process, view: View) -> list[MemberId]:
        """Apply what a member lacks; returns from whom it cannot be had now."""
        base, members = view.base, view.members
        if process.applied < base.step:
            sources = [self.processes[member] for rank, member in enumerate(members) if rank not in base.behind]
            ready = [each for each in sources if self._can_fetch(process, each) and each.applied >= base.step]
            if not ready:
                return [each.id for each in sources]
            process.history += ready[0].history[process.applied : base.step]
        if base.completes and process.applied == base.step:
            sources = [self.processes[members[rank]] for rank in base.sum_sources]
            missing = [each.id for each in sources if not self._can_fetch(process, each)]
            if missing:
                return missing
            for bucket, each in enumerate(sources):
                has_applied = each.applied > base.step and each.history[base.step] == base.sums_epoch
                if not has_applied and not (bucket in each.held and each.held_epoch == base.sums_epoch):
                    raise Violation(f"3: {each.id} does not hold bucket {bucket} of step {base.step + 1}")
            process.history += (base.sums_epoch,)
            self.seen["completed"] += 1
        return []

    def _can_fetch(self, process: Process, source: Process) -> bool:
        is_there = source.is_alive and source.waiting is None
        return is_there and self._reaches(process.host, source.host) and self._reaches(source.host, process.host)

    def _run_view(self, process: Process, view: View) -> None:
        if not view.min_size <= view.size <= view.max_size:
            raise Violation(f"6: {view.size} rank(s) run")
        for member in view.members:
            other = self.processes[member].member
            if other.view is None or other.view.epoch < view.epoch:
                raise Violation(f"2: {process.id} runs view {view.epoch}, which {member} has not installed")
        self.resume_seconds = self.now - self._fault_at if self._fault_at else 0.0
        process.plane = view
        early, process.early = process.early, []
        self._begin_step(process, view)
        for frame in early:
            self._take_frame(process, *frame)

    def _begin_step(self, process: Process, view: View) -> None:
        step = (view.base.target if process.is_reading else process.applied) + 1
        process.held.clear()
        process.held_epoch = view.epoch
        if process.is_reading:
            seconds = 3 * self.plan.step_seconds * self._readers.random()
            self.at(seconds, lambda: self._read_state(process, view))
            if self.rules.reads_before_it_contributes:
                return
        for bucket in range(NUM_BUCKETS):
            seconds = self.plan.step_seconds * (self.rng.random() + 0.5 * bucket)
            self.at(seconds, lambda bucket=bucket: self._contribute(process, view, step, bucket))
        self.at(DEADLINE_SECONDS, lambda: self._look_for_stuck(process, view, step))

    def _contribute(self, process: Process, view: View, step: int, bucket: int) -> None:
        """What a process does next when it runs again, whatever has happened to the others."""
        if not process.is_alive or process.plane is not view:
            return
        if process.waiting is not None:
            process.waiting.appendleft(lambda: self._contribute(process, view, step, bucket))
            return
        if process.member.state in _ENDED:
            raise Violation(f"8: {process.id} writes after its end")
        rank = view.ranks[process.id]
        for member in view.members:
            other = self.processes[member]
            if other.host != process.host:
                frame = view.epoch, step, bucket, rank, view.size
                travel = self._travel(process.host, other.host)
                self.at(travel, lambda other=other, frame=frame: self._arrive(process, other, frame))
            elif other is process or process.mapped.get(member) == other.segment:
                other.inbox.setdefault((step, bucket), {})[rank] = view.epoch, step, view.size
                self._complete(other, step, bucket)

    def _arrive(self, sender: Process, receiver: Process, frame: tuple[int, int, int, int, int]) -> None:
        """A frame comes; what is cut off comes when the network is there again, if the connection is."""
        if not receiver.is_alive:
            return
        if not self._reaches(sender.host, receiver.host):
            if sender.is_alive and not {sender.host, receiver.host} & self.dead_hosts:
                self.at(0.2, lambda: self._arrive(sender, receiver, frame))
            return
        if receiver.waiting is not None:
            receiver.waiting.append(lambda: self._take_frame(receiver, *frame))
        else:
            self._take_frame(receiver, *frame)

    def _take_frame(self, process: Process, epoch: int, step: int, bucket: int, rank: int, size: int) -> None:
        if process.plane is None or (self.rules.epoch_in_frames and epoch > process.plane.epoch):
            process.early.append((epoch, step, bucket, rank, size))
        elif epoch == process.plane.epoch or not self.rules.epoch_in_frames:
            process.inbox.setdefault((step, bucket), {})[rank] = epoch, step, size
            self._complete(process, step, bucket)

    def _complete(self, process: Process, step: int, bucket: int) -> None:
        """All have contributed to a bucket: its sum is there, and the step before is stable."""
        view = process.plane
        parts = process.inbox[step, bucket]
        if view is None or step != process.applied + 1 or bucket in process.held:
            return
        if not self.rules.spares_follow:
            if view.ranks[process.id] in view.spares:
                return
            parts = dict.fromkeys(view.spares, (view.epoch, step, view.size)) | parts
        if len(parts) < view.size:
            return
        if any(part != (view.epoch, step, view.size) for part in parts.values()):
            raise Violation(f"2: {process.id} adds {parts} in view {view.epoch}, step {step}")
        if sorted(parts) != list(range(view.size)):
            raise Violation(f"4: samples of step {step} are taken by ranks {sorted(parts)} of {view.size}")
        self._make_stable(process)
        process.held.add(bucket)
        if len(process.held) == NUM_BUCKETS:
            self.at(self.rng.random() * self.plan.step_seconds / 2, lambda: self._apply(process, view, step))

    def _apply(self, process: Process, view: View, step: int) -> None:
        if not process.is_alive or process.plane is not view or process.applied != step - 1:
            return
        if process.waiting is not None:
            process.waiting.appendleft(lambda: self._apply(process, view, step))
            return
        process.history += (view.epoch,)
        process.held.clear()  # of the next step it has nothing, also if it stops here
        for bucket in range(NUM_BUCKETS):
            process.inbox.pop((step, bucket), None)
        if view.epoch == max(self.views):  # who was stopped may apply what it had: it is in no later view
            self._check_stable(process)
        self.seen["step"] += 1
        if not self.rules.checkpoints_are_stable:
            self._write_checkpoint(process)
        self.steps_since_calm += self.is_calm
        self.do(process, StepApplied(step))
        if process.is_alive and process.member.state in {ElasticState.RUNNING, ElasticState.LEAVING}:
            self._begin_step(process, view)
            for bucket in range(NUM_BUCKETS):
                if (step + 1, bucket) in process.inbox:
                    self._complete(process, step + 1, bucket)

    def _look_for_stuck(self, process: Process, view: View, step: int) -> None:
        if process.plane is not view or process.applied >= step or process.is_reading:
            return
        if process.waiting is not None:
            process.waiting.append(lambda: self._look_for_stuck(process, view, step))
            return
        for rank, member in enumerate(view.members):
            if any(rank not in process.inbox.get((step, bucket), {}) for bucket in range(NUM_BUCKETS)):
                self.do(process, Evidence(member, Verdict.STUCK))

    # -- invariants ---------------------------------------------------------------------------------------------------

    def _check_view(self, process: Process, view: View) -> None:
        """A member goes on in a view."""
        known = self.views.setdefault(view.epoch, view)
        if known != view:
            raise Violation(f"1: view {view.epoch} has {known.members} and {view.members}")
        if known is not view:
            return
        view.validate()
        before = self.views.get(view.epoch - 1)
        if before is not None:
            self.seen["view"] += 1
            old = [each for host in before.hosts for each in host.members]
            new = [each for host in view.hosts for each in host.members]
            if [each for each in new if each in old] != [each for each in old if each in new]:
                raise Violation(f"6: those who go on change places: {old}, {new}")
        self._check_spares(before, view)
        if self.processes[view.members[0]].applied < view.base.stable_step:
            raise Violation(f"6: rank 0 of view {view.epoch} does not hold step {view.base.stable_step}")

    def _check_spares(self, before: View | None, view: View) -> None:
        """As many take samples as may; and nobody who does stops to, as long as it holds the state."""
        num_sharing = view.size - len(view.spares)
        if num_sharing != min(view.size, view.max_size - view.num_spares):
            raise Violation(f"13: {num_sharing} of {view.size} ranks take samples in view {view.epoch}")
        if 0 in view.spares:
            raise Violation(f"13: rank 0 of view {view.epoch} takes no samples")
        if before is None or not view.num_spares:
            return
        old, new = ({each.id: each.joined for host in one.hosts for each in host.members} for one in (before, view))
        for member, joined in new.items():
            was_spare, is_spare = (one.ranks.get(member) in one.spares for one in (before, view))
            if member in old and old[member] == joined and is_spare and not was_spare:
                raise Violation(f"13: {member} has taken samples, and is a spare in view {view.epoch}")

    def _check_relief(self, process: Process, view: View, missed: int) -> None:
        """A spare that takes samples in this view has had the state all the time."""
        before = self.views.get(view.epoch - 1)
        joined = {each.id: each.joined for host in view.hosts for each in host.members}[process.id]
        if before is None or joined == view.epoch or before.ranks.get(process.id) not in before.spares:
            return
        if view.ranks[process.id] not in view.spares:
            self.seen["relieved"] += 1
            if missed > 0:
                raise Violation(f"13: spare {process.id} lacks {missed} steps in view {view.epoch}")

    def _make_stable(self, process: Process) -> None:
        process.stable = process.applied
        if process.applied > len(self.stable):
            self._check_stable(process)
            self.stable = process.history
        if self.rules.checkpoints_are_stable:
            self._write_checkpoint(process)

    def _write_checkpoint(self, process: Process) -> None:
        """A member writes its state down, and may not know that it was left out; nobody takes that back."""
        known = self.checkpoints.setdefault(process.applied, process.history)
        if known != process.history:
            raise Violation(f"5: checkpoints of step {process.applied} hold {known} and {process.history}")

    def _check_stable(self, process: Process) -> None:
        both = min(process.applied, len(self.stable))
        if process.history[:both] != self.stable[:both]:
            raise Violation(f"4: {process.id} has {process.history}, stable is {self.stable}")

    # -- death, and how others notice ---------------------------------------------------------------------------------

    def _die(self, process: Process) -> None:
        if not process.is_alive:
            return
        self.note("dies", process.id, process.exit)
        process.is_alive, process.plane, process.waiting = False, None, None
        for other in self.processes.values():
            self._notice(other, process)

    def _sense(self, process: Process) -> None:
        """A process connects to the others, and sees who is not there."""
        for other in self.processes.values():
            if not other.is_alive or not self._both_ways(process.host, other.host):
                self._notice(process, other)

    def _both_ways(self, host: str, other: str) -> bool:
        return self._reaches(host, other) and self._reaches(other, host)

    def _notice(self, process: Process, other: Process) -> None:
        """Evidence of a death, or of silence, comes."""
        if process is other or not process.is_alive:
            return
        seconds = self.rng.random() * (0.1 if process.host == other.host else 0.05)
        if not self._both_ways(process.host, other.host):
            seconds = PEER_SECONDS + self.rng.random() * 0.2
        self.at(seconds, lambda: self._tell(process, other))

    def _tell(self, process: Process, other: Process) -> None:
        if self._both_ways(process.host, other.host):
            if not other.is_alive:
                self.do(process, Evidence(other.id, Verdict.DEAD))
        elif process.is_alive:
            self.do(process, Evidence(other.id, Verdict.UNREACHABLE))
            self._notice(process, other)

    # -- faults -------------------------------------------------------------------------------------------------------

    def _fault(self, kind: str) -> None:  # noqa: C901, PLR0912  one table
        members = [each for each in self.processes.values() if each.is_member]
        if not members:
            return
        victim = self.rng.choice(members)
        self.note("fault", kind, victim.id)
        self._fault_at = self.now
        self.seen[kind] += 1
        match kind:
            case "kill":
                self._die(victim)
            case "stop":
                self._stop(victim)
            case "cut" | "one way":
                self._cut(kind == "one way")
            case "link":
                self._cut_link()
            case "host":
                self._lose_host(victim.host)
            case "join":
                self._join()
            case "leave":
                self._leave(victim)
            case "all leave":
                for member in members:
                    self._leave(member)
            case "request":
                assert isinstance(victim.member, ElasticMember)
                self.do(victim, ChangeRequested(victim.member.view.epoch - self.rng.choice((0, 0, 1)), "asked for"))
            case "slow build":
                victim.build_seconds = self.rng.choice((0.5, 2.5, 20.0))  # less than `stuck`, `install`, and more
            case "tear":
                host = self.hosts[victim.host]
                host.tears = True
                host.slots[1] = encode_slot(1, host.acceptor)
                host.slots[0] = b""
            case "forget":
                host = self.hosts[self.rng.choice([*self.hosts])]
                name, life = host.acceptor.id
                host.acceptor, host.slots, host.tears = Acceptor(VoterId(name, life + 1)), [b""] * NUM_SLOTS, False
            case "pause":
                self._pause(self.hosts[self.rng.choice([*self.hosts])])

    def _leave(self, process: Process) -> None:
        process.wants_to_leave = True
        self.do(process, LeaveRequested())

    def _stop(self, process: Process) -> None:
        if process.waiting is None:
            process.waiting = deque()
            process.is_unkillable = self.rng.random() < 0.3
            self.at(self.rng.choice((0.1, 1.0, 2.5, 4.0)), lambda: self._wake(process))

    def _wake(self, process: Process) -> None:
        if process.waiting is None:
            return
        waiting, process.waiting = process.waiting, None
        for happened in waiting:
            if process.is_alive:
                happened()

    def _pause(self, host: Host) -> None:
        if host.waiting is None:
            host.waiting = deque()
            self.at(self.rng.choice((0.1, 1.0, 2.5)), lambda: self._resume(host))

    def _resume(self, host: Host) -> None:
        waiting, host.waiting = host.waiting or deque(), None
        for sender, message in waiting:
            self._vote(host, sender, message)

    def _cut(self, is_one_way: bool) -> None:
        names = [*self.hosts]
        side = set(self.rng.sample(names, self.rng.randint(1, max(1, len(names) - 1))))
        for one in side:
            for other in names:
                if other not in side:
                    self.cuts.add((one, other))
                    if not is_one_way:
                        self.cuts.add((other, one))
        self._see_cuts()
        if self.rng.random() < 0.5:
            self.at(self.rng.choice((0.2, 1.0, 3.0)), self.cuts.clear)

    def _cut_link(self) -> None:
        """Two hosts cannot reach each other any more; others reach both."""
        hosts = {each.host for each in self.processes.values() if each.is_member}
        if len(hosts) > 1:
            one, other = self.rng.sample(sorted(hosts), 2)
            self.cuts |= {(one, other), (other, one)}
            self._see_cuts()

    def _see_cuts(self) -> None:
        for process in self.processes.values():
            for peer in self.processes.values():
                if not self._both_ways(process.host, peer.host):
                    self._notice(process, peer)

    def _lose_host(self, name: str) -> None:
        self.dead_hosts.add(name)
        self.hosts[name].is_alive = False
        for process in self.processes.values():
            if process.host == name:
                self._die(process)

    def _join(self) -> None:
        """A process wants to become a member: in the place of one that is gone, or in a new one."""
        taken = {each.id.slot for each in self.processes.values() if each.is_alive}
        slot = min(set(range(len(taken) + 1)) - taken)
        incarnation = 1 + max(
            (each.id.incarnation for each in self.processes.values() if each.id.slot == slot), default=0
        )
        places = [host for host in self.hosts.values() if host.is_alive and host.name != "w"]
        host = self.rng.choice(places) if places and self.rng.random() < 0.5 else None
        if host is None:
            name = f"n{len(self.hosts)}"
            host = self.hosts[name] = Host(name, Acceptor(VoterId(name, 1)))
        self.start_candidate(MemberId(slot, incarnation), host)

    def start_candidate(self, me: MemberId, host: Host) -> None:
        """Start a process that wants to become a member."""
        alone = ViewHost(*host.acceptor.id, "", (ViewMember(*me, 1),))
        process = Process(me, host.name, ElasticCandidate(me, alone, TIMEOUTS.retry))
        self.processes[me] = process
        self._copy(process)

    def _copy(self, process: Process) -> None:
        """It gets the state from a member that runs; what it got may be wrong, and is then copied again."""
        if not process.is_alive or process.member.state not in {CandidateState.LOBBY, CandidateState.COPYING}:
            return
        sources = [each for each in self.processes.values() if each.is_member and self._can_fetch(process, each)]
        if sources:
            source = self.rng.choice(sources)
            view = source.member.view
            assert view is not None
            if process.member.state is CandidateState.LOBBY:
                self.do(process, CopyStarted(view))
            stable = source.stable if self.rules.copies_are_stable else source.applied
            process.history, process.stable = source.history[:stable], stable
            if self.rng.random() < 0.8:
                self.seen["joined"] += 1
                self.do(process, Copied(stable, matches=True))
                return
            process.history = (-1,) * stable
            self.do(process, Copied(stable, matches=False))
        self.at(0.2, lambda: self._copy(process))

    # -- the end ------------------------------------------------------------------------------------------------------

    def _calm(self) -> None:
        """No more faults: what was stopped runs again, networks are whole."""
        self.note("calm")
        self.is_calm = True
        if self.plan.heals:
            self.cuts.clear()
        for process in list(self.processes.values()):
            process.build_seconds = 0.0
            self._wake(process)
        for host in self.hosts.values():
            self._resume(host)

    def _members(self) -> list[Process]:
        return [each for each in self.processes.values() if each.is_member]

    def _is_settled(self) -> bool:
        members = self._members()
        if not members:
            return True
        states = {each.member.state for each in members}
        views = {each.member.view.epoch for each in members if each.member.view is not None}
        if len(views) != 1 or not states <= {ElasticState.RUNNING, ElasticState.WAITING}:
            return False
        view = self.views[views.pop()]
        if {each.id for each in members} != set(view.members):
            return False
        return ElasticState.WAITING in states or self.steps_since_calm > len(members)

    def _check_end(self, settled: bool) -> None:
        members = self._members()
        if not settled:
            stuck = [(each.id, each.member.state, each.member.reason, each.member.lost) for each in members]
            raise Violation(f"7: after {SETTLE_SECONDS} s there are still {stuck}")
        latest = self.views[max(self.views)]
        self.seen["goes on" if members else "ends"] += 1
        for step, held in self.checkpoints.items():
            if held != self.stable[:step]:
                raise Violation(f"5: a checkpoint holds {held}, stable is {self.stable}")
        for process in self.processes.values():
            if process.exit is not None and not process.exit.reason:
                raise Violation(f"10: {process.id} does not say why it ends")
        # of members that wait one has done so the longest, and the others end with it
        waits_since = min(self.processes[each].waits_since for each in latest.ranks)
        holders = [
            each
            for each in self.processes.values()
            if each.id in latest.ranks
            and each.member.state is ElasticState.STOPPED
            and not each.wants_to_leave
            # A view with too few members may be built for so long that it begins when the time for more is over.
            and not (latest.size < latest.min_size and each.ended_at - waits_since >= TIMEOUTS.wait)
        ]
        if not members and any(each.applied >= latest.base.stable_step for each in holders) and self._may_go_on(latest):
            raise Violation(f"7: all have ended, and view {latest.epoch} has a quorum")

    def _may_go_on(self, view: View) -> bool:
        """Whether a view's voters are there, and those of any view that may follow it.

        Until somebody has begun a view, its members may have to learn of it from the voters of the one before.
        """
        needed = [*self._possible(view)]
        while view.epoch not in self.bases and view.epoch > 1:
            view = self.views[view.epoch - 1]
            needed.append(view)
        alive = {host.acceptor.id for host in self.hosts.values() if host.is_alive}
        return all(
            each.has_quorum(number for number, voter in enumerate(each.voters) if voter in alive)[0] for each in needed
        )

    def _possible(self, view: View) -> Iterator[View]:
        yield view
        for host in self.hosts.values():
            value = host.acceptor.value
            if host.is_alive and value is not None and value.epoch == view.epoch + 1:
                yield value


def play(seed: int, rules: Rules | None = None, plan: Plan | None = None) -> Simulator:
    """Run the schedule of a seed; a Violation tells its story."""
    simulator = Simulator(seed, rules, plan)
    try:
        return simulator.run()
    except AssertionError as error:
        again = Simulator(seed, rules, plan, log=[])
        try:
            again.run()
        except AssertionError:
            story = "\n".join(again.log or [])
            raise Violation(f"seed {seed}: {error}\n{story[-20_000:]}") from error
        raise
