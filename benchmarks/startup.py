"""`reigen bench startup`: what starting two ranks takes longer than starting Python twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from benchmarks.harness.figures import overhead, summarize
from benchmarks.harness.report import Document, Row, Verdict
from benchmarks.harness.schedule import Report, rotated
from reigen.errors import LaunchError

_RUN, _PYTHON = "reigen run, init", "python -c pass, as often at the same time"
_BUDGET_SECONDS = 1.5
_LIMIT_SECONDS = 60.0
_SCRIPT = "import reigen; reigen.init()"


def run(num_ranks: int, rounds: int, command: str, report: Report) -> Document:
    """Measure both alternately, after one start of each that does not count.

    Raises:
        LaunchError: a start failed.
    """
    document = Document(command, num_ranks, rounds)
    launcher = [sys.executable, "-m", "reigen", "run", "-np", str(num_ranks), sys.executable, "-c", _SCRIPT]
    commands: dict[str, list[list[str]]] = {
        _RUN: [launcher],
        _PYTHON: [[sys.executable, "-c", "pass"]] * num_ranks,
    }
    samples: dict[str, list[list[float]]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name in rotated(list(commands), number):
            report(f"starts: round {number} of {rounds}, {name}")
            seconds = _time(commands[name])
            if number:
                samples[name].append([seconds])
    summaries = {name: summarize(found) for name, found in samples.items()}
    document.rows.append(Row("start and end", 0, summaries, _PYTHON))
    extra = overhead(summaries[_RUN], summaries[_PYTHON])
    claim = f"{_RUN}, {num_ranks} ranks: seconds more than {_PYTHON}"
    document.verdicts.append(Verdict(claim, extra.median, _BUDGET_SECONDS, at_least=False, note="s"))
    return document


def _time(commands: Sequence[Sequence[str]]) -> float:
    """Seconds from the start of the first of these processes to the end of the last."""
    begin = time.perf_counter()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes += [
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
            for command in commands
        ]
        for process in processes:
            _, errors = process.communicate(timeout=_LIMIT_SECONDS)
            if process.returncode:
                raise LaunchError(f"{process.args!r}: {errors.decode(errors='replace')}")
        return time.perf_counter() - begin
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"a start took more than {_LIMIT_SECONDS:.0f} s: {error.cmd}") from None
    finally:
        for process in processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
