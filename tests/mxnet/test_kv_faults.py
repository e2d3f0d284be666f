"""Scripts for MXNet's KVStore that go wrong, under `reigen run --as-mxnet`: who is told what."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import reigen

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "faults.py"


def fail(mode: str, *arguments: str, **variables: str) -> tuple[int, str]:
    """Exit code, and all that a job of two workers and two servers said."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "REIGEN_"))}
    environ |= {"PYTHONPATH": str(Path(reigen.__file__).parents[1]), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "reigen", "run", "-np", "2", "-s", "2", "--as-mxnet", sys.executable]
    done = subprocess.run(
        [*command, str(PROGRAM), mode, *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout


def test_the_mistake_of_all_workers_is_said_last() -> None:
    code, said = fail("all raise")
    last_words = said[said.index("reigen run: ") :]
    assert code == 1
    assert last_words.startswith(("reigen run: rank 0 failed first", "reigen run: rank 1 failed first")), said
    assert "    RuntimeError: a mistake of the script\n" in last_words


def test_nothing_is_said_behind_a_mistake_amid_pushes() -> None:
    """Its pushes fail because of it, which nobody needs to hear of."""
    code, said = fail("raise amid pushes")
    assert code == 1
    assert "RuntimeError: a mistake of the script" in said
    assert "Exception ignored" not in said
    assert "closed" not in said


def test_the_profiler_of_servers_is_left_out_with_a_warning(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    code, said = fail("profile servers", str(trace))
    assert (code, trace.exists()) == (0, True), said
    assert "RuntimeWarning: Reigen's servers cannot be profiled by mx.profiler" in said


def test_a_stopped_worker_is_lost() -> None:
    code, said = fail("one stops", PS_HEARTBEAT_INTERVAL="1", PS_HEARTBEAT_TIMEOUT="10")
    assert code == 1
    last_words = said[said.index("reigen run: ") :]
    assert last_words.startswith("reigen run: rank 0 failed first: exit code 1"), said
    assert "PeerLostError: " in last_words  # of the key's round, or of the whole job: whatever it heard first
    assert "nothing was heard of it for 10 s" in last_words
    assert "1 other rank was stopped because of it" in said


@pytest.mark.parametrize("mode", ["others push", "others pushpull"])
def test_workers_that_push_different_keys_and_end_do_not_wait_for_each_other(mode: str) -> None:
    code, said = fail(mode, REIGEN_STALL_CHECK_TIME_SECONDS="1")
    assert code == 5, said
    assert "waiting: worker 0; missing: worker 1" in said
    assert "waiting: worker 1; missing: worker 0" in said
    assert "key 'x0'" in said
    assert "key 'x1'" in said


def test_workers_that_create_different_keys_are_told_so() -> None:
    code, said = fail("others init", REIGEN_STALL_CHECK_TIME_SECONDS="1", REIGEN_DEADLINE="8")
    assert code == 1
    assert "what the key 'y0' is for" in said  # the warning
    assert "DeadlineError: what the key 'y" in said
