"""All that can happen to the decisions about views among a few voters and leaders: every order of every message, which
comes any number of times or never, and leaders that give up an attempt at any moment. Acceptors and proposers are the
real ones.

What was sent may be delivered whenever, again, or never: so delay, loss, duplication, partitions, and the death or stop
of leaders and voters at any moment are all there, in any number. A voter's death is an event of its own only where it
matters: where somebody counts without the dead, or where memory is lost.

Two things keep the number of states small, and lose nothing. What a leader has been promised matters when it proposes:
so it proposes on any set of the promises that were sent, and does not collect them one by one. And a view is decided
when a quorum has accepted it, whether or not the leader hears of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import msgspec

from reigen.cluster.membership.views.messages import (
    AcceptView,
    Ballot,
    ViewAccepted,
    ViewDecided,
    ViewPromise,
)
from reigen.cluster.membership.views.paxos import Acceptor, Proposer
from reigen.cluster.membership.views.quorum import QuorumRule
from reigen.cluster.membership.views.record import StepBase, View, ViewHost, ViewMember, Witness


def make_view(num_hosts: int, *, witness: bool = False, ranks_each: int = 1) -> View:
    """The first view of a job on some hosts."""
    hosts = [
        ViewHost(f"h{host}", 1, "", tuple(ViewMember(host * ranks_each + rank, 1, 1) for rank in range(ranks_each)))
        for host in range(num_hosts)
    ]
    view = View.make(1, hosts, base=StepBase(), sizes=(1, 100), witness=Witness("w", 1, "") if witness else None)
    view.validate()
    return view


def without(view: View, host: int) -> View:
    """What a leader proposes that takes a host for lost; another one of each leader."""
    hosts = [each for number, each in enumerate(view.hosts) if number != host]
    base = StepBase(view.epoch * 10 + host)
    return View.make(view.epoch + 1, hosts, base=base, sizes=(1, 100), witness=view.witness)


@dataclass(frozen=True)
class Voter:
    """A voter, its promises, and the numbers of the requests that it has ever accepted."""

    acceptor: Acceptor
    promises: frozenset[ViewPromise] = frozenset()
    accepted: frozenset[int] = frozenset()
    is_dead: bool = False


@dataclass(frozen=True)
class Leader:
    """A leader: attempts that it may still make, the present one, and the numbers of all requests that it has sent."""

    rank: int
    attempts: int
    proposer: Proposer | None = None
    sent: frozenset[int] = frozenset()
    has_proposed: bool = False


class TwoDecisions(AssertionError):
    """Two views were decided for one epoch."""


@dataclass
class Search:
    """A search through all states.

    Voters that no rule tells apart count as the same: of states in which these have changed places, one is visited.

    Args:
        view: the first one, whose voters decide; all are told of it.
        leaders: ranks that lead.
        attempts: of each leader, at most.
        epochs: how many views are to be decided, one after the other.
        kills: voters that die at most; only for rules by which that counts.
        forgets: who has died comes back, without its memory.
        most_states: at which the search ends; 0: none.
        make_ballot: of attempt and rank.
        has_quorum: a rule that is not the view's, of a view, voters and dead voters.
    """

    view: View
    leaders: tuple[int, ...] = (0, 1)
    attempts: tuple[int, ...] = (1, 1)
    epochs: int = 1
    kills: int = 0
    forgets: bool = False
    most_states: int = 0
    make_ballot: Callable[[int, int], Ballot] = Ballot
    has_quorum: Callable[[View, frozenset[int], frozenset[int]], bool] | None = None
    #: who a voter is shows in its answers alone
    are_voters_equal: bool = True
    num_states: int = 0
    num_transitions: int = 0
    is_complete: bool = True
    #: (epoch, number) of views that were decided in some state
    decided: set[View] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._ids: dict[Any, int] = {}
        self._things: list[Any] = []
        self._handled: dict[tuple[int, int], int] = {}
        self._proposals: dict[tuple[Any, ...], list[int]] = {}
        self._quorums: dict[Any, bool] = {}
        self._num_voters = len(self.view.voters)
        #: voters from this one on are the same to every rule
        self._first_equal = 1 if self.view.rule is QuorumRule.FIRST_HOST or self.has_quorum is not None else 0

    def _id(self, thing: Any) -> int:
        number = self._ids.setdefault(thing, len(self._things))
        if number == len(self._things):
            self._things.append(thing)
        return number

    def run(self) -> Search:
        """Visit every state; raises `TwoDecisions`."""
        names = self.view.voters
        same = self.are_voters_equal and self.epochs == 1  # in later views they have other numbers
        first_equal = names[self._first_equal]
        acceptors = [Acceptor(first_equal if same and n >= self._first_equal else name) for n, name in enumerate(names)]
        voters = [self._id(Voter(acceptor.handle(ViewDecided(1, self.view))[0])) for acceptor in acceptors]
        first = (*voters, *(self._id(Leader(*each)) for each in zip(self.leaders, self.attempts, strict=True)))
        seen, waiting = {first}, [first]
        while waiting:
            if self.most_states and len(seen) >= self.most_states:
                self.is_complete = False
                break
            for following in self._following(waiting.pop()):
                self.num_transitions += 1
                state = self._sorted(following) if same else following
                if state not in seen:
                    seen.add(state)
                    waiting.append(state)
        self.num_states = len(seen)
        return self

    def _sorted(self, state: tuple[int, ...]) -> tuple[int, ...]:
        first, last = self._first_equal, self._num_voters
        return (*state[:first], *sorted(state[first:last]), *state[last:])

    def _following(self, state: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        voters, leaders = state[: self._num_voters], state[self._num_voters :]
        sent = sorted({request for leader in leaders for request in self._things[leader].sent})
        dead = frozenset(place for place, voter in enumerate(voters) if self._things[voter].is_dead)
        decided = self._check(voters, sent, dead)
        if self.epochs > 1:
            sent += [self._id(ViewDecided(view.epoch, view)) for view in decided]
        for place, voter in enumerate(voters):
            for request in sent:
                after = self._handle(voter, request)
                if after != voter:
                    yield (*state[:place], after, *state[place + 1 :])
            if len(dead) < self.kills and place not in dead:
                yield (*state[:place], self._kill(voter), *state[place + 1 :])
        for place, leader in enumerate(leaders, self._num_voters):
            for after in self._lead(leader, voters, dead, decided):
                yield (*state[:place], after, *state[place + 1 :])

    # -- voters

    def _handle(self, voter: int, request: int) -> int:
        key = voter, request
        if key not in self._handled:
            before: Voter = self._things[voter]
            acceptor, reply = before.acceptor.handle(self._things[request])
            after = replace(before, acceptor=acceptor)
            if isinstance(reply, ViewPromise):
                after = replace(after, promises=before.promises | {msgspec.structs.replace(reply, voter=0)})
            elif isinstance(reply, ViewAccepted):
                after = replace(after, accepted=before.accepted | {request})
            self._handled[key] = voter if before.is_dead else self._id(after)
        return self._handled[key]

    def _kill(self, voter: int) -> int:
        before: Voter = self._things[voter]
        if self.forgets:
            return self._id(replace(before, acceptor=Acceptor(before.acceptor.id, self.view)))
        return self._id(replace(before, is_dead=True))

    # -- leaders

    def _lead(self, leader: int, voters: tuple[int, ...], dead: frozenset[int], decided: list[View]) -> list[int]:
        """What a leader may do: begin an attempt, in any view that was decided; propose on any promises."""
        before: Leader = self._things[leader]
        member = self.view.members[before.rank]
        total = self.attempts[self.leaders.index(before.rank)]
        found = []
        for view in (self.view, *decided):
            is_later = before.proposer is None or view.epoch >= before.proposer.view.epoch
            if before.attempts and is_later and member in view.ranks and view.epoch <= self.epochs:
                proposer = Proposer(view, self.make_ballot(1 + total - before.attempts, view.ranks[member]))
                sent = before.sent | {self._id(proposer.request())}
                found.append(self._id(Leader(before.rank, before.attempts - 1, proposer, sent)))
        if before.proposer is not None and not before.has_proposed:
            found += self._propose(leader, before.proposer, voters, dead)
        return found

    def _propose(self, leader: int, proposer: Proposer, voters: tuple[int, ...], dead: frozenset[int]) -> list[int]:
        promises = []
        for place, voter in enumerate(voters):
            for promise in self._things[voter].promises:
                if (promise.epoch, promise.ballot) == (proposer.epoch, proposer.ballot):
                    number = self._number(proposer.view, place)
                    promises.append((number, self._id(promise)))
        key = leader, tuple(promises), dead
        if key not in self._proposals:
            found: set[int] = set()
            for count in range(1, len(promises) + 1):
                for chosen in combinations(promises, count):
                    found.update(self._propose_on(leader, proposer, dict(chosen), dead))
            self._proposals[key] = sorted(found)
        return self._proposals[key]

    def _number(self, view: View, place: int) -> int:
        """Number in a view of a voter of the first view; -1: it does not vote there."""
        voter = self.view.voters[place]
        return view.voters.index(voter) if voter in view.voters else -1

    def _propose_on(
        self, leader: int, proposer: Proposer, promises: dict[int, int], dead: frozenset[int]
    ) -> Iterator[int]:
        if not self._is_quorum(proposer.view, frozenset(promises), dead):
            return
        before: Leader = self._things[leader]
        for number, promise in promises.items():
            proposer = proposer.take(msgspec.structs.replace(self._things[promise], voter=number))
        lost = (proposer.view.ranks[self.view.members[before.rank]] + 1) % len(proposer.view.hosts)
        value = proposer.adopted or without(proposer.view, lost)
        request = self._id(AcceptView(proposer.epoch, proposer.ballot, value))
        yield self._id(replace(before, sent=before.sent | {request}, has_proposed=True))

    def _is_quorum(self, view: View, voters: frozenset[int], dead: frozenset[int]) -> bool:
        key = self._id(view), voters, dead
        if key not in self._quorums:
            if self.has_quorum is not None:
                self._quorums[key] = self.has_quorum(view, voters, dead)
            else:
                self._quorums[key] = Proposer(view, Ballot(1, 0), promised_by=voters).may_propose[0]
        return self._quorums[key]

    # -- the invariant

    def _check(self, voters: tuple[int, ...], sent: list[int], dead: frozenset[int]) -> list[View]:
        """The views that are decided: at most one of each epoch."""
        views = [self.view]
        for epoch in range(2, self.epochs + 2):
            decided = None
            for number in sent:
                request = self._things[number]
                if isinstance(request, AcceptView) and request.epoch == epoch:
                    by = [place for place, voter in enumerate(voters) if number in self._things[voter].accepted]
                    answered = frozenset(self._number(views[-1], place) for place in by)
                    if by and self._is_quorum(views[-1], answered, dead):
                        if decided is not None and decided != request.value:
                            raise TwoDecisions(f"view {epoch} has {decided.members}, and {request.value.members}")
                        decided = request.value
            if decided is None:
                break
            views.append(decided)
        self.decided.update(views[1:])
        return views[1:]
