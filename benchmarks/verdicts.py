"""How often `reigen trace` names the cause that was planted in a job.

    python -m benchmarks.verdicts                    ten jobs of each kind; about ten minutes
    python -m benchmarks.verdicts slow_rank --runs 3
    python -m benchmarks.verdicts --json docs/data/records/verdicts.json

The jobs are those of `tests/multiprocess/verdict_program.py`, on two processors of this machine, and one on two
stand-in hosts (root) whose link is slow. Counted are verdicts that name the planted cause first, that name it at all,
and that name it first without "probably".
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.machine import Machine, this_machine
from benchmarks.harness.record import Column, Quantity, Record, make_record
from benchmarks.harness.report import markdown
from benchmarks.harness.schedule import to_stderr
from reigen.errors import LaunchError
from reigen.observe.summary import summarize
from reigen.observe.trace_reader import read_trace
from reigen.observe.verdict import Cause, Confidence, JobVerdict
from tests.lab import Hosts, Unavailable

_SOURCE = Path(__file__).resolve().parents[1]
_PROGRAM = _SOURCE / "tests" / "multiprocess" / "verdict_program.py"
_LIMIT_SECONDS = 120.0
_LINK_BITS = 200e6


@dataclass(frozen=True)
class PlantedCause:
    """A kind of job.

    Attributes:
        title: of its line in the table.
        num_steps: how many it takes.
        options: of `reigen run`; empty: two stand-in hosts with a rank each.
        cause: what has to be found.
        rank: that has to be named with it; None: none.
    """

    title: str
    num_steps: int
    options: tuple[str, ...]
    cause: Cause
    rank: int | None = None

    def is_found_by(self, verdict: JobVerdict) -> bool:
        """Return whether a verdict, or one of its further causes, is the planted cause."""
        return verdict.cause is self.cause and (self.rank is None or verdict.rank == self.rank)


#: By the name of the function of the program.
KINDS = {
    "slow_rank": PlantedCause("a rank that waits for its data", 25, ("-np", "2"), Cause.LATE_RANK, rank=1),
    "large_share": PlantedCause("a rank that computes more", 12, ("-np", "2"), Cause.LATE_RANK, rank=1),
    "tiny_tensors": PlantedCause("2,000 tensors of 16 floats", 8, ("-np", "2"), Cause.SMALL_TENSORS),
    "many_ranks": PlantedCause("8 ranks on 2 cores", 10, ("-np", "8"), Cause.PROCESSORS),
    "busy_server": PlantedCause("a server with 24 MiB a step", 50, ("-np", "2", "-s", "1"), Cause.SERVER),
    "large_gradients": PlantedCause("200 Mbit/s between hosts", 20, (), Cause.NETWORK),
}


def run_here(name: str, kind: PlantedCause) -> JobVerdict:
    """Run a job on two processors of this machine, and return its verdict.

    Raises:
        LaunchError: the job has failed.
    """
    with tempfile.TemporaryDirectory(prefix="reigen-bench-") as directory:
        path = Path(directory, "timeline.json")
        command = [sys.executable, "-m", "reigen", "run", "--no-verdict", *kind.options]
        ended = subprocess.run(
            [*command, sys.executable, str(_PROGRAM), name, str(kind.num_steps)],
            env={**os.environ, "HOROVOD_TIMELINE": str(path), "OMP_NUM_THREADS": "1"},
            timeout=_LIMIT_SECONDS,
            capture_output=True,
            text=True,
            check=False,
        )
        if ended.returncode:
            raise LaunchError(f"{name} ended with exit code {ended.returncode}: {ended.stderr[-2000:]}")
        return summarize(read_trace(path)).verdict


def run_on_hosts(name: str, kind: PlantedCause) -> JobVerdict:
    """Run a job on two stand-in hosts with a slow link, and return its verdict.

    Raises:
        LaunchError: the job has failed.
        Unavailable: there can be no stand-in hosts here.
    """
    with Hosts(2, ssh_port=22) as hosts:
        for host in hosts:
            host.shape(_LINK_BITS)
        names = ",".join(f"{host.name}:1" for host in hosts)
        command = [sys.executable, "-m", "reigen", "run", "--no-verdict", "-np", "2", "-H", names]
        environ = {"PYTHONPATH": str(_SOURCE / "src"), "HOROVOD_TIMELINE": "/tmp/t.json", "OMP_NUM_THREADS": "1"}
        program = [sys.executable, str(_PROGRAM), name, str(kind.num_steps)]
        ended = hosts[0].run([*command, *program], env=environ, cwd=_SOURCE, timeout=_LIMIT_SECONDS)
        if ended.returncode:
            raise LaunchError(f"{name} ended with exit code {ended.returncode}: {ended.stderr[-2000:]}")
        return summarize(read_trace(hosts[0].root / "tmp/t.json")).verdict


@dataclass(frozen=True)
class VerdictCount:
    """Verdicts on the jobs of one kind.

    Attributes:
        runs: how many there were.
        first: named the planted cause first.
        named: named it at all.
        clear: named it first, and without "probably".
        others: what else was named.
    """

    runs: int
    first: int
    named: int
    clear: int
    others: frozenset[str]


def count_verdicts(kind: PlantedCause, verdicts: Sequence[JobVerdict]) -> VerdictCount:
    """Count how many verdicts name the planted cause, and what else is named."""
    first = [verdict for verdict in verdicts if kind.is_found_by(verdict)]
    named = [[verdict, *verdict.others] for verdict in verdicts]
    others = {each.cause.value for found in named for each in found if not kind.is_found_by(each)}
    return VerdictCount(
        len(verdicts),
        len(first),
        sum(any(map(kind.is_found_by, found)) for found in named),
        sum(verdict.confidence is Confidence.CLEAR for verdict in first),
        frozenset(others) - {Cause.UNCLEAR.value},
    )


_COLUMNS = ("program", "options, steps", "named first", "named", "clear", "also named")


def make_table(found: dict[str, VerdictCount], command: str, machine: Machine) -> Record:
    """Return what was counted, as a table."""
    lines: dict[str, dict[str, Quantity | str]] = {}
    for name, count in found.items():
        kind = KINDS[name]
        options = f"{' '.join(kind.options) or '2 hosts'}, {kind.num_steps}"
        counted = (f"{number} of {count.runs}" for number in (count.first, count.named, count.clear))
        others = ", ".join(sorted(count.others))
        lines[kind.title] = dict(zip(_COLUMNS, (name, options, *counted, others), strict=True))
    conditions = "real jobs with a planted cause, `tests/multiprocess/verdict_program.py`"
    return make_record(command, conditions, "planted", [Column(name) for name in _COLUMNS], lines, machine)


def main(arguments: Sequence[str]) -> int:
    """Run the jobs, and print a table; returns 1 if a cause was never named first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verdicts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="PROGRAM", help=f"of {', '.join(KINDS)} (default: all)")
    parser.add_argument("--runs", type=int, default=10, help="jobs of each kind (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(arguments)
    if options.runs < 1 or not set(options.kinds) <= set(KINDS):
        parser.error(f"at least one run of the programs {', '.join(KINDS)}")
    machine, found = this_machine(), dict[str, VerdictCount]()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    for name in options.kinds or KINDS:
        kind, verdicts = KINDS[name], list[JobVerdict]()
        run = run_here if kind.options else run_on_hosts
        try:
            for number in range(options.runs):
                verdicts.append(run(name, kind))
                to_stderr(f"{name}, job {number + 1} of {options.runs}: {verdicts[-1].lines()[0]}")
        except (LaunchError, Unavailable) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        found[name] = count_verdicts(kind, verdicts)
    words = shlex.join([*options.kinds, "--runs", str(options.runs)])
    record = make_table(found, f"python -m benchmarks.verdicts {words}", machine)
    headings, *lines = record.cells()
    print(f"\n{markdown(headings, lines)}")
    if options.json is not None and lines:
        record.save(options.json)
    return 0 if found and all(count.first for count in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
