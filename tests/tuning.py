"""Schedules of parameters in place of a search, and an engine in place of a job's, for tests of tuning."""

from __future__ import annotations

from collections.abc import Sequence

from reigen import context
from reigen.autotune.search_space import ParameterPoint
from reigen.autotune.tuner import NO_DECISION, StepEnd, TunerDecision
from reigen.engine.counters import EngineCounters
from reigen.engine.messages import TunedParameters

_MIB = 1 << 20
#: Everything changes from each to the next.
POINTS = [
    ParameterPoint(_MIB, 1 << 16, "direct", 4),
    ParameterPoint(128 * _MIB, 64 * _MIB, "latency", 1),
    ParameterPoint(0, 1 << 18, "ordered", 2),
    ParameterPoint(1 << 16, 2 * _MIB, "direct", 3),
    ParameterPoint(8 * _MIB, 1 << 12, "ordered", 1),
]


class FakeEngine:
    """Engine that keeps what it is asked for, and takes it on when `apply` is called."""

    def __init__(self) -> None:
        self.counters = EngineCounters()
        self.asked: list[TunedParameters] = []

    def tune(self, parameters: TunedParameters) -> None:
        self.asked.append(parameters)

    def apply(self) -> None:
        self.counters.tuned = self.asked[-1]


class ScheduleTuner:
    """Takes the next point of a list every few steps, again and again: no search is as restless."""

    def __init__(self, points: Sequence[ParameterPoint], num_steps: int) -> None:
        self._points, self._every = points, num_steps
        self._num_steps = 0

    def step_ended(self, step: StepEnd) -> TunerDecision:
        self._num_steps += 1
        turn, rest = divmod(self._num_steps, self._every)
        return NO_DECISION if rest else TunerDecision(self._points[turn % len(self._points)])

    def best_point(self) -> ParameterPoint:
        return self._points[0]


def follow_schedule(points: Sequence[ParameterPoint], num_steps: int = 3) -> None:
    """In a job with REIGEN_AUTOTUNE: rank 0 chooses these points from now on, one after the other."""
    job = context.current()
    assert job.autotunes
    if job.tuning is not None:
        job.tuning.follow(ScheduleTuner(points, num_steps), lambda text: None)
