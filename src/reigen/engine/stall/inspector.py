"""Stall inspector, which decides when a waiting collective is a stall: pure, without clock or I/O.

A. A collective that has waited for ``check_seconds`` is a stall. The inspector wants to know where its missing ranks
   are, and those for which they wait in turn (`QueryRanks`). It waits for their answers for two seconds.
B. Then it warns (`WarnStall`), of this collective and all that wait for the same ranks and have waited for half as
   long: a rank that is missing in one is missing in many. What was warned of is warned of again after two, four, eight,
   ... times as long.
C. When what was warned of waits no longer, that is reported, too (`StallResolved`), unless its deadline is why.
D. A collective that has waited for ``shutdown_seconds`` ends the job (`AbortStalled`), once the ranks have answered as
   in A. If that is less than ``check_seconds`` there is no warning before.

E. All this is rank 0's work. Rank 1, when it has waited for ``check_seconds`` itself, asks whether rank 0 answers, and
   warns or gives up in its place if it does not (`CoordinatorMonitor`).

F. Where every rank has submitted something that waits, no rank may be left that computes: after two seconds all ranks
   are asked. A rank cannot go on if the thread that trains is blocked in one of these collectives and no other thread
   runs code of the program. Where that holds for all, twice, and nothing has come in between, no rank can ever submit
   what the others wait for: that is warned of at once (`WarnStall`, with ``is_deadlock``). While it does not hold,
   the next question comes after twice the time.

Who has joined is not missing, and a join that waits is no stall: both follow from what the coordinator says waits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from reigen.engine.stall.stack_sampler import StackSample
from reigen.errors import format_ranks

#: How long the answers may take.
ANSWER_TIMEOUT_SECONDS = 2.0
#: How long something waits before all ranks are asked whether they can go on.
_DEADLOCK_SECONDS = 2.0
#: The longest time between two looks, in a job that has outstanding collectives.
_CHECK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class PendingCollective:
    """A collective that waits for ranks.

    Attributes:
        name: the collective's.
        kind: which one, in lower case.
        process_set: whose ranks take part.
        since: when the first rank came, on the clock of all times here.
        ready: ranks that have come.
        missing: ranks that have not.
        is_running: all ranks had submitted it, and the missing ones do not take their part in moving its data.
    """

    name: str
    kind: str
    process_set: int
    since: float
    ready: tuple[int, ...]
    missing: tuple[int, ...]
    is_running: bool = False

    @property
    def key(self) -> tuple[str, bool, float]:
        """Key that differs from that of an earlier or later wait of the same name."""
        return self.name, self.is_running, self.since


@dataclass(frozen=True, slots=True)
class QueryRanks:
    """Instruction: ask these ranks where they are; tell `StallInspector.answered` under this number."""

    number: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stall:
    """Findings about stalled collectives, when the ranks asked have answered or had their time.

    Attributes:
        waits: what is stalled, oldest first.
        others: what else waits.
        answers: where the ranks are that answered.
        silent: ranks that did not.
        now: the time.
        is_deadlock: every rank of the job is blocked in one of ``waits``.
    """

    waits: tuple[PendingCollective, ...]
    others: tuple[PendingCollective, ...]
    answers: Mapping[int, StackSample]
    silent: tuple[int, ...]
    now: float
    is_deadlock: bool = False

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that are missing in any of them."""
        return tuple(sorted({rank for wait in self.waits for rank in wait.missing}))

    def cycle(self) -> tuple[tuple[PendingCollective, int], ...]:
        """``((a, rank), (b, rank), ...)``: a lacks the rank, which waits in b, ..., which waits in a. Or nothing."""
        by_name = {wait.name: wait for wait in (*self.others, *self.waits)}
        for first in self.waits:
            path: list[tuple[PendingCollective, int]] = []
            if self._closes(first, path, set(), by_name):
                return tuple(path)
        return ()

    def _closes(
        self,
        wait: PendingCollective,
        path: list[tuple[PendingCollective, int]],
        seen: set[str],
        by_name: Mapping[str, PendingCollective],
    ) -> bool:
        seen.add(wait.name)
        for rank in wait.missing:
            answer = self.answers.get(rank)
            following = by_name.get(answer.blocked_in) if answer is not None else None
            if following is None:
                continue
            path.append((wait, rank))
            begun = [member.name for member, _ in path]
            if following.name in begun:
                del path[: begun.index(following.name)]
                return True
            if following.name not in seen and self._closes(following, path, seen, by_name):
                return True
            path.pop()
        return False


@dataclass(frozen=True, slots=True)
class WarnStall:
    """Instruction: warn the user."""

    stall: Stall


@dataclass(frozen=True, slots=True)
class StallResolved:
    """Instruction: inform the user that these, of which he was warned, wait no longer."""

    waits: tuple[PendingCollective, ...]
    now: float


@dataclass(frozen=True, slots=True)
class AbortStalled:
    """Instruction: end the job."""

    stall: Stall


StallAction = QueryRanks | WarnStall | StallResolved | AbortStalled


@dataclass(slots=True)
class _WarnedCollective:
    wait: PendingCollective
    times: int
    next: float


@dataclass(slots=True)
class _RankQuery:
    number: int
    ranks: tuple[int, ...]
    until: float
    #: what waited when all ranks were asked by step F
    waits: tuple[PendingCollective, ...] = ()
    answers: dict[int, StackSample] = field(default_factory=dict)

    def is_over(self, now: float) -> bool:
        return len(self.answers) == len(self.ranks) or now >= self.until

    def finds_all_blocked(self, waits: Sequence[PendingCollective]) -> bool:
        """Return whether no rank can go on, given all that waits now."""
        if self.waits != tuple(waits):
            return False  # something was submitted, or begun, since
        ready = {wait.name: wait.ready for wait in waits}
        return all(
            (answer := self.answers.get(rank)) is not None
            and rank in ready.get(answer.blocked_in, ())
            and not (answer.threads or answer.running)
            for rank in self.ranks
        )


class StallInspector:
    """Stalls as rank 0 knows them.

    Args:
        check_seconds: from when on a wait is a stall.
        shutdown_seconds: from when on it ends the job; 0 for never.
        deadline_seconds: what has waited for so long has been refused, so it is not over.
        ranks: all ranks of the job; none: it is not looked for deadlocks (step F).
    """

    def __init__(
        self,
        check_seconds: float,
        shutdown_seconds: float,
        deadline_seconds: float = math.inf,
        ranks: Sequence[int] = (),
    ) -> None:
        self._shutdown = shutdown_seconds or math.inf
        self._check = min(check_seconds, self._shutdown)
        self._deadline = deadline_seconds
        self._interval = min(_CHECK_SECONDS, self._check / 4)
        #: stalls that were warned of
        self._warned: dict[tuple[str, bool, float], _WarnedCollective] = {}
        self._query: _RankQuery | None = None
        self._num_queries = 0
        self._next_look = 0.0
        self._ranks = tuple(ranks)
        #: from what age of a wait all ranks are asked, and not before when
        self._recheck_seconds, self._not_before = _DEADLOCK_SECONDS, 0.0
        #: how often in succession all ranks were found blocked
        self._num_blocked = 0

    @property
    def next_look(self) -> float:
        """Return when to call `look`; not needed before. After a warning always, to see when it is over."""
        return 0.0 if self._warned else self._next_look

    def due(self, oldest: float | None) -> float:
        """Return when to call `look` at the latest, if no event comes; ``oldest``: since when anything waits."""
        if self._warned or self._query is not None:
            return self._next_look
        first = min(self._check, _DEADLOCK_SECONDS) if self._ranks else self._check
        return math.inf if oldest is None else max(self._next_look, oldest + first)

    def answered(self, rank: int, number: int, answer: StackSample) -> None:
        """A rank has said where it is."""
        query = self._query
        if query is not None and query.number == number and rank in query.ranks:
            query.answers[rank] = answer
            if len(query.answers) == len(query.ranks):
                self._next_look = 0.0

    def look(self, waits: Sequence[PendingCollective], now: float) -> list[StallAction]:
        """Return the instructions, given all that waits now."""
        actions: list[StallAction] = []
        self._next_look = now + self._interval
        keys = {wait.key for wait in waits}
        gone = [self._warned.pop(key).wait for key in list(self._warned) if key not in keys]
        over = tuple(wait for wait in gone if now < wait.since + self._deadline)
        if over:
            actions.append(StallResolved(over, now))
        due = [wait for wait in waits if self._is_due(wait, now)]
        query = self._query
        if query is not None and query.is_over(now):
            self._query = None
            deadlock = self._report_deadlock(query, waits, now) if query.waits else []
            actions += deadlock or self._report(query, due, waits, now)
        elif query is None and due:
            actions.append(self._query_ranks(due, waits, now))
        elif query is None and self._may_be_deadlock(waits, now):
            actions.append(self._ask(self._ranks, now, tuple(waits)))
        if self._query is not None:
            self._next_look = min(self._next_look, self._query.until)
        return actions

    def _is_due(self, wait: PendingCollective, now: float) -> bool:
        if now >= wait.since + self._shutdown:
            return True
        warned = self._warned.get(wait.key)
        return now >= (wait.since + self._check if warned is None else warned.next)

    def _query_ranks(
        self, due: Sequence[PendingCollective], waits: Sequence[PendingCollective], now: float
    ) -> QueryRanks:
        """Step A."""
        ranks = {rank for wait in due for rank in wait.missing}
        while more := {rank for wait in waits if ranks & set(wait.ready) for rank in wait.missing} - ranks:
            ranks |= more
        return self._ask(tuple(sorted(ranks)), now)

    def _ask(self, ranks: tuple[int, ...], now: float, waits: tuple[PendingCollective, ...] = ()) -> QueryRanks:
        self._num_queries += 1
        self._query = _RankQuery(self._num_queries, ranks, now + ANSWER_TIMEOUT_SECONDS, waits)
        return QueryRanks(self._num_queries, ranks)

    def _may_be_deadlock(self, waits: Sequence[PendingCollective], now: float) -> bool:
        """Return whether to ask all ranks (step F)."""
        if not (waits and self._ranks) or not set(self._ranks) <= {rank for wait in waits for rank in wait.ready}:
            self._recheck_seconds, self._not_before, self._num_blocked = _DEADLOCK_SECONDS, 0.0, 0
            return False
        is_old = now >= max(self._not_before, min(wait.since for wait in waits) + _DEADLOCK_SECONDS)
        return is_old and not any(wait.is_running or wait.key in self._warned for wait in waits)

    def _report_deadlock(self, query: _RankQuery, waits: Sequence[PendingCollective], now: float) -> list[StallAction]:
        """Step F."""
        if not query.finds_all_blocked(waits):
            self._num_blocked, self._recheck_seconds = 0, 2 * self._recheck_seconds
            self._not_before = now + self._recheck_seconds
            return []
        self._num_blocked += 1
        if self._num_blocked < 2:
            return []
        for wait in waits:
            self._warned[wait.key] = _WarnedCollective(wait, 1, now + self._check)
        return [WarnStall(Stall(tuple(waits), (), query.answers, (), now, is_deadlock=True))]

    def _report(
        self, query: _RankQuery, due: Sequence[PendingCollective], waits: Sequence[PendingCollective], now: float
    ) -> list[StallAction]:
        """Steps B and D."""
        due = [wait for wait in due if set(wait.missing) <= set(query.ranks)]
        if not due:
            return []
        missing_sets = {wait.missing for wait in due}
        reported = [
            wait for wait in waits if wait in due or (wait.missing in missing_sets and self._is_half_due(wait, now))
        ]
        silent = tuple(rank for rank in query.ranks if rank not in query.answers)
        others = tuple(wait for wait in waits if wait not in reported)
        stall = Stall(tuple(sorted(reported, key=_wait_start)), others, query.answers, silent, now)
        if any(now >= wait.since + self._shutdown for wait in due):
            return [AbortStalled(stall)]
        for wait in reported:
            warned = self._warned.setdefault(wait.key, _WarnedCollective(wait, 0, now))
            warned.next = now + self._check * 2**warned.times
            warned.times += 1
        return [WarnStall(stall)]

    def _is_half_due(self, wait: PendingCollective, now: float) -> bool:
        return wait.key not in self._warned and now >= wait.since + self._check / 2


class CoordinatorAction(Enum):
    """Instruction of `CoordinatorMonitor` about a rank 0 that may not answer."""

    ASK = auto()
    WARN = auto()
    GIVE_UP = auto()


class CoordinatorMonitor:
    """State machine by which rank 1 finds a silent rank 0: step E above, with the arguments of `StallInspector`."""

    def __init__(self, check_seconds: float, shutdown_seconds: float) -> None:
        self._shutdown = shutdown_seconds or math.inf
        self._check = min(check_seconds, self._shutdown)
        #: when rank 0 was asked, until it has answered or was warned of
        self._asked: float | None = None
        self._next = 0.0
        self._times = 0

    def answered(self, now: float) -> bool:
        """Take in rank 0's answer; return whether it was reported silent before."""
        was_silent = self._times > 0
        self._asked, self._times, self._next = None, 0, now + self._check
        return was_silent

    def look(self, since: float, now: float) -> CoordinatorAction | None:
        """Return the instructions, with something waiting here since ``since``; called ten times a second."""
        if self._asked is not None:
            if now < self._asked + ANSWER_TIMEOUT_SECONDS:
                return None
            self._asked = None
            self._next = now + self._check * 2**self._times
            self._times += 1
            return CoordinatorAction.GIVE_UP if now >= since + self._shutdown else CoordinatorAction.WARN
        if now < since + self._check or now < min(self._next, since + self._shutdown):
            return None
        self._asked = now
        return CoordinatorAction.ASK


def _wait_start(wait: PendingCollective) -> float:
    return wait.since


def name_ranks(ranks: Collection[int]) -> str:
    """Name ranks in a message: ``rank 3``, or ``ranks 0-2, 5``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"
