"""Real jobs with a cause that bounds them: their timelines name it, whatever else this machine does meanwhile."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from reigen.observe.summary import summarize
from reigen.observe.trace_reader import read_trace
from reigen.observe.verdict import Cause, Confidence
from tests.multiprocess.launcher import run

PROGRAM = Path(__file__).with_name("verdict_program.py")

pytestmark = pytest.mark.slow  # real processes, for seconds


@pytest.mark.parametrize(
    ("program", "num_steps", "options", "cause"),
    [
        ("slow_rank", 15, ("-np", "2"), Cause.LATE_RANK),
        ("large_share", 8, ("-np", "2"), Cause.LATE_RANK),
        ("tiny_tensors", 12, ("-np", "2"), Cause.SMALL_TENSORS),
        ("many_ranks", 10, ("-np", "8"), Cause.PROCESSORS),
        ("busy_server", 60, ("-np", "2", "-s", "1"), Cause.SERVER),
    ],
)
def test_what_bounds_a_job_is_named(
    program: str, num_steps: int, options: tuple[str, ...], cause: Cause, tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    environ = {"HOROVOD_TIMELINE": str(path), "OMP_NUM_THREADS": "1"}
    cpus = sorted(os.sched_getaffinity(0))[:2]
    command = (sys.executable, str(PROGRAM), program, str(num_steps))
    code, _, err = run(*options, *command, env=environ, preexec_fn=lambda: os.sched_setaffinity(0, cpus))
    assert code == 0, err
    found = summarize(read_trace(path)).verdict
    assert cause in {found.cause, *(other.cause for other in found.others)}, found
    # where tests run beside others, that is a cause, too
    assert found.cause in {cause, Cause.PROCESSORS} or found.confidence < Confidence.CLEAR, found
    late = [one for one in (found, *found.others) if one.cause is Cause.LATE_RANK]
    if cause is Cause.LATE_RANK:
        assert [one.rank for one in late] == [1], found


def test_the_end_of_a_job_says_what_bounded_it(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    program = ("--timeline-filename", str(path), sys.executable, str(PROGRAM), "slow_rank_in_short_steps", "101")
    code, out, err = run("-np", "2", *program)
    assert (code, out) == (0, "")
    first = next(line for line in err.splitlines() if "verdict" in line)
    assert first.startswith("reigen run: verdict: "), err
    assert f"(reigen trace {path} says more)" in first
    for option in ("--no-verdict", "--as-horovod"):
        code, out, err = run("-np", "2", option, *program)
        assert (code, out) == (0, "")
        assert "verdict" not in err


def test_without_a_timeline_metrics_say_who_was_waited_for(tmp_path: Path) -> None:
    code = "import time, reigen; reigen.init(); time.sleep(11 * reigen.rank()); reigen.barrier()"
    options = ("-np", "2", "--metrics-file", str(tmp_path / "metrics.jsonl"))
    exit_code, out, err = run(*options, sys.executable, "-c", code)
    assert (exit_code, out) == (0, "")
    assert "reigen run: verdict: rank 1 (host " in err
    assert "they waited for it (HOROVOD_TIMELINE=FILE says why)" in err
