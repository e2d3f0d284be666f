"""The planner's predictions beside what was measured: arithmetic on made-up steps, and what the figures on file say."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks.planner import (
    CLEAR_DIFFERENCE,
    MODELS,
    STEPS_FILE,
    STORES,
    ComparedStep,
    Configuration,
    NetworkSpec,
    compare_orders,
    compare_steps,
    load_measurements,
    main,
    save_measurements,
    step_durations,
)
from reigen.planner.costs import Costs


def step(store: str, measured: float, predicted: float, model: str = "deep") -> ComparedStep:
    return ComparedStep(Configuration(4, 1, 100.0, 0.0, store, model), measured, predicted)


def test_a_step_lasts_from_the_last_end_to_the_last_end() -> None:
    first, second = [(0.0, 1.0), (1.0, 2.0), (2.0, 3.5)], [(0.0, 1.2), (1.2, 1.9), (1.9, 3.0)]
    assert step_durations([first, second]) == pytest.approx([0.8, 1.5])


def test_networks_are_read() -> None:
    assert NetworkSpec.parse("100") == NetworkSpec(100.0)
    assert NetworkSpec.parse("200/5") == NetworkSpec(200.0, 5.0)


def test_only_clear_differences_of_one_question_are_pairs() -> None:
    steps = [
        step("auto", 1.0, 2.0),
        step("ring", 1.0 + CLEAR_DIFFERENCE / 2, 1.0),  # too near to the first one
        step("one", 2.0, 2.5),
        step("equal", 3.0, 2.2),
        step("one", 9.0, 0.1, model="embedding"),
    ]
    order = compare_orders(steps)
    assert (order.num_pairs, order.num_right) == (5, 4)
    assert order.wrong == ((steps[2], steps[3]),)


def test_what_was_measured_is_written_and_read(tmp_path: Path) -> None:
    found = load_measurements(STEPS_FILE)
    save_measurements(tmp_path / "steps.json", found)
    assert (tmp_path / "steps.json").read_bytes() == STEPS_FILE.read_bytes()


def test_figures_on_file_cover_what_is_said_of_them() -> None:
    jobs = [each.configuration for each in load_measurements(STEPS_FILE).measurements]
    assert len(set(jobs)) == len(jobs)
    assert {job.model for job in jobs} == set(MODELS)
    assert {job.store for job in jobs} == set(STORES)
    assert {job.num_hosts for job in jobs} == {2, 3, 4}
    assert {2, 8} <= {job.num_hosts * job.ranks_a_host for job in jobs}
    assert {100.0, 5000.0} <= {job.rate_mbits for job in jobs}
    assert {0.0, 10.0} <= {job.delay_ms for job in jobs}


def test_predictions_of_jobs_that_were_held_out_are_near(capsys: pytest.CaptureFixture[str]) -> None:
    compared = [
        step for step in compare_steps(load_measurements(STEPS_FILE), Costs()) if step.configuration.is_held_out
    ]
    assert len(compared) > 80
    errors = [abs(step.error) for step in compared]
    assert statistics.median(errors) < 0.1
    assert max(errors) < 0.25
    with_delay = [abs(step.error) for step in compared if step.configuration.is_servers_with_delay]
    assert len(with_delay) > 20
    assert statistics.median(with_delay) < 0.1
    order = compare_orders(compared)
    assert order.num_right >= 0.95 * order.num_pairs
    assert main(["compare"]) == 0
    assert f"| held out (3, 4 hosts) | {len(compared)} |" in capsys.readouterr().out
