"""The timeline between ranks that are threads, with clocks that differ."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reigen.context import Context
from reigen.errors import ArgumentError
from reigen.observe.clock_sync import TimelineClock
from reigen.observe.sender import PERIOD_SECONDS
from reigen.observe.timeline import Timeline
from reigen.types import DTYPES, ReduceOp
from tests.unit.engine import jobs

FLOAT = DTYPES["float32"]
SECOND = 1_000_000_000


def between(size: int, act: Callable[[Context], Any], offsets: tuple[int, ...] = (), **knobs: Any) -> list[Any]:
    """``act(context)`` on ranks that are threads, whose clocks are ``offsets`` nanoseconds ahead."""

    def prepare(job: Context) -> None:
        if offsets:
            ahead = offsets[job.rank]
            clock = TimelineClock(lambda: time.monotonic_ns() + ahead, f"clock of rank {job.rank}")
            job.timeline = Timeline(job._engine, job.rank, size, f"host{job.rank}", clock)
        job.barrier(name="ready", blocking=True).wait()

    return jobs.between(size, act, prepare, **knobs)


def reduce(job: Context, name: str, count: int = 4) -> None:
    x = np.ones(count, np.float32)
    job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name=name).wait()
    assert x[0] == job.size


def records(path: Path, name: str, **fields: Any) -> list[dict[str, Any]]:
    found = [r for r in json.loads(path.read_bytes()) if r["name"] == name]
    return [r for r in found if all(r[key] == value for key, value in fields.items())]


def test_clocks_that_differ_are_brought_together(tmp_path: Path) -> None:
    path, offsets, size = tmp_path / "t.json", (0, 3600 * SECOND, -7 * SECOND), 3

    def act(job: Context) -> None:
        job.timeline.start(str(path), mark_cycles=False)
        reduce(job, "first")
        for i in range(40):
            if i % 3 == job.rank:
                threading.Event().wait(0.002)
            reduce(job, f"t{i}")

    between(size, act, offsets)
    errors = {}
    for rank in range(size):
        clocks = [r["args"] for r in records(path, "clock_offset", pid=rank)]
        for clock in clocks[-1:]:
            errors[rank] = clock["error_us"]
            assert abs(clock["offset_us"] + offsets[rank] / 1000) <= clock["error_us"]
            assert clock["error_us"] < 20_000
    for i in range(40):
        submitted, begun = {}, {}
        for rank in range(size):
            (one,) = [
                r for r in records(path, "NEGOTIATE_ALLREDUCE", pid=rank) if r["args"]["tensor"] == f"allreduce.t{i}"
            ]
            submitted[rank] = one["ts"]
            (one,) = [r for r in records(path, "ALLREDUCE", pid=rank) if r["args"]["tensor"] == f"allreduce.t{i}"]
            begun[rank] = one["ts"]
        last = max(submitted, key=submitted.__getitem__)
        for rank in range(size):
            assert begun[rank] >= submitted[last] - 2 * (errors[rank] + errors[last])
    assert {r["args"]["name"] for r in records(path, "process_name")} == {f"rank {r} (host{r})" for r in range(3)}


@pytest.mark.parametrize("size", [1, 2])
def test_recording_begins_and_ends_while_the_job_runs(size: int, tmp_path: Path) -> None:
    def act(job: Context) -> int:
        reduce(job, "before")
        for number in range(3):
            path = tmp_path / f"{number}.json"
            job.timeline.start(str(path), mark_cycles=number == 1)
            reduce(job, f"during {number}")
            job.timeline.start(str(path), mark_cycles=False)  # has begun already
            if job.rank == 0:
                with pytest.raises(ArgumentError, match=r"is being written to .* already: call stop_timeline"):
                    job.timeline.start(str(tmp_path / "other.json"), mark_cycles=False)
            job.barrier(blocking=True).wait()
            job.timeline.stop()
            job.barrier(blocking=True).wait()
            if job.rank == 0:
                assert len(records(path, "ALLREDUCE")) == size
                assert {r["args"]["tensor"] for r in records(path, "ALLREDUCE")} == {f"allreduce.during {number}"}
                assert bool(records(path, "CYCLE_START")) == (number == 1)
        reduce(job, "after")
        job.timeline.stop()
        return sum(thread.name.startswith("reigen-timeline") for thread in threading.enumerate())

    between(size, act)


def test_a_file_that_cannot_be_written_is_told_at_once_and_the_job_goes_on(tmp_path: Path) -> None:
    def act(job: Context) -> None:
        if job.rank == 0:
            with pytest.raises(ArgumentError, match=r"cannot be written to .*missing.*No such file"):
                job.timeline.start(str(tmp_path / "missing" / "t.json"), mark_cycles=False)
        reduce(job, "goes on")
        job.timeline.start(str(tmp_path / "t.json"), mark_cycles=False)
        reduce(job, "shown")

    between(2, act)
    assert len(records(tmp_path / "t.json", "ALLREDUCE")) == 2


def test_who_leaves_first_waits_until_the_others_have_told_the_rest(tmp_path: Path) -> None:
    """Also when others leave much later: their last events are there."""

    def act(job: Context) -> None:
        for i in range(5):
            reduce(job, f"t{i}", 300_000)
        if job.rank != 1:
            threading.Event().wait(0.3)

    between(3, act, timeline=str(tmp_path / "t.json"))
    for rank in range(3):
        assert len(records(tmp_path / "t.json", "ALLREDUCE", pid=rank)) == 5
        # from the very first submission on
        assert len(records(tmp_path / "t.json", "NEGOTIATE_BARRIER", pid=rank)) == 1


def test_without_a_timeline_nobody_is_told_anything() -> None:
    def act(job: Context) -> tuple[object, object]:
        reduce(job, "t")
        return job._engine._observer, job._engine._backend.phase_ended

    assert between(2, act) == [(None, None)] * 2


def test_what_happened_is_in_the_file_within_a_tenth_of_a_second() -> None:
    """After one period of the rank that sends it and one of the rank that writes it; programs look after 0.1 s."""
    assert 2 * PERIOD_SECONDS <= 0.1
