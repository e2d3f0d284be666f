"""All that can happen to a few members of an elastic job and their voters, with a few faults at any moment: every order
of messages, of evidence, and of what planes do. Members, leaders and voters are the real ones.

What was sent may be delivered whenever, again, or never: so delay, loss, duplication and partitions are all there, in
any number. Deaths and wrong evidence are counted.

A member and a voter do the same in the same state, so what each of them does is computed once, and a state of the whole
is a tuple of numbers. Timers by which others are given up end when nothing else can happen.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from reigen.cluster.membership.views.events import (
    BuildLayouts,
    EndProcess,
    Evidence,
    KillMember,
    LayoutsBuilt,
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
from reigen.cluster.membership.views.leader import ChangeLeader
from reigen.cluster.membership.views.member import ElasticMember, ElasticState
from reigen.cluster.membership.views.messages import HeldSums, StepProgress
from reigen.cluster.membership.views.paxos import Acceptor
from reigen.cluster.membership.views.record import MemberId, SamplePosition, View, VoterId

DEAD = -1
_SETTLED = {ElasticState.RUNNING, ElasticState.WAITING}


class Violated(AssertionError):
    """An invariant does not hold."""


class Plane(NamedTuple):
    """What a member has applied: for each step the view in which it was made; and where it contributes."""

    history: tuple[int, ...] = ()
    running: int = 0
    #: (view, step) of its latest contribution
    contributed: tuple[int, int] = (0, 0)


class Known(NamedTuple):
    """What has happened so far: views that were installed, with what they began, and what is stable."""

    views: frozenset[tuple[int, int]] = frozenset()
    bases: frozenset[tuple[int, tuple[int, ...]]] = frozenset()
    stable: tuple[int, ...] = ()


class State(NamedTuple):
    """One state of all.

    Attributes:
        members: numbers of members' states; `DEAD`.
        voters: numbers of voters' states; `DEAD`.
        planes: of the members.
        pending: numbers of what may happen next.
        known: see there.
        kills, suspicions: that are left.
    """

    members: tuple[int, ...]
    voters: tuple[int, ...]
    planes: tuple[Plane, ...]
    pending: frozenset[int]
    known: Known
    kills: int
    suspicions: int


@dataclass(frozen=True)
class Happening:
    """What may happen to a member, or to the voter of a host."""

    member: int
    host: int
    event: Any


def clone(thing: Any) -> Any:
    """A copy of a state machine that shares only what does not change."""
    made = copy.copy(thing)
    for name, value in vars(thing).items():
        if isinstance(value, dict | set):
            setattr(made, name, copy.copy(value))
        elif isinstance(value, Installation | ChangeLeader):
            setattr(made, name, clone(value))
    return made


def freeze(thing: Any) -> Any:
    """What tells two states of a state machine apart."""
    if isinstance(thing, dict):
        return tuple((freeze(key), freeze(value)) for key, value in thing.items())
    if isinstance(thing, set):
        return frozenset(thing)
    if isinstance(thing, ElasticMember | Installation | ChangeLeader):
        skipped = {"reason", "_timeouts"}
        return tuple((name, freeze(value)) for name, value in vars(thing).items() if name not in skipped)
    return thing


class Exploration:
    """Visits every state that follows a first one.

    Args:
        view: whose members run.
        kills: processes that die at any moment, at most.
        suspicions: wrong evidence at any moment that somebody cannot be reached, at most.
        attempts: of a leader that is preempted, at most.
        steps: that are run, at most.
        most_states: at which it ends; 0: none.
        seed: of the order in which states are visited.
    """

    def __init__(
        self,
        view: View,
        *,
        kills: int = 1,
        suspicions: int = 0,
        attempts: int = 2,
        steps: int = 2,
        most_states: int = 0,
        seed: int = 0,
    ) -> None:
        self._seed = seed
        self.view, self._steps, self._most_states = view, steps, most_states
        self._first, self._attempts = (kills, suspicions), attempts
        self._ids: dict[Any, int] = {}
        self._things: list[Any] = []
        self._machines: dict[int, ElasticMember] = {}
        self._handled: dict[tuple[int, Any], tuple[int, tuple[Any, ...]]] = {}
        self.num_states = self.num_ends = 0
        self.is_complete = True

    def _id(self, thing: Any) -> int:
        number = self._ids.setdefault(thing, len(self._things))
        if number == len(self._things):
            self._things.append(thing)
        return number

    def _keep(self, member: ElasticMember) -> int:
        number = self._id(freeze(member))
        self._machines.setdefault(number, member)
        return number

    def run(self) -> Exploration:
        """Visit all states, deep ones soon; raises `Violated`."""
        first = self._begin()
        seen, waiting, rng = {first}, [first], random.Random(self._seed)
        while waiting:
            if self._most_states and len(seen) >= self._most_states:
                self.is_complete = False
                break
            place = rng.randrange(len(waiting)) if rng.random() < 0.3 else -1
            waiting[place], waiting[-1] = waiting[-1], waiting[place]
            state = waiting.pop()
            following = {*self._following(state)} - {state}
            if not following:
                following = {self._give_up(state)} - {state}
                if not following:
                    self.num_ends += 1
                    self._check_end(state)
            for each in following:
                if each not in seen:
                    seen.add(each)
                    waiting.append(each)
        self.num_states = len(seen)
        return self

    def _begin(self) -> State:
        """All members run, and nothing is under way."""
        members, planes = [], []
        for me in self.view.members:
            member = ElasticMember(me, self.view)
            member.start()
            member.state = ElasticState.RUNNING
            member._installation.advance()
            member._installation.installed.update(self.view.members)
            members.append(self._keep(member))
            planes.append(Plane((), self.view.epoch, (self.view.epoch, 1)))
        voters = tuple(self._id(Acceptor(voter, self.view)) for voter in self.view.voters)
        known = Known(frozenset({(self.view.epoch, self._id(self.view))}))
        return State(tuple(members), voters, tuple(planes), frozenset(), known, *self._first)

    # -- what may happen ----------------------------------------------------------------------------------------------

    def _following(self, state: State) -> Iterator[State]:
        """Yield states that follow; a message that changes nothing leads to the same one."""
        for number in state.pending:
            happening: Happening = self._things[number]
            is_message = isinstance(happening.event, Received)
            rest = state if is_message else state._replace(pending=state.pending - {number})
            if happening.member < 0:
                yield self._vote(rest, happening)
            elif (after := self._happen(rest, happening)) is not None:
                yield after
        for place, member in enumerate(state.members):
            if member != DEAD:
                yield from self._apply(state, place)
                if state.kills:
                    yield self._die(state._replace(kills=state.kills - 1), place)
                if state.suspicions:
                    for other in self.view.members:
                        if other != self.view.members[place]:
                            fewer = state._replace(suspicions=state.suspicions - 1)
                            yield self._handle(fewer, place, Evidence(other, Verdict.UNREACHABLE))

    def _give_up(self, state: State) -> State:
        """Who waits gives up those who are silent."""
        for place, member in enumerate(state.members):
            if member != DEAD:
                state = self._handle(state, place, TimerFired(ViewTimer.STUCK))
        return state

    def _happen(self, state: State, happening: Happening) -> State | None:
        """Something happens to a member; None: it cannot, now."""
        place, event = happening.member, happening.event
        if state.members[place] == DEAD:
            return None
        plane = state.planes[place]
        if isinstance(event, PlaneRevoked):
            step = len(plane.history)
            held = HeldSums(0, (), 1)
            event = PlaneRevoked(
                event.epoch, StepProgress(step, SamplePosition(0, step), SamplePosition(0, step + 1), held)
            )
            state = self._with_plane(state, place, plane._replace(running=0))
        elif isinstance(event, Rolled):
            rolled = self._roll(state, place, event.epoch)
            if rolled is None:
                return None
            state = rolled
        return self._handle(state, place, event)

    def _with_plane(self, state: State, place: int, plane: Plane) -> State:
        return state._replace(planes=(*state.planes[:place], plane, *state.planes[place + 1 :]))

    def _roll(self, state: State, place: int, epoch: int) -> State | None:
        member = self._machines[state.members[place]]
        if member.view.epoch != epoch or member.state is not ElasticState.ROLLING:
            return state
        base, plane = member.view.base, state.planes[place]
        history = plane.history
        if len(history) < base.step:
            sources = [self._place(each) for rank, each in enumerate(member.view.members) if rank not in base.behind]
            alive = [each for each in sources if state.members[each] != DEAD]
            if not alive:
                return None
            history += state.planes[alive[0]].history[len(history) : base.step]
        if len(history) != base.target:
            raise Violated(f"4: {member.me} begins view {epoch} at step {len(history)}")
        begun = dict(state.known.bases)
        if begun.setdefault(epoch, history) != history:
            raise Violated(f"3: {member.me} begins view {epoch} with {history}, others with {begun[epoch]}")
        if history[: len(state.known.stable)] != state.known.stable:
            raise Violated(f"4: {member.me} begins with {history}, stable is {state.known.stable}")
        state = state._replace(known=state.known._replace(bases=frozenset(begun.items())))
        return self._with_plane(state, place, plane._replace(history=history))

    def _place(self, member: MemberId) -> int:
        return self.view.ranks[member]

    def _apply(self, state: State, place: int) -> Iterator[State]:
        """A member applies a step to which all members of its view have contributed."""
        plane = state.planes[place]
        step = len(plane.history) + 1
        if not plane.running or step > self._steps:
            return
        view = self._view(state, plane.running)
        others = [state.planes[self._place(member)].contributed for member in view.members]
        if all(contributed[0] == plane.running and contributed[1] >= step for contributed in others):
            known = state.known
            if len(plane.history) > len(known.stable):
                known = known._replace(stable=plane.history)
            plane = Plane((*plane.history, plane.running), plane.running, (plane.running, step + 1))
            after = self._with_plane(state._replace(known=known), place, plane)
            yield self._handle(after, place, StepApplied(step))

    def _view(self, state: State, epoch: int) -> View:
        return next(self._things[number] for each, number in state.known.views if each == epoch)

    def _die(self, state: State, place: int) -> State:
        members = (*state.members[:place], DEAD, *state.members[place + 1 :])
        me = self.view.members[place]
        evidence = {
            self._id(Happening(other, 0, Evidence(me, Verdict.DEAD)))
            for other, each in enumerate(members)
            if each != DEAD
        }
        return state._replace(members=members, pending=state.pending | evidence)

    # -- state machines -----------------------------------------------------------------------------------------------

    def _handle(self, state: State, place: int, event: Any) -> State:
        """A member handles an event; its actions are what may happen next."""
        before = state.members[place]
        if (before, event) not in self._handled:
            member = clone(self._machines[before])
            actions = member.handle(event)
            member.validate()
            self._handled[before, event] = self._keep(member), tuple(actions)
        after, actions = self._handled[before, event]
        state = state._replace(members=(*state.members[:place], after, *state.members[place + 1 :]))
        member = self._machines[after]
        if member.view is not self._machines[before].view:
            state = self._install(state, member)
        pending: set[int] = set()
        for action in actions:
            for happening in self._begun(state, place, action):
                pending.add(self._id(happening))
            state = self._done(state, place, action)
        return state._replace(pending=state.pending | pending)

    def _begun(self, state: State, place: int, action: Any) -> Iterator[Happening]:
        """What an action begins."""
        me = self.view.members[place]
        match action:
            case SendTo(VoterId() as receiver, message):
                yield Happening(-1 - place, self.view.voters.index(receiver), Received(me, message))
            case SendTo(receiver, message) if state.members[self._place(receiver)] != DEAD:
                yield Happening(self._place(receiver), 0, Received(me, message))
            case RevokePlane(epoch):
                empty = StepProgress(0, SamplePosition(0, 0), SamplePosition(0, 0), HeldSums(0))
                yield Happening(place, 0, PlaneRevoked(epoch, empty))
            case BuildLayouts(view):
                yield Happening(place, 0, LayoutsBuilt(view.epoch))
            case RollTo(view):
                yield Happening(place, 0, Rolled(view.epoch))
            case StartTimer(ViewTimer.BACK_OFF as timer):
                if self._attempt(self._machines[state.members[place]]) < self._attempts:
                    yield Happening(place, 0, TimerFired(timer))
            case StartTimer(ViewTimer.KILL as timer):
                yield Happening(place, 0, TimerFired(timer))

    def _done(self, state: State, place: int, action: Any) -> State:
        """What an action does at once."""
        match action:
            case RunView(view):
                plane = state.planes[place]
                contributed = view.epoch, len(plane.history) + 1
                return self._with_plane(state, place, plane._replace(running=view.epoch, contributed=contributed))
            case EndProcess():
                return self._die(state, place)
            case KillMember(victim) if state.members[self._place(victim)] != DEAD:
                return self._die(state, self._place(victim))
        return state

    def _attempt(self, member: ElasticMember) -> int:
        return 0 if member._leader is None else member._leader.proposer.ballot.attempt

    def _install(self, state: State, member: ElasticMember) -> State:
        view, known = member.view, dict(state.known.views)
        if known.setdefault(view.epoch, self._id(view)) != self._id(view):
            raise Violated(f"1: view {view.epoch} has {view.members}, and {self._view(state, view.epoch).members}")
        view.validate()
        if len(state.planes[self._place(view.members[0])].history) < view.base.stable_step:
            raise Violated(f"6: rank 0 of view {view.epoch} does not hold step {view.base.stable_step}")
        return state._replace(known=state.known._replace(views=frozenset(known.items())))

    def _vote(self, state: State, happening: Happening) -> State:
        voter = state.voters[happening.host]
        key = voter, happening.event.message
        if key not in self._handled:
            acceptor, reply = self._things[voter].handle(happening.event.message)
            self._handled[key] = self._id(acceptor), (reply,) if reply is not None else ()
        after, replies = self._handled[key]
        voters = (*state.voters[: happening.host], after, *state.voters[happening.host + 1 :])
        place = -1 - happening.member
        pending = {
            self._id(Happening(place, 0, Received(self.view.voters[happening.host], reply)))
            for reply in replies
            if state.members[place] != DEAD
        }
        return state._replace(voters=voters, pending=state.pending | pending)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _check_end(self, state: State) -> None:
        """Nothing can happen any more: all that live run in one view of theirs."""
        alive = [self._machines[member] for member in state.members if member != DEAD]
        for member in alive:
            if member.state not in _SETTLED or set(member.view.members) != {each.me for each in alive}:
                found = [(each.me, each.state, each.view.epoch, each.reason) for each in alive]
                raise Violated(f"7: nothing happens any more, and there are {found}")
        if len({member.view.epoch for member in alive}) > 1:
            raise Violated(f"2: members run in views {[member.view.epoch for member in alive]}")
