"""The timeline of real processes: valid while it grows, complete at the end, and after a kill, too."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reigen
from reigen import context
from reigen.errors import ArgumentError
from reigen.observe.summary import summarize
from reigen.observe.trace_reader import read_trace
from reigen.testing import RankError, RankPool, run_ranks
from tests.multiprocess.launcher import Launcher, launched, until

pytestmark = pytest.mark.slow  # many real processes

Pools = Callable[[int], RankPool]


def load(path: Path) -> list[dict[str, Any]]:
    """The records, as soon as nobody writes while they are read.

    A write may be found half done, for a moment; so only what stays as it is has to be valid.
    """
    while True:
        before = path.stat()
        data = path.read_bytes()
        after = path.stat()
        if (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size):
            try:
                return json.loads(data)
            except ValueError:
                until(lambda seen=data: path.read_bytes() != seen, 10)


def count(path: Path, name: str) -> Counter[int]:
    return Counter(r["pid"] for r in load(path) if r["name"] == name)


def steps(num_steps: int) -> None:
    for _ in range(num_steps):
        handles = [
            reigen.allreduce_async(np.ones(n, np.float32), name=f"gradient.{n}") for n in (1, 1000, 100_000, 3_000_000)
        ]
        for handle in handles:
            reigen.synchronize(handle)
        context.mark("STEP")
    reigen.barrier()  # a rank that leaves ends the recording on all


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_is_in_the_file_from_the_first_to_the_last(size: int, rank_pool: Pools, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    env = {"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    rank_pool(size).run(steps, 10, init=True, env=env, check_leaks=True)
    records = load(path)
    assert records[0]["args"]["start_time_since_epoch_in_micros"] > 1.7e15
    everybody = set(range(size))
    for name, times in (("NEGOTIATE_ALLREDUCE", 40), ("ALLREDUCE", 40), ("STEP", 9)):
        assert count(path, name) == dict.fromkeys(everybody, times)
    for name in ("process_name", "clock_offset", "CYCLE_START"):
        assert set(count(path, name)) == everybody
    if size > 1:
        for name in ("SHM_ALLREDUCE", "WAIT_FOR_OTHER_RANKS", "WAIT"):
            assert set(count(path, name)) == everybody
    clocks = [r["args"] for r in records if r["name"] == "clock_offset"]
    assert clocks == [{"offset_us": 0.0, "error_us": 0.0}] * size  # one host, one clock
    assert not [r for r in records if r["name"].startswith("dropped")]


def begin_and_end(directory: str) -> list[bool]:
    path = Path(directory, "t.json")
    reigen.start_timeline(str(path), mark_cycles=False)
    steps(3)
    reigen.barrier()
    reigen.stop_timeline()
    is_complete = reigen.rank() != 0 or count(path, "STEP") == dict.fromkeys(range(reigen.size()), 2)
    steps(1)
    if reigen.rank() == 0:
        with pytest.raises(ArgumentError, match="cannot be written"):
            reigen.start_timeline(f"{directory}/missing/t.json")
        reigen.start_timeline(f"{directory}/again.json")
    steps(2)
    return [is_complete]


def test_start_and_stop_at_run_time(rank_pool: Pools, tmp_path: Path) -> None:
    assert rank_pool(2).run(begin_and_end, str(tmp_path), init=True) == [[True], [True]]
    assert set(count(tmp_path / "again.json", "ALLREDUCE")) == {0, 1}
    with pytest.raises(ValueError, match="not been initialized"):
        reigen.start_timeline("x")
    with pytest.raises(ValueError, match="not been initialized"):
        reigen.stop_timeline()


def test_a_job_whose_file_cannot_be_written_warns_and_goes_on(rank_pool: Pools, tmp_path: Path) -> None:
    pool = rank_pool(2)
    pool.run(steps, 1, init=True, env={"HOROVOD_TIMELINE": f"{tmp_path}/missing/t.json"})
    assert "cannot be written to" in pool.output(0)[1]
    assert pool.output(1)[1] == ""


def fill_the_disk(directory: str) -> None:
    """As far as this process may: SIGXFSZ is ignored by Python, so writing fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if reigen.rank() == 0:
        reigen.start_timeline(f"{directory}/t.json")
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        for _ in range(1000):
            for i in range(100):
                reigen.allreduce(np.ones(10), name=f"t{i}")
            recording = np.array(context.current().timeline.is_recording, np.int64)
            if not reigen.allreduce(recording, op=reigen.Max):
                break
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    reigen.barrier()
    if reigen.rank() == 0:
        reigen.stop_timeline()
        reigen.start_timeline(f"{directory}/again.json")
    steps(2)


def test_a_full_disk_ends_the_timeline_and_not_the_job(rank_pool: Pools, tmp_path: Path) -> None:
    pool = rank_pool(2)
    pool.run(fill_the_disk, str(tmp_path), init=True)
    assert "t.json ends here, it cannot be written: File too large" in pool.output(0)[1]
    assert 20_000 < (tmp_path / "t.json").stat().st_size <= 40_000
    assert len(load(tmp_path / "t.json")) > 50
    assert count(tmp_path / "again.json", "STEP") == {0: 1, 1: 1}


def lose_one() -> None:
    steps(3)
    if reigen.rank() == 2:
        path = Path(os.environ["HOROVOD_TIMELINE"])
        until(lambda: count(path, "STEP")[2] == 2)  # what it did has been sent
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        reigen.allreduce(np.ones(3), name="too late")
    reigen.shutdown()


def test_a_rank_that_dies_keeps_nobody_waiting(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(RankError) as caught:
        run_ranks(lose_one, 3, init=True, env={"HOROVOD_TIMELINE": str(path)})
    assert [failure.rank for failure in caught.value.failures] == [2]
    assert count(path, "STEP") == {0: 2, 1: 2, 2: 2}
    assert count(path, "FAILED")[0] == 1


def kill(launcher: Launcher) -> None:
    """SIGKILL for all ranks."""
    for pid, command in launcher.processes().items():
        if ".py" in command and "reigen run" not in command:
            os.kill(pid, signal.SIGKILL)


ENDLESS = """
import numpy as np, reigen
reigen.init()
while True:
    reigen.allreduce(np.ones(100), name="t")
    reigen.allreduce(np.ones(300_000), name="large")
"""


def test_valid_while_it_grows_and_after_a_kill(tmp_path: Path) -> None:
    path, script = tmp_path / "t.json", tmp_path / "endless.py"
    script.write_text(ENDLESS)
    with launched("-np", "2", sys.executable, str(script), env={"HOROVOD_TIMELINE": str(path)}) as launcher:
        until(path.exists)
        lengths = {len(load(path))}

        def has_grown() -> bool:
            lengths.add(len(load(path)))
            return len(lengths) > 8

        until(has_grown)
        kill(launcher)
    assert len(load(path)) >= max(lengths)
    assert set(count(path, "ALLREDUCE")) == {0, 1}


STUCK = """
import numpy as np, reigen, threading
reigen.init()
reigen.allreduce(np.ones(100), name="together")
if reigen.rank() == 0: reigen.allreduce(np.ones(100), name="alone")
threading.Event().wait()
"""


def test_the_file_of_a_job_that_hangs_says_in_what(tmp_path: Path) -> None:
    path, script = tmp_path / "t.json", tmp_path / "stuck.py"
    script.write_text(STUCK)
    with launched("-np", "2", sys.executable, str(script), env={"HOROVOD_TIMELINE": str(path)}) as launcher:
        until(lambda: path.exists() and read_trace(path).pending)
        kill(launcher)
    assert [(one.rank, one.tensor) for one in read_trace(path).pending] == [(0, "alone")]
    assert "rank(s) 1 had not submitted it" in summarize(read_trace(path)).sentences[0]
