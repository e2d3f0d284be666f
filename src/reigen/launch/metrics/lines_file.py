"""Metrics as JSON lines in a file: one for each report of a process, a last one for each process, and the job's end.

A line is an object: ``time`` (seconds since 1970), ``role``, ``rank`` (of a server its number), ``host``, ``epoch``
(of the view of an elastic job, else 0), ``final``, and ``metrics``: numbers by name, as `reigen.metrics` has them.
The last one has the role ``job``, ``exit_code``, ``failure`` (what the launcher says of it, or empty), and ``verdict``:
what bounded the job, or empty.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from reigen.cluster.metrics import MetricsReport, find_metric, format_sample
from reigen.errors import ConfigError
from reigen.files import open_to_append

#: Lines that wait to be written; further ones are dropped while a disk hangs.
_MAX_WAITING = 10_000
_LAST_SECONDS = 5.0


class MetricsFile:
    """File of metrics, written by a thread of its own: the job does not wait for a disk that hangs.

    Args:
        path: of the file; lines are added to one that is there.
        complain: called once if it cannot be written any more; nothing more is written then.

    Raises:
        ConfigError: it cannot be opened.
    """

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self._path, self._complain = path, complain
        try:
            self._descriptor = open_to_append(path, mode=0o666)
        except OSError as error:
            raise ConfigError(f"--metrics-file {path}: it cannot be written: {error.strerror}") from None
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_MAX_WAITING)
        #: by key, the latest report of each process that has not said its last word
        self._latest: dict[str, tuple[MetricsReport, float]] = {}
        self._end: bytes | None = None
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="reigen-metrics-file", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def add(self, key: str, report: MetricsReport) -> None:
        """Have a report written; returns at once."""
        now = time.time()
        self._put(format_line(report, now, is_final=report.is_last))
        if report.is_last:
            self._latest.pop(key, None)
        else:
            self._latest[key] = report, now

    def finish(self, exit_code: int, failure: str, verdict: str) -> None:
        """Take note of the job's end, for the last line."""
        self._end = format_end(time.time(), exit_code, failure, verdict)

    def close(self) -> None:
        """Write the last lines: of a process that was killed, its latest report once more; and the job's end."""
        for report, at in self._latest.values():
            self._put(format_line(report, at, is_final=True))
        self._latest.clear()
        if self._end is not None:
            self._put(self._end)
            self._end = None
        if self._thread.is_alive():
            self._put(None)
            self._thread.join(_LAST_SECONDS)
        if not self._thread.is_alive():
            os.close(self._descriptor)

    def _put(self, line: bytes | None) -> None:
        try:
            self._waiting.put_nowait(line)
        except queue.Full:
            self._break(f"{_MAX_WAITING} lines wait to be written; the next ones are left out")

    def _run(self) -> None:
        while (line := self._waiting.get()) is not None:
            if self._is_broken:
                continue
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except OSError as error:
                self._break(f"it cannot be written any more: {error.strerror}")

    def _break(self, problem: str) -> None:
        if not self._is_broken:
            self._is_broken = True
            self._complain(f"--metrics-file {self._path}: {problem}; the job goes on")


def format_line(report: MetricsReport, at: float, *, is_final: bool) -> bytes:
    """Return a report as a line.

    Args:
        report: of a process.
        at: when it came, in seconds since 1970.
        is_final: it is the process's last one.
    """
    line: Mapping[str, object] = {
        "time": round(at, 3),
        "role": report.kind,
        "rank": report.number,
        "host": report.host,
        "epoch": report.epoch,
        "final": is_final,
        "metrics": {format_sample(sample): sample[2] for sample in report.samples if find_metric(sample) is not None},
    }
    return msgspec.json.encode(line) + b"\n"


def format_end(at: float, exit_code: int, failure: str, verdict: str) -> bytes:
    """Return the end of a job as a line; ``at``: in seconds since 1970."""
    end = {"role": "job", "final": True, "exit_code": exit_code, "failure": failure.strip(), "verdict": verdict}
    return msgspec.json.encode({"time": round(at, 3), **end}) + b"\n"


def append_verdict(path: Path, verdict: str) -> None:
    """Add a line about a job whose file is closed: a verdict that could only be found then. Raises nothing.

    A disk that hangs is waited for as long as at the job's end.
    """
    writer = threading.Thread(target=_append, args=(path, format_end(time.time(), 0, "", verdict)), daemon=True)
    writer.start()
    writer.join(_LAST_SECONDS)


def _append(path: Path, line: bytes) -> None:
    with suppress(OSError):
        descriptor = open_to_append(path, mode=0o666)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
