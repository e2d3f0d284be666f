"""The part of a process in an elastic job: how long its steps take, and how much of that is its own work."""

from __future__ import annotations

import pytest

from reigen import elastic_job
from reigen.cluster.membership.stragglers import StepTime
from reigen.elastic_job import StepClock
from reigen.engine.counters import EngineCounters


class Clock:
    """Steps at times that a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.counters = 100.0, EngineCounters()
        monkeypatch.setattr(elastic_job.time, "monotonic", lambda: self.now)
        self.clock = StepClock(self.counters)

    def step(self, work_seconds: float, wait_seconds: float) -> tuple[StepTime, ...]:
        self.now += work_seconds + wait_seconds
        self.counters.blocked_seconds += wait_seconds
        return self.clock.step_applied()


def test_a_step_is_work_and_waiting_and_others_are_told_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Clock(monkeypatch)
    assert steps.step(5.0, 1.0) == ()  # nobody knows when it began
    assert [steps.step(0.25, 0.25) for _ in range(2)] == [(), (StepTime(0.5, 0.25),) * 2]
    assert steps.clock.step_seconds == 0.5
    assert steps.step(2.0, 1.0) == (StepTime(3.0, 2.0),), "slow steps are told at once"


def test_a_change_of_views_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Clock(monkeypatch)
    for _ in range(3):
        steps.step(0.125, 0.0)
    steps.clock.enter_view()
    assert steps.step(30.0, 5.0) == ()
    assert steps.clock.step_seconds == 0.125
    assert steps.step(1.0, 1.0) == (StepTime(2.0, 1.0),)


def test_many_short_steps_are_told_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Clock(monkeypatch)
    steps.step(1.0, 0.0)
    told = [steps.step(1 / 65536, 0.0) for _ in range(1024)]
    assert [len(times) for times in told] == [0] * 1023 + [1024]
