"""What workers of parameter servers pay for leases of samples, and for servers that move to another process.

    python -m benchmarks.elastic_servers leases
    python -m benchmarks.elastic_servers moves
    python -m benchmarks.elastic_servers moves --json docs/data/records/server-moves.json

``leases``: two workers take batches, for each of which they pull and push an array, with `kv.sample_leases` and
without, alternately; on one server, on one that saves snapshots, and on two that keep copies of each other. ``moves``:
two workers train on two servers, which run in one process or in two, alternately. Taken is what the longest round
behind a change took more than a usual one.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.harness.machine import Machine, this_machine
from benchmarks.harness.record import Column, Line, Quantity, Record, make_record
from benchmarks.harness.report import markdown
from benchmarks.harness.schedule import to_stderr
from reigen.errors import LaunchError

_LIMIT_SECONDS = 600.0
_SIZES = {"4 KiB": 1 << 10, "1 MiB": 1 << 18, "16 MiB": 1 << 22}
_BATCHES = {"4 KiB": 300, "1 MiB": 100, "16 MiB": 20}
_MILLIONS = (1, 25)
_SNAPSHOTS = "snapshots"
#: Options of `reigen run`, by what keeps the servers' values.
_SERVERS = {"nothing": ("-s", "1"), _SNAPSHOTS: ("-s", "1"), "copies": ("-s", "2", "--replicate-servers", "2")}


def run_program(options: Sequence[str], program: Sequence[str], environ: Mapping[str, str]) -> list[list[float]]:
    """Run `benchmarks.programs.elastic_servers` in a job of two workers, and return what it has found.

    Raises:
        LaunchError: the job has failed.
    """
    command = [sys.executable, "-m", "reigen", "run", "--no-prefix", "-np", "2", *options, sys.executable]
    ended = subprocess.run(
        [*command, "-m", "benchmarks.programs.elastic_servers", *program],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        timeout=_LIMIT_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise LaunchError(f"{shlex.join(program)} ended with exit code {ended.returncode}: {ended.stderr[-2000:]}")
    found: list[list[float]] = json.loads(ended.stdout)
    return found


def lease_line(kept: str, size: str, turns: Sequence[Sequence[float]]) -> Line:
    """Return a line of the table of leases: what keeps the values, size of the array, (without, with) by turn."""
    without, leased = (statistics.median(turn[which] for turn in turns) for which in (0, 1))
    more = statistics.median(turn[1] - turn[0] for turn in turns)
    cells = {"without leases": without, "with leases": leased, "more": more}
    return Line(f"{kept}, {size}", {name: Quantity(value) for name, value in cells.items()})


def move_line(millions: int, moves: Sequence[Sequence[float]]) -> Line:
    """Return a line of the table of moves: size of the model, (longest, usual) by move."""
    longest, usual = (sorted(move[which] for move in moves) for which in range(2))
    cells: dict[str, Quantity | str] = {
        "usual round": Quantity(statistics.median(usual), 1),
        "longest round, more": Quantity(statistics.median(longest), 0, longest[0], longest[-1]),
    }
    return Line(f"{millions} million parameters", cells)


def measure_leases(rounds: int) -> Iterator[Line]:
    """Yield the lines of the table of leases."""
    for kept, options in _SERVERS.items():
        for size, num_floats in _SIZES.items():
            with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
                environ = {"REIGEN_KV_SNAPSHOT_DIR": directory} if kept == _SNAPSHOTS else {}
                program = ["leases", str(num_floats), str(_BATCHES[size]), str(rounds)]
                yield lease_line(kept, size, run_program(options, program, environ))


def measure_moves(rounds: int) -> Iterator[Line]:
    """Yield the lines of the table of moves."""
    for millions in _MILLIONS:
        options = ("--min-np", "2", "-s", "1", "--max-servers", "2")
        yield move_line(millions, run_program(options, ["moves", str(millions), str(rounds)], {}))


def make_table(kind: str, lines: Sequence[Line], rounds: int, machine: Machine) -> Record:
    """Return what was measured, as a table."""
    titles = {"leases": "values kept by, array", "moves": "size"}
    conditions = {
        "leases": f"a batch of one of 2 workers; medians of {rounds} alternating turns, *more* of the differences",
        "moves": f"2 workers, 2 servers in 1 or 2 processes, SGD with momentum; medians of {rounds} moves (extremes)",
    }
    columns = [Column(name, "ms") for name in lines[0].cells]
    command = f"python -m benchmarks.elastic_servers {kind} --rounds {rounds}"
    return make_record(command, conditions[kind], titles[kind], columns, lines, machine)


def main(arguments: Sequence[str]) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elastic_servers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("kind", choices=["leases", "moves"], help="what to measure")
    parser.add_argument("--rounds", type=int, default=8, help="turns, or moves (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    machine = this_machine()
    lines: list[Line] = []
    for line in (measure_leases if options.kind == "leases" else measure_moves)(options.rounds):
        lines.append(line)
        to_stderr(f"{line.title}: {', '.join(f'{name} {cell} ms' for name, cell in line.cells.items())}")
    record = make_table(options.kind, lines, options.rounds, machine)
    headings, *cells = record.cells()
    print(f"\n{markdown(headings, cells)}")
    if options.json is not None:
        record.save(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
