"""When a collective that waits is a stall, and what is done about it: a state machine without clock or I/O.

A. A collective that has waited for ``check_seconds`` is a stall. The inspector wants to know where its missing ranks
   are, and those for which they wait in turn (`Ask`). It waits for their answers for two seconds.
B. Then it warns (`Warn`), of this collective and all that wait for the same ranks and have waited for half as long:
   a rank that is missing in one is missing in many. What was warned of is warned of again after two, four, eight, ...
   times as long.
C. When what was warned of waits no longer, that is told, too (`Over`), unless its deadline is why.
D. A collective that has waited for ``shutdown_seconds`` ends the job (`GiveUp`), once the ranks have answered as in A.
   If that is less than ``check_seconds`` there is no warning before.

E. All this is rank 0's work. Rank 1, when it has waited for ``check_seconds`` itself, asks whether rank 0 answers, and
   warns or gives up in its place if it does not (`CoordinatorCheck`).

Who has joined is not missing, and a join that waits is no stall: both follow from what the coordinator says waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from reigen.engine.whereabouts import Whereabouts

#: How long the answers may take.
ANSWER_SECONDS = 2.0
#: The longest time between two looks, in a job that has outstanding collectives.
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Wait:
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
        """What tells it from one of the same name before or after."""
        return self.name, self.is_running, self.since


@dataclass(frozen=True, slots=True)
class Ask:
    """Instruction: ask these ranks where they are; tell `StallInspector.answered` under this number."""

    number: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stall:
    """All that is known when answers are in.

    Attributes:
        waits: what is stalled, oldest first.
        others: what else waits.
        answers: where the ranks are that answered.
        silent: ranks that did not.
        now: the time.
    """

    waits: tuple[Wait, ...]
    others: tuple[Wait, ...]
    answers: Mapping[int, Whereabouts]
    silent: tuple[int, ...]
    now: float

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that are missing in any of them."""
        return tuple(sorted({rank for wait in self.waits for rank in wait.missing}))

    def circle(self) -> tuple[tuple[Wait, int], ...]:
        """``((a, rank), (b, rank), ...)``: a lacks the rank, which waits in b, ..., which waits in a. Or nothing."""
        by_name = {wait.name: wait for wait in (*self.others, *self.waits)}
        for first in self.waits:
            path: list[tuple[Wait, int]] = []
            if self._closes(first, path, set(), by_name):
                return tuple(path)
        return ()

    def _closes(self, wait: Wait, path: list[tuple[Wait, int]], seen: set[str], by_name: Mapping[str, Wait]) -> bool:
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
class Warn:
    """Instruction: tell the user."""

    stall: Stall


@dataclass(frozen=True, slots=True)
class Over:
    """Instruction: tell the user that these, of which he was warned, wait no longer."""

    waits: tuple[Wait, ...]
    now: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Instruction: end the job."""

    stall: Stall


Instruction = Ask | Warn | Over | GiveUp


@dataclass(slots=True)
class _Warned:
    wait: Wait
    times: int
    next: float


@dataclass(slots=True)
class _Inquiry:
    number: int
    ranks: tuple[int, ...]
    until: float
    answers: dict[int, Whereabouts] = field(default_factory=dict)

    def is_over(self, now: float) -> bool:
        return len(self.answers) == len(self.ranks) or now >= self.until


class StallInspector:
    """What rank 0 knows of stalls.

    Args:
        check_seconds: from when on a wait is a stall.
        shutdown_seconds: from when on it ends the job; 0 for never.
        deadline_seconds: what has waited for so long has been refused, so it is not over.
    """

    def __init__(self, check_seconds: float, shutdown_seconds: float, deadline_seconds: float = math.inf) -> None:
        self._shutdown = shutdown_seconds or math.inf
        self._check = min(check_seconds, self._shutdown)
        self._deadline = deadline_seconds
        self._pace = min(_LOOK_SECONDS, self._check / 4)
        #: stalls that were warned of
        self._warned: dict[tuple[str, bool, float], _Warned] = {}
        self._inquiry: _Inquiry | None = None
        self._num_inquiries = 0
        self._next_look = 0.0

    @property
    def next_look(self) -> float:
        """When `look` wants to be called; until then it need not be. After a warning always, to see when it is over."""
        return 0.0 if self._warned else self._next_look

    def due(self, oldest: float | None) -> float:
        """When `look` has something to do, at the latest, if nothing happens; ``oldest``: since when anything waits."""
        if self._warned or self._inquiry is not None:
            return self._next_look
        return math.inf if oldest is None else max(self._next_look, oldest + self._check)

    def answered(self, rank: int, number: int, answer: Whereabouts) -> None:
        """A rank has said where it is."""
        inquiry = self._inquiry
        if inquiry is not None and inquiry.number == number and rank in inquiry.ranks:
            inquiry.answers[rank] = answer
            if len(inquiry.answers) == len(inquiry.ranks):
                self._next_look = 0.0

    def look(self, waits: Sequence[Wait], now: float) -> list[Instruction]:
        """What is to be done, given all that waits now."""
        said: list[Instruction] = []
        self._next_look = now + self._pace
        keys = {wait.key for wait in waits}
        gone = [self._warned.pop(key).wait for key in list(self._warned) if key not in keys]
        over = tuple(wait for wait in gone if now < wait.since + self._deadline)
        if over:
            said.append(Over(over, now))
        due = [wait for wait in waits if self._is_due(wait, now)]
        inquiry = self._inquiry
        if inquiry is not None and inquiry.is_over(now):
            self._inquiry = None
            said += self._tell(inquiry, due, waits, now)
        elif inquiry is None and due:
            said.append(self._inquire(due, waits, now))
        if self._inquiry is not None:
            self._next_look = min(self._next_look, self._inquiry.until)
        return said

    def _is_due(self, wait: Wait, now: float) -> bool:
        if now >= wait.since + self._shutdown:
            return True
        warned = self._warned.get(wait.key)
        return now >= (wait.since + self._check if warned is None else warned.next)

    def _inquire(self, due: Sequence[Wait], waits: Sequence[Wait], now: float) -> Ask:
        """Step A."""
        self._num_inquiries += 1
        ranks = {rank for wait in due for rank in wait.missing}
        while more := {rank for wait in waits if ranks & set(wait.ready) for rank in wait.missing} - ranks:
            ranks |= more
        self._inquiry = _Inquiry(self._num_inquiries, tuple(sorted(ranks)), now + ANSWER_SECONDS)
        return Ask(self._num_inquiries, self._inquiry.ranks)

    def _tell(self, inquiry: _Inquiry, due: Sequence[Wait], waits: Sequence[Wait], now: float) -> list[Instruction]:
        """Steps B and D."""
        due = [wait for wait in due if set(wait.missing) <= set(inquiry.ranks)]
        if not due:
            return []
        alike = {wait.missing for wait in due}
        told = [wait for wait in waits if wait in due or (wait.missing in alike and self._is_half_due(wait, now))]
        silent = tuple(rank for rank in inquiry.ranks if rank not in inquiry.answers)
        others = tuple(wait for wait in waits if wait not in told)
        stall = Stall(tuple(sorted(told, key=_since)), others, inquiry.answers, silent, now)
        if any(now >= wait.since + self._shutdown for wait in due):
            return [GiveUp(stall)]
        for wait in told:
            warned = self._warned.setdefault(wait.key, _Warned(wait, 0, now))
            warned.next = now + self._check * 2**warned.times
            warned.times += 1
        return [Warn(stall)]

    def _is_half_due(self, wait: Wait, now: float) -> bool:
        return wait.key not in self._warned and now >= wait.since + self._check / 2


class Silence(Enum):
    """What to do about a coordinator that may not be there."""

    ASK = auto()
    WARN = auto()
    GIVE_UP = auto()


class CoordinatorCheck:
    """What rank 1 knows of rank 0 (step E). The arguments are those of `StallInspector`."""

    def __init__(self, check_seconds: float, shutdown_seconds: float) -> None:
        self._shutdown = shutdown_seconds or math.inf
        self._check = min(check_seconds, self._shutdown)
        #: when rank 0 was asked, until it has answered or was told of
        self._asked: float | None = None
        self._next = 0.0
        self._times = 0

    def answered(self, now: float) -> bool:
        """Rank 0 has answered; whether it was told of as silent before."""
        was_silent = self._times > 0
        self._asked, self._times, self._next = None, 0, now + self._check
        return was_silent

    def look(self, since: float, now: float) -> Silence | None:
        """What is to be done, with something waiting here since ``since``; to be called ten times a second."""
        if self._asked is not None:
            if now < self._asked + ANSWER_SECONDS:
                return None
            self._asked = None
            self._next = now + self._check * 2**self._times
            self._times += 1
            return Silence.GIVE_UP if now >= since + self._shutdown else Silence.WARN
        if now < since + self._check or now < min(self._next, since + self._shutdown):
            return None
        self._asked = now
        return Silence.ASK


def _since(wait: Wait) -> float:
    return wait.since


def listed(ranks: Iterable[int]) -> str:
    """``rank 3``, or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"rank{'s' if sum(map(len, runs)) > 1 else ''} {text}"
