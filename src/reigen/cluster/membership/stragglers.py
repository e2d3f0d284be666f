"""Stragglers of an elastic job: members that make every step slower. Decides; no I/O, no clock.

All members of a view make the same steps, and wait for the last one in each. So a step takes as long for all of them,
and they differ in how much of it they work, and do not wait in collectives.

a. Each member says how long its steps have taken, and how much of that it has worked (`StepTime`).
b. Its *lateness* in a step is how much longer than the median of the others it has worked. It is late if the step has
   taken ``factor`` times as long as it would have without that lateness: where moving data takes most of the time,
   nobody is late who works three milliseconds in place of one.
c. Who was late in ``num_steps`` steps in a row is a `Straggler`, and is one again after as many more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Member:
    """Member, with the times of its steps that others have not sent theirs of, and its latest late steps."""

    times: dict[int, StepTime] = field(default_factory=dict)
    late: _LateSteps = field(default_factory=_LateSteps)


class StragglerDetector:
    """Detector of one view, on its rank 0.

    Args:
        rule: who is a straggler.
        members: of the view.
    """

    def __init__(self, rule: StragglerRule, members: Collection[MemberId]) -> None:
        self._rule = rule
        self._members = {member: _Member() for member in members}

    def add(self, member: MemberId, first_step: int, times: Sequence[StepTime]) -> list[Straggler]:
        """Take in times of a member's steps, from ``first_step`` on; return the stragglers that are known now.

        A step is judged when all have said how long it took. Steps of which a word was lost neither count nor end a
        row of late ones. Those who are no members are not listened to.
        """
        known = self._members.get(member)
        if known is None or len(self._members) == 1:
            return []
        found: list[Straggler] = []
        for step, time in enumerate(times, first_step):
            known.times[step] = time
            if all(step in each.times for each in self._members.values()):
                found += self._judge(step)
        while len(known.times) > _MAX_OPEN_STEPS:
            del known.times[min(known.times)]
        return found

    def _judge(self, step: int) -> list[Straggler]:
        times = {member: each.times[step] for member, each in self._members.items()}
        for each in self._members.values():
            each.times = {number: time for number, time in each.times.items() if number > step}
        found: list[Straggler] = []
        for member, time in times.items():
            usual = median(other.work_seconds for each, other in times.items() if each != member)
            late = self._members[member].late
            lateness = time.work_seconds - usual
            if lateness <= 0 or time.seconds < self._rule.factor * (time.seconds - lateness):
                self._members[member].late = _LateSteps()
                continue
            late.num_steps += 1
            late.work_seconds += time.work_seconds
            late.median_seconds += usual
            if late.num_steps == self._rule.num_steps:
                num = late.num_steps
                found.append(Straggler(member, step, num, late.work_seconds / num, late.median_seconds / num))
                self._members[member].late = _LateSteps()
        return found
