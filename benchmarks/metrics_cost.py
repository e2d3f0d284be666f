"""Cost of metrics: of counting, for a collective, and of reports, for a step.

    python -m benchmarks.metrics_cost [--steps 200] [--rounds 5] [--against SRC] [--json FILE]

Two ranks of this host make small blocking allreduces, and steps of 10 ms of arithmetic with an allreduce of 4 MiB: by
turns without reports, with `--metrics-file`, and, with ``--against``, with the package in another directory, say the
``src`` of a checkout from before. Medians over the rounds, of rank 0. ``--json`` writes them as a table, as
docs/data/records has them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.harness.machine import Machine, this_machine
from benchmarks.harness.record import Column, Quantity, Record, make_record

_PROGRAM = """
import sys, time
import numpy as np, reigen
reigen.init()
num_steps = int(sys.argv[1])
small, large, matrix = np.ones(1000, np.float32), np.ones(1 << 20, np.float32), np.ones((300, 300), np.float32)
def work():
    until = time.perf_counter() + 0.01
    while time.perf_counter() < until:
        matrix @ matrix
def timed(step, number):
    for _ in range(number // 10 + 1):
        step()
    reigen.barrier()
    times = []
    for _ in range(number):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return sorted(times)[number // 2]
def train():
    work()
    reigen.allreduce_(large, op=reigen.Max, name="large")
latency = timed(lambda: reigen.allreduce_(small, op=reigen.Max, name="small"), 5000)
step = timed(train, num_steps)
if reigen.rank() == 0:
    import json
    print(json.dumps([latency, step]), flush=True)
reigen.barrier()
"""


def count_once() -> dict[str, float]:
    """Return nanoseconds of what is counted for a collective: of a wait, and of the numbers for a batch."""
    from reigen.engine.counters import EngineCounters

    counters = EngineCounters()

    def wait() -> None:
        counters.begin_wait("x")
        counters.end_wait()

    def batch() -> None:
        counters.execution_seconds += 1e-6
        counters.executing_since = 0.0
        counters.batches += 1
        counters.operations[0] += 1
        counters.bytes["shared_memory"][0] += 4000

    def nothing() -> None:
        pass

    found = {f.__name__: min(timeit.repeat(f, number=100_000, repeat=9)) * 1e4 for f in (wait, batch, nothing)}
    return {name: found[name] - found["nothing"] for name in ("wait", "batch")}


def run(source: Path, options: Sequence[str], num_steps: int) -> tuple[float, float]:
    """Return seconds of a small allreduce, and of a step."""
    command = [sys.executable, "-m", "reigen", "run", "--no-prefix", "-np", "2", *options]
    command += [sys.executable, "-c", _PROGRAM, str(num_steps)]
    environ = {**os.environ, "PYTHONPATH": str(source)}
    out = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout
    latency, step = json.loads(out)
    return latency, step


_SMALL, _STEP = "allreduce of 4 kB, blocking", "step: 10 ms of arithmetic, allreduce of 4 MiB"
_TITLES = {"without reports": "with counters", "with reports": "and with reports (`--metrics-file`)"}


def make_table(found: Mapping[str, Sequence[tuple[float, float]]], command: str, machine: Machine) -> Record:
    """Return what was found, as a table: medians.

    Args:
        found: by the kind of job, what `run` has returned by round.
        command: what was run.
        machine: as it was before.
    """
    lines: dict[str, dict[str, Quantity | str]] = {}
    for name, times in sorted(found.items(), key=lambda each: each[0] in _TITLES):  # the other package first
        small, large = (statistics.median(each) for each in zip(*times, strict=True))
        lines[_TITLES.get(name, name)] = {
            _SMALL: Quantity(1e6 * small, 1, unit="µs"),
            _STEP: Quantity(1e3 * large, 1, unit="ms"),
        }
    conditions = f"two ranks, medians of {len(next(iter(found.values())))} alternating rounds"
    return make_record(command, conditions, "", [Column(_SMALL), Column(_STEP)], lines, machine)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    chosen = parser.parse_args()
    before = this_machine()
    for name, nanoseconds in count_once().items():
        print(f"counting a {name}: {nanoseconds:.0f} ns")
    here = Path(__file__).parents[1] / "src"
    with tempfile.TemporaryDirectory() as directory:
        file = ("--metrics-file", f"{directory}/metrics.jsonl")
        kinds: dict[str, tuple[Path, Sequence[str]]] = {"without reports": (here, ()), "with reports": (here, file)}
        if chosen.against is not None:
            kinds["the other package"] = (chosen.against, ())
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
        for _ in range(chosen.rounds):
            for name, (source, options) in kinds.items():
                found[name].append(run(source, options, chosen.steps))
    for name, times in found.items():
        latencies, steps = zip(*times, strict=True)
        small, large = statistics.median(latencies) * 1e6, statistics.median(steps) * 1e3
        least = min(latencies) * 1e6, min(steps) * 1e3
        print(f"{name:18} allreduce of 4 kB {small:7.1f} us (least {least[0]:.1f}), ", end="")
        print(f"step {large:.2f} ms (least {least[1]:.2f})")
    if chosen.json is not None:
        command = f"python -m benchmarks.metrics_cost --steps {chosen.steps} --rounds {chosen.rounds}"
        command += f" --against {chosen.against}" if chosen.against else ""
        make_table(found, command, before).save(chosen.json)


if __name__ == "__main__":
    main()
