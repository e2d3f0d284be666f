"""Profiles of timelines whose steps were made by hand: what they say is what was put in."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from reigen.cli.main import main
from reigen.errors import ArgumentError
from reigen.observe.chrome_format import START_EVENT
from reigen.observe.trace_reader import CollectiveExecution, GradientMoment, StepProcessorTime, Trace
from reigen.planner.profile import read_profile
from reigen.planner.trace_profile import profile_from_trace

MS = 1000.0
#: What a rank of the jobs below does: forward, then gradients, then the update; milliseconds of computing.
READY = {"last.weight": 31.0, "middle.weight": 45.0, "first.weight": 70.0}
UPDATE = 5.0
NUMBERS = {"first.weight": 0, "middle.weight": 1, "last.weight": 2}


def made_up(num_steps: int, *, slowdowns: tuple[float, ...] = (1.0, 1.0), noise: float = 0.0, seed: int = 0) -> Trace:
    """A job whose ranks wait 20 ms within backward and 100 ms behind it, in each step."""
    rng = random.Random(seed)
    trace = Trace(len(slowdowns), {rank: f"rank {rank}" for rank in range(len(slowdowns))})
    for rank, slow in enumerate(slowdowns):
        now = 7.0 * MS
        for number in range(num_steps):
            begin, factor = now, slow * (1 + noise * rng.uniform(-1, 1))
            if not number:
                factor *= 4  # the first step in the file is not like the others
            trace.waits.setdefault(rank, []).append((begin + 40 * factor * MS, begin + (40 * factor + 20) * MS))
            for name, ready in READY.items():
                at = begin + ready * factor * MS + (20 * MS if ready > 40 else 0)
                moment = GradientMoment(at, NUMBERS[name], name, 4000, "float32")
                trace.gradients.setdefault(rank, []).append(moment)
            reduced = begin + (70 * factor + 20) * MS
            trace.waits[rank].append((reduced, reduced + 100 * MS))
            now = reduced + (100 + UPDATE * factor) * MS
            trace.steps.setdefault(rank, []).append((begin, now))
            busy = StepProcessorTime(thread=37.5 * factor * MS, delay=0, process=40 * factor * MS)
            trace.processor_times.setdefault(rank, []).append(busy)
    return trace


def test_a_profile_says_what_the_steps_were_made_of() -> None:
    profile = profile_from_trace(made_up(6), batch=32, name="job")
    assert [(t.name, t.elements, t.dtype) for t in profile.tensors] == [
        ("first.weight", 1000, "float32"),
        ("middle.weight", 1000, "float32"),
        ("last.weight", 1000, "float32"),
    ]
    assert [t.ready_seconds for t in profile.tensors] == pytest.approx([0.039, 0.014, 0.0])
    assert profile.forward_seconds == pytest.approx(0.031)
    assert profile.backward_seconds == pytest.approx(0.039)
    assert profile.update_seconds == pytest.approx(0.005)
    assert profile.processors == pytest.approx(0.5)
    assert (profile.steps, profile.batch, profile.name) == (5, 32, "job")


def test_noise_does_not_move_a_median_far() -> None:
    profile = profile_from_trace(made_up(41, noise=0.2, seed=3))
    assert profile.step_seconds == pytest.approx(0.075, rel=0.05)


def test_the_rank_in_the_middle_counts() -> None:
    profile = profile_from_trace(made_up(8, slowdowns=(1.0, 3.0, 1.2)))
    assert profile.step_seconds == pytest.approx(1.2 * 0.075)
    assert "rank 2" in profile.source


def test_steps_without_all_gradients_do_not_count() -> None:
    trace = made_up(9)
    for rank in trace.gradients:
        del trace.gradients[rank][13:]  # recording of gradients ended within the fifth step
    profile = profile_from_trace(trace)
    assert profile.steps == 3
    assert profile.step_seconds == pytest.approx(0.075)


def test_without_gradients_allreduces_are_the_tensors() -> None:
    trace = made_up(6)
    for rank, moments in trace.gradients.items():
        for one in moments:
            trace.executions.append(
                CollectiveExecution(
                    rank, "ALLREDUCE", one.name, 0, 2000, 1, one.at, one.at + 1, one.at + 2, dtype="float16"
                )
            )
    trace.gradients = {}
    profile = profile_from_trace(trace)
    assert [t.name for t in profile.tensors] == ["first.weight", "middle.weight", "last.weight"]
    assert {(t.elements, t.dtype) for t in profile.tensors} == {(1000, "float16")}
    assert profile.step_seconds == pytest.approx(0.075)
    assert "allreduces" in profile.source


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (Trace(2), "has no steps"),
        (made_up(2), "2 steps of a rank, 2 of them with all gradients; a profile needs 3"),
        (Trace(2, steps=made_up(6).steps), "6 steps of a rank, 0 of them"),
    ],
)
def test_too_few_steps_are_an_error(trace: Trace, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        profile_from_trace(trace)


def test_a_batch_must_have_samples() -> None:
    with pytest.raises(ArgumentError, match="0 samples"):
        profile_from_trace(made_up(6), 0)


def written(trace: Trace, path: Path) -> Path:
    """A file with what a profile needs of a trace."""
    records: list[dict[str, Any]] = [
        {"name": START_EVENT, "ph": "M", "pid": 0, "args": {START_EVENT: 0, "size": trace.size}}
    ]
    for rank, steps in trace.steps.items():
        at = {"ph": "X", "pid": rank, "tid": 1001, "cat": "thread"}
        records += [{**at, "name": "STEP", "ts": begin, "dur": end - begin} for begin, end in steps]
        records += [{**at, "name": "WAIT", "ts": begin, "dur": end - begin} for begin, end in trace.waits[rank]]
        for one in trace.gradients[rank]:
            arguments = {"tensor": one.name, "number": one.number, "bytes": one.nbytes, "dtype": one.dtype}
            records.append({**at, "name": "GRADIENT", "ph": "i", "cat": "gradient", "ts": one.at, "args": arguments})
    path.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")
    return path


def test_the_command_writes_what_the_planner_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = written(made_up(6), tmp_path / "timeline.json"), tmp_path / "train.json"
    assert main(["trace", str(file), "--profile", str(out), "--batch", "16"]) == 0
    assert "3 gradients" in capsys.readouterr().out
    profile = read_profile(out)
    assert profile.batch == 16
    assert profile.step_seconds == pytest.approx(0.075)


def test_the_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = written(Trace(2), tmp_path / "timeline.json"), tmp_path / "train.json"
    assert main(["trace", str(file), "--profile", str(out)]) == 1
    assert "has no steps" in capsys.readouterr().err
    assert not out.exists()
    complete = written(made_up(6), tmp_path / "complete.json")
    assert main(["trace", str(complete), "--profile", str(tmp_path / "nowhere" / "train.json")]) == 1
    assert "nowhere" in capsys.readouterr().err
