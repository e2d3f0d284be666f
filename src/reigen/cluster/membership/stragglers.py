"""Stragglers of an elastic job: members that make every step slower. Decides; no I/O, no clock.

All members of a view make the same steps, and wait for the last one in each. So a step takes as long for all of them,
and they differ in how much of it they work, and do not wait in collectives.

a. Each member says how long its steps have taken, and how much of that it has worked (`StepTime`).
b. Its *lateness* in a step is how much longer than the median of the others it has worked. It is late if the step has
   taken ``factor`` times as long as it would have without that lateness: where moving data takes most of the time,
   nobody is late who works three milliseconds in place of one.
   Warm spares take no samples, so that members are compared with the median of the others that take some; a spare that
   works even longer is late, too.
c. Who was late in ``num_steps`` steps in a row is a `Straggler`, and is one again after as many more.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, Self

from reigen.cluster.membership.views.record import MemberId
from reigen.errors import ConfigError

#: Steps that wait until all members have said how long they took.
_MAX_OPEN_STEPS = 4096


class StepTime(NamedTuple):
    """Time of one step of one member.

    Attributes:
        seconds: from the end of the step before.
        work_seconds: of these, those in which it did not wait in a collective.
    """

    seconds: float
    work_seconds: float


@dataclass(frozen=True, slots=True)
class StragglerRule:
    """Rule for who is a straggler.

    Attributes:
        factor: by which a step takes longer because of it, at least.
        num_steps: in so many steps in a row.
    """

    factor: float = 3.0
    num_steps: int = 50

    def __str__(self) -> str:
        return f"{self.factor:g}/{self.num_steps}"

    @classmethod
    def parse(cls, text: str, option: str) -> Self:
        """Parse ``FACTOR`` or ``FACTOR/STEPS``, as the rule is written.

        Args:
            text: to parse.
            option: its name, for the message.

        Raises:
            ConfigError: it is something else; says what to write.
        """
        factor_text, has_steps, steps_text = text.partition("/")
        try:
            factor, num_steps = float(factor_text), int(steps_text) if has_steps else cls().num_steps
        except ValueError:
            factor, num_steps = math.nan, 0
        if not 1 < factor < math.inf or num_steps < 1:
            raise ConfigError(
                f"{option} {text}: it must be FACTOR or FACTOR/STEPS, as in 3/50: a number greater than 1 and a whole "
                "number of steps, at least 1"
            )
        return cls(factor, num_steps)


#: Who is reported where the user says nothing.
DEFAULT_STRAGGLER_RULE = StragglerRule()


@dataclass(frozen=True, slots=True)
class Straggler:
    """A member that was late in as many steps in a row as the rule says.

    Attributes:
        member: which one.
        step: the last of these steps.
        num_steps: how many they were.
        work_seconds: its own work in one of them, on the average.
        median_seconds: the median of the others', on the average.
    """

    member: MemberId
    step: int
    num_steps: int
    work_seconds: float
    median_seconds: float


@dataclass(slots=True)
class _LateSteps:
    """Steps in a row in which a member was late: how many, and sums over them."""

    num_steps: int = 0
    work_seconds: float = 0.0
    median_seconds: float = 0.0


class StragglerDetector:
    """Detector of one view, on its rank 0.

    Args:
        rule: who is a straggler.
        members: of the view.
        spares: those of them that take no samples.
    """

    def __init__(
        self, rule: StragglerRule, members: Collection[MemberId], spares: Collection[MemberId] = frozenset()
    ) -> None:
        self._rule, self._spares = rule, frozenset(spares)
        self._late = {member: _LateSteps() for member in members}
        #: times of steps that some members have not said yet
        self._open: dict[int, dict[MemberId, StepTime]] = {}
        #: the latest step of which all have said how long it took
        self._judged = -1

    def add(self, member: MemberId, first_step: int, times: Sequence[StepTime]) -> list[Straggler]:
        """Take in times of a member's steps, from ``first_step`` on; return the stragglers that are known now.

        A step is judged when all have said how long it took. Steps of which a word was lost neither count nor end a
        row of late ones. Those who are no members are not listened to.
        """
        if member not in self._late or len(self._late) == 1:
            return []
        found: list[Straggler] = []
        for step, time in enumerate(times, first_step):
            if step <= self._judged:
                continue
            known = self._open.setdefault(step, {})
            known[member] = time
            if len(known) == len(self._late):
                found += self._judge(step, known)
        while len(self._open) > _MAX_OPEN_STEPS:
            del self._open[min(self._open)]
        return found

    def _judge(self, step: int, times: Mapping[MemberId, StepTime]) -> list[Straggler]:
        self._judged = step
        self._open = {number: known for number, known in self._open.items() if number > step}
        found: list[Straggler] = []
        works = sorted(time.work_seconds for member, time in times.items() if member not in self._spares)
        for member, time in times.items():
            is_spare = member in self._spares
            if not is_spare and len(works) == 1:
                continue  # the only one that takes samples
            usual = median(works) if is_spare else _median_of_others(works, time.work_seconds)
            late = self._late[member]
            lateness = time.work_seconds - usual
            if lateness <= 0 or time.seconds < self._rule.factor * (time.seconds - lateness):
                if late.num_steps:
                    self._late[member] = _LateSteps()
                continue
            late.num_steps += 1
            late.work_seconds += time.work_seconds
            late.median_seconds += usual
            if late.num_steps == self._rule.num_steps:
                num = late.num_steps
                found.append(Straggler(member, step, num, late.work_seconds / num, late.median_seconds / num))
                self._late[member] = _LateSteps()
        return found


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """Return the median of numbers in order without one of them, which is ``own``."""
    place, num = bisect_left(ordered, own), len(ordered) - 1
    low, high = (num - 1) // 2, num // 2
    return (ordered[low + (low >= place)] + ordered[high + (high >= place)]) / 2
