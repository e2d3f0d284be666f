"""What `reigen run` says at the end of a job with a timeline, and when it says nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from reigen.cli import job_verdict
from reigen.cli.job_verdict import say_verdict

MS = 1000.0


def records(num_steps: int, late: float) -> list[dict[str, Any]]:
    """Steps of 20 ms of two ranks; rank 1 is late in each, and rank 0 waits for it."""
    found: list[dict[str, Any]] = [
        {"name": "start_time_since_epoch_in_micros", "ph": "M", "pid": 0, "args": {"size": 2}},
        *({"name": "process_name", "ph": "M", "pid": r, "args": {"name": f"rank {r} (h)"}} for r in range(2)),
    ]

    def add(name: str, category: str, rank: int, begin: float, end: float) -> None:
        arguments = {"tensor": "t", "bytes": 1 << 20}
        found.append(
            {"name": name, "cat": category, "ph": "X", "pid": rank, "ts": begin, "dur": end - begin, "args": arguments}
        )

    for step in range(num_steps):
        begin, end = 20 * MS * step, 20 * MS * (step + 1)
        ready = end - 1 * MS
        for rank in range(2):
            submitted = ready if rank else ready - late
            add("NEGOTIATE_ALLREDUCE", "negotiation", rank, submitted, ready)
            add("ALLREDUCE", "collective", rank, ready, ready + 500)
            add("WAIT", "thread", rank, submitted, ready + 500)
            add("STEP", "thread", rank, begin, end)
    return found


def said(path: Path, environ: Mapping[str, str] | None = None, begun: float | None = None) -> list[str]:
    lines: list[str] = []
    environ = {"HOROVOD_TIMELINE": str(path)} if environ is None else environ
    say_verdict(environ, path.stat().st_mtime - 1 if begun is None else begun, lines.append)
    return lines


def write(path: Path, *arguments: Any) -> Path:
    path.write_text("[\n" + ",\n".join(map(json.dumps, records(*arguments))) + "\n]\n")
    return path


def test_what_bounded_the_job_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", 100, 8 * MS)
    first, second = said(path)
    assert first == f"verdict: 40% of a step was waiting for rank 1: it came last (reigen trace {path} says more)"
    assert second.startswith("what to do: ")
    other = {"REIGEN_TIMELINE": str(path), "HOROVOD_TIMELINE": str(tmp_path / "missing.json")}
    assert said(path, other) == [first, second]
    file = tmp_path / "m.jsonl"
    file.write_text('{"role": "job", "verdict": ""}\n')
    say_verdict(other, path.stat().st_mtime - 1, lambda line: None, file)
    assert json.loads(file.read_text().splitlines()[1])["verdict"] == f"{first}\n{second}".removeprefix("verdict: ")


def test_only_a_part_of_a_large_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.json", 2000, 8 * MS)
    monkeypatch.setattr(job_verdict, "_MOST_BYTES", 400_000)
    assert path.stat().st_size > 1_000_000
    assert said(path)[0].startswith("verdict: 40% of a step was waiting for rank 1")


def test_nothing_is_said_of_a_short_job_nor_where_nothing_stands_out(tmp_path: Path) -> None:
    assert said(write(tmp_path / "t.json", 99, 8 * MS)) == []
    found = records(100, 0.0)
    for step in range(100):  # a quarter of each step is waiting, nobody knows for what
        unknown = {"name": "WAIT", "cat": "thread", "ph": "X", "ts": 20 * MS * step + MS, "dur": 5 * MS}
        found += [{**unknown, "pid": rank, "args": {"tensor": "unknown"}} for rank in range(2)]
    path = tmp_path / "t.json"
    path.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
    assert said(path) == []


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert said(tmp_path / "pipe", begun=0) == []


def test_other_files_and_broken_ones_are_no_matter(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", 100, 8 * MS)
    assert said(path, {}) == said(path, {"HOROVOD_TIMELINE": "DYNAMIC"}) == []
    assert said(path, {"HOROVOD_TIMELINE": str(tmp_path)}) == []
    assert said(path, {"HOROVOD_TIMELINE": str(tmp_path / "elsewhere.json")}) == []
    os.utime(path, (0, 0))
    assert said(path, begun=time.time() - 1) == []  # of an earlier job
    text = json.dumps(
        [*records(0, 0), {"name": "STEP", "cat": "thread", "ph": "X", "pid": 0, "ts": -1e308, "dur": 1e308}]
    )
    for broken in ("", "{", "[1]", text):
        path.write_text(broken)
        assert said(path, begun=0.0) == []
