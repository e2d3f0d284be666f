"""The part of a process in an elastic job: how long its steps take, and whether its program catches all errors."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from reigen import elastic_job
from reigen.cluster.membership.stragglers import StepTime
from reigen.cluster.membership.views.messages import HeldSums, StepProgress
from reigen.cluster.membership.views.record import SamplePosition, View
from reigen.elastic_job import ElasticJob, RefusedCalls, StepClock
from reigen.engine.counters import EngineCounters
from reigen.errors import ArgumentError, AuthenticationError, PeerLostError


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


class RefusedProgram:
    """A program whose calls are refused at times that a test says, with a deadline of 600 s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.calls = 100.0, RefusedCalls(600.0)
        monkeypatch.setattr(elastic_job.time, "monotonic", lambda: self.now)

    def call(self, num: int, seconds: float, *, is_caught: bool = True, is_in_step: bool = False) -> list[bool]:
        """Calls so often, each so many seconds behind the one before; returns what follows from each."""
        ends = []
        for _ in range(num):
            self.now += seconds
            ends.append(self.calls.add(is_caught=is_caught, is_in_step=is_in_step))
        return ends


def test_a_program_that_calls_again_and_again_is_given_up_after_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    program = RefusedProgram(monkeypatch)
    ends = program.call(1000, 1 / 64)
    assert ends.index(True) == 640
    slower = RefusedProgram(monkeypatch)
    assert slower.call(1000, 1.0).index(True) == 99, "a hundred calls"
    assert (slower.calls.num, slower.calls.seconds) == (1000, 999.0)


def test_a_program_that_cleans_up_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(RefusedProgram(monkeypatch).call(5000, 1 / 512)), "many calls, in less than ten seconds"
    assert not any(RefusedProgram(monkeypatch).call(99, 5.0)), "few calls, in less than the deadline"
    assert not any(RefusedProgram(monkeypatch).call(2, 5000.0)), "one error leaves it, another one what cleans up"


def test_a_step_may_take_longer_than_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    program = RefusedProgram(monkeypatch)
    assert not any(program.call(2000, 2.0, is_caught=False, is_in_step=True)), "gradients that it submits to its end"
    assert program.call(10_000, 0.0, is_caught=False, is_in_step=True).index(True) == 7999


def test_calls_whose_errors_the_program_need_not_have_seen_count_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = RefusedProgram(monkeypatch)
    assert not any(program.call(1000, 0.5, is_caught=False))
    assert program.call(100, 0.5, is_caught=False).index(True) == 80, "0.9 of 600 s behind the first one"


PROGRESS = StepProgress(3, SamplePosition(0, 3), SamplePosition(0, 4), HeldSums(1))


class UpdatingProgram:
    """A program in an update of its weights, which ends when a test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_end, self._error = threading.Event(), error

    def progress(self, _: int) -> StepProgress:
        assert self.may_end.wait(60.0)
        if self._error is not None:
            raise self._error
        return PROGRESS


def make_job(program: UpdatingProgram) -> ElasticJob[Any]:
    job: ElasticJob[Any] = ElasticJob(cast("Any", None), cast("Any", None), cast("Any", None), EngineCounters())
    job._driver = cast("Any", SimpleNamespace(reason="", lost={}))
    job.step_state = program
    return job


def test_the_driver_does_not_wait_for_an_update_that_has_begun() -> None:
    program, told = UpdatingProgram(), queue.Queue[StepProgress]()
    make_job(program).revoke(1, told.put)
    assert told.empty()
    program.may_end.set()
    assert told.get(timeout=60.0) == PROGRESS


def test_a_program_that_cannot_say_how_far_it_is_ends() -> None:
    program, told, ends = UpdatingProgram(ValueError("a bug")), queue.Queue[StepProgress](), queue.Queue[Any]()
    job = make_job(program)
    job.end = lambda *end: ends.put(end)  # type: ignore[method-assign]
    job.revoke(1, told.put)
    program.may_end.set()
    code, reason = ends.get(timeout=60.0)
    assert (code, "a bug" in reason, told.empty()) == (1, True, True)


class FailingBuilds:
    """A job whose views cannot be built, each for the error that a test gives."""

    def __init__(self) -> None:
        self.job = make_job(UpdatingProgram())
        self.job._place = cast("Any", SimpleNamespace(member="this"))
        self.requests: list[int] = []
        self.job._driver.request_change = lambda _, epoch: self.requests.append(epoch)  # type: ignore[method-assign]

    def build(self, epoch: int, error: Exception) -> bool:
        """Returns whether the job asks for another view; otherwise the program gets the error."""

        def meet(_: View) -> Any:
            raise error

        self.job._rendezvous_of = meet  # type: ignore[method-assign]
        self.job._wanted = view = cast("View", SimpleNamespace(epoch=epoch, ranks={"this": 0}))
        self.job._build(view, lambda: pytest.fail("it has been built"))
        assert self.job._error in (None, error)
        return self.job._error is None and self.requests[-1] == epoch


@pytest.mark.parametrize("error", [PeerLostError("rank 0 has gone"), AuthenticationError("the other end has gone")])
def test_a_view_whose_members_die_while_it_is_built_is_followed_by_another(error: Exception) -> None:
    builds = FailingBuilds()
    assert [builds.build(epoch, error) for epoch in (1, 2, 3)] == [True, True, False]


def test_a_view_that_no_other_could_replace_is_the_programs_error() -> None:
    assert not FailingBuilds().build(1, ArgumentError("ranks do not fit together"))
