"""Carrying out what the tuner decides, and the report of it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from reigen.autotune.log_file import TuningLog, read_best_point
from reigen.autotune.report import format_outcome, format_variables
from reigen.autotune.search_space import ParameterPoint
from reigen.autotune.session import TuningSession
from reigen.autotune.tuner import NO_DECISION, StepEnd, TunedBlock, TunerDecision, TuningOutcome
from reigen.engine.counters import DEVICE_WAY
from reigen.engine.messages import OperationKind, TunedParameters
from tests.tuning import FakeEngine

MIB = 1 << 20
BASE, OTHER = ParameterPoint(128 * MIB, 4 * MIB, "ordered", 1), ParameterPoint(8 * MIB, MIB, "ordered", 1)
OUTCOME = TuningOutcome(BASE, OTHER, 1.25, 1.2, 1.31, 0.05, 13, 41.3, "the best point is 1.25 times as fast")


class ScriptedTuner:
    """Tuner that decides what it was told to, step by step."""

    def __init__(self, decisions: Sequence[TunerDecision]) -> None:
        self.decisions = list(decisions)
        self.steps: list[StepEnd] = []

    def step_ended(self, step: StepEnd) -> TunerDecision:
        self.steps.append(step)
        return self.decisions.pop(0) if self.decisions else NO_DECISION

    def best_point(self) -> ParameterPoint:
        return OTHER


def session(*decisions: TunerDecision, log: TuningLog | None = None) -> tuple[TuningSession, FakeEngine, ScriptedTuner]:
    engine, tuner = FakeEngine(), ScriptedTuner(decisions)
    return TuningSession(engine, tuner, BASE, log=log, show=reports.append), engine, tuner


reports: list[str] = []


def test_what_is_decided_is_asked_of_the_engine_and_counts_when_all_have_it() -> None:
    one, engine, tuner = session(TunerDecision(OTHER))
    agreement, slow = object.__new__(Agreement), object.__new__(Agreement)
    for each in (agreement, slow):
        one.settled(each, BASE.bucket_bytes)
    one.step_ended()
    assert tuner.steps[-1].is_applied
    assert engine.asked == [TunedParameters(1, 8 * MIB, MIB, "ordered", 1)]
    one.step_ended()
    assert not tuner.steps[-1].is_applied
    engine.apply()
    one.settled(agreement, MIB)
    one.step_ended()
    assert not tuner.steps[-1].is_applied, "one of the optimizers has buckets of the old size"
    one.settled(slow, MIB)
    one.step_ended()
    assert tuner.steps[-1].is_applied


class Agreement:
    """Stands for an agreement on the size of buckets."""


def test_an_optimizer_that_is_gone_is_not_waited_for() -> None:
    one, engine, tuner = session(TunerDecision(OTHER))
    gone = Agreement()
    one.settled(gone, BASE.bucket_bytes)
    one.step_ended()
    engine.apply()
    del gone
    one.step_ended()
    assert tuner.steps[-1].is_applied


def test_the_end_is_told_to_all_and_shown_once() -> None:
    reports.clear()
    one, engine, tuner = session(TunerDecision(OTHER, None, OUTCOME))
    one.step_ended()
    assert engine.asked[-1].is_final
    assert one.is_final
    one.step_ended()
    one.close()
    assert len(tuner.steps) == len(reports) == 1


def test_a_job_that_ends_before_the_search_says_so() -> None:
    reports.clear()
    for num_steps, is_view in ((0, False), (3, False), (3, True)):
        one, *_ = session()
        for _ in range(num_steps):
            one.step_ended()
        one.close(is_view=is_view)
    nothing, unfinished = reports
    assert nothing.startswith("reigen autotune: nothing was tuned, for the job has marked no steps; ")
    assert unfinished == (
        "reigen autotune: the job has ended before the search, after 3 steps; these seemed best, unchecked: "
        f"{format_variables(BASE, OTHER)}"
    )


def test_a_tuner_that_fails_ends_tuning_and_not_the_step(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenTuner(ScriptedTuner):
        def step_ended(self, step: StepEnd) -> TunerDecision:
            if not self.decisions:
                raise ValueError("array must not contain infs or NaNs")
            return super().step_ended(step)

    engine = FakeEngine()
    one = TuningSession(engine, BrokenTuner([TunerDecision(OTHER)]), BASE)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            one.step_ended()
    assert engine.asked[-1] == TunedParameters(2, 128 * MIB, 4 * MIB, "ordered", 1, True)
    assert [record.message for record in caplog.records] == [
        "autotuning has failed, the job goes on as it began: ValueError: array must not contain infs or NaNs"
    ]


def test_another_tuner_goes_on_where_one_has_ended() -> None:
    reports.clear()
    one, engine, tuner = session(TunerDecision(OTHER, None, OUTCOME))
    one.step_ended()
    following = ScriptedTuner([TunerDecision(BASE)])
    others: list[str] = []
    one.follow(following, others.append)
    one.step_ended()
    assert (len(tuner.steps), len(following.steps), len(reports), others) == (1, 1, 1, [])
    assert [asked.version for asked in engine.asked] == [1, 2]
    assert (one.first, one.point, one.is_final) == (BASE, BASE, False)


def test_versions_go_on_where_the_view_before_has_ended() -> None:
    engine = FakeEngine()
    engine.counters.tuned = TunedParameters(7, 1)
    one = TuningSession(engine, ScriptedTuner([]), BASE)
    one.apply(OTHER)
    assert engine.asked[-1].version == 8


def test_sums_on_devices_are_an_obstacle() -> None:
    one, engine, tuner = session()
    one.step_ended()
    assert not tuner.steps[-1].obstacle
    engine.counters.bytes[DEVICE_WAY][OperationKind.ALLREDUCE] += 1
    one.step_ended()
    assert "GPUs" in tuner.steps[-1].obstacle


def test_the_log_of_a_job_that_ends_too_early_has_a_best_point_too(tmp_path: Path) -> None:
    path = str(tmp_path / "log.csv")
    block = TunedBlock(BASE, "base", (0.1,), 0.5, 1e6, 0.0, 1.0)
    one, *_ = session(TunerDecision(None, block), log=TuningLog(path, 2))
    one.step_ended()
    one.close()
    assert read_best_point(path) == OTHER


def test_the_report_says_what_was_chosen_gained_and_left_alone() -> None:
    text = format_outcome(OUTCOME, {"tcp_sockets": "set by REIGEN_TCP_SOCKETS", "ring": "it adds otherwise"})
    assert text.splitlines() == [
        "reigen autotune: 1.250 times as fast (1.200 to 1.310 with 90 % confidence), after 41 s and 13 points",
        "                    before   now",
        "  fusion threshold  128 MiB  8 MiB",
        "  gradient bucket   4 MiB    1 MiB",
        "  TCP algorithm     ordered  ordered",
        "  TCP sockets       1        1        set by REIGEN_TCP_SOCKETS",
        "  a step takes 40.00 ms, and 50.00 ms before",
        "  the best point is 1.25 times as fast",
        "  the ring was left out: it adds otherwise",
        "  to begin with these: REIGEN_FUSION_THRESHOLD=8388608 REIGEN_BUCKET_BYTES=1048576",
    ]


def test_the_report_of_nothing() -> None:
    nothing = TuningOutcome(BASE, BASE, 1.0, 1.0, 1.0, 0.0, 0, 3.0, "nobody waits")
    lines = format_outcome(nothing, {}).splitlines()
    assert lines[0] == "reigen autotune: nothing is changed, after 3 s and 0 points"
    assert lines[-1] == "  nobody waits"
