"""Real processes of a benchmark: they take turns, they fail loudly, and none is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.crew import Crew, CrewSpec
from benchmarks.harness.memory import DTYPES, measure
from benchmarks.harness.work import Case
from reigen.errors import LaunchError

_COPYING = "benchmarks.programs.copying"


def test_ranks_take_turns() -> None:
    with Crew(CrewSpec("copying", _COPYING, 2)) as crew:
        crew.spawn()
        crew.meet()
        assert "numpy" in crew.versions
        assert [len(timeline) for timeline in crew.open("k", Case("copy", 4096), 2)] == [2, 2]
        assert [len(timeline) for timeline in crew.turn("k", 1, 3)] == [3, 3]
        crew.shut("k")
        assert [len(timeline) for timeline in crew.open("both ways", Case("two copies", 4096, count=3), 2)] == [2, 2]


def test_a_rank_that_is_killed_ends_the_turn() -> None:
    with Crew(CrewSpec("copying", _COPYING, 2)) as crew:
        crew.spawn()
        crew.meet()
        crew.open("k", Case("copy", 4096), 1)
        os.kill(crew.pids[1], signal.SIGKILL)
        with pytest.raises(LaunchError, match="copying: a rank"):
            crew.turn("k", 0, 1)
        with pytest.raises(LaunchError, match="copying: a rank"):  # and not an answer that came late
            crew.turn("k", 0, 1)


def test_a_program_that_cannot_start_says_why(tmp_path: Path) -> None:
    program = tmp_path / "broken.py"
    program.write_text("def start(rank, size):\n    raise RuntimeError('no such fabric')\n")
    with Crew(CrewSpec("broken", str(program), 2)) as crew:
        crew.spawn()
        with pytest.raises(LaunchError, match="RuntimeError: no such fabric"):
            crew.meet()


def test_a_wrong_result_is_no_result(tmp_path: Path) -> None:
    program = tmp_path / "wrong.py"
    program.write_text(
        "from benchmarks.programs.copying import Copy, Copying\n"
        "class Wrong(Copy):\n    def operate(self): pass\n"
        "class Program(Copying):\n    def open(self, case): return Wrong([case.nbytes])\n"
        "def start(rank, size): return Program()\n"
    )
    with Crew(CrewSpec("wrong", str(program), 1)) as crew:
        crew.spawn()
        crew.meet()
        with pytest.raises(LaunchError, match="WrongResultError: the copy differs"):
            crew.open("k", Case("copy", 64), 1)


def test_a_starter_that_does_not_exist_is_told() -> None:
    with (
        Crew(CrewSpec("mpi", _COPYING, 1, ("no-such-mpirun",))) as crew,
        pytest.raises(LaunchError, match="cannot start"),
    ):
        crew.spawn()


@pytest.mark.slow
def test_the_command_measures_and_writes_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "reigen", "bench", "allreduce", "--sizes", "4KiB", "--peers", "", "--no-gradients"]
    options = ["--rounds", "2", "--seconds", "0.01", "--json", str(tmp_path / "found.json")]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "4 KiB" in ended.stdout
    modes = json.loads((tmp_path / "found.json").read_text())["rows"][0]["modes"]
    ours = {"reigen registered", "reigen ordinary", "reigen's backend alone"}
    assert set(modes) == ours | {"copy of as many bytes", "copy of fresh data"}
    assert all(len(summary["rounds"]) == 2 and summary["median"] > 0 for summary in modes.values())


def test_variables_of_a_crew_are_its_own(tmp_path: Path) -> None:
    program = tmp_path / "environment.py"
    program.write_text(
        "import os\n"
        "class Program:\n"
        "    versions = {'capacity': os.environ['REIGEN_CACHE_CAPACITY']}\n"
        "    def close(self): pass\n"
        "def start(rank, size): return Program()\n"
    )
    with Crew(CrewSpec("environment", str(program), 1, variables={"REIGEN_CACHE_CAPACITY": "0"})) as crew:
        crew.spawn()
        crew.meet()
        assert crew.versions == {"capacity": "0"}
    assert "REIGEN_CACHE_CAPACITY" not in os.environ


@pytest.mark.slow
def test_calls_are_measured_with_and_without_the_cache(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "reigen", "bench", "calls", "--tensors", "8", "--no-gradients", "--no-memory"]
    options = ["--rounds", "2", "--seconds", "0.01", "--json", str(tmp_path / "found.json")]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=150, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    ours = {"reigen separate", "reigen separate, no response cache", "reigen one group"}
    assert {row["title"]: set(row["modes"]) for row in rows} == {
        "8 tensors of 4 KiB": ours | {"gloo separate", "gloo 25 MiB buckets"},
        "8 tensors of 4 B": ours,
    }


@pytest.mark.slow
def test_staging_is_bounded_whatever_is_fused() -> None:
    found = measure(2, 128 << 20, len(DTYPES), 200, 64 << 10)
    assert found.tensors_bytes == 200 << 16
    assert 1 << 20 < found.segment < 8 << 20
    assert 0 < found.peak < 16 << 20
    assert len(found.ranks) == 2
