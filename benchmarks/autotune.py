"""Autotuning, compared with a grid of parameters (needs root for stand-in machines; PyTorch).

    python -m benchmarks.autotune                                about 10 minutes
    python -m benchmarks.autotune wide tiny --json out.json      some workloads; a table as docs/data/records has them,
                                                                 and out.rounds.json with every round

Each workload is one job of two ranks. It trains from defaults with autotuning until that has ended. Then, in the same
job, the parameters it began with, those it has chosen and every point of the grid take turns, some steps
each, in several rounds; a point counts by the median of its times relative to those of the beginning in the same
round. So what else the machine does meets all points alike. The best of the grid is chosen by one half of the rounds
and counts by the other half, both ways: the greatest of ten noisy numbers says little.

The size of the parameter server's slices cannot change while a job runs. So `python -m benchmarks.autotune slices` runs
a job for each size, alternating: two hosts with a worker and a server each.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import ps_vs_ring
from benchmarks.harness.machine import Machine, this_machine
from benchmarks.harness.record import Column, Quantity, Record, make_record
from benchmarks.harness.report import markdown
from reigen import context
from reigen.autotune.search_space import ParameterPoint
from reigen.autotune.tuner import MAX_STEPS_TO_CHANGE, NO_DECISION, SETTLE_STEPS, StepEnd, TunerDecision, TuningOutcome
from reigen.files import write_atomically
from tests.lab import Hosts, MachineError, Unavailable

_MIB = 1 << 20
#: Of what a workload may take.
_PATIENCE_SECONDS = 400.0
_TUNING_SECONDS = 150.0
_BLOCK_SECONDS, _LEAST_STEPS = 1.0, 4


@dataclass(frozen=True)
class Workload:
    """A model, and the network under it.

    Attributes:
        layers: linear layers, by their width.
        num_vectors: additional small parameters.
        batch: rows.
        rate_bits: of the network between two hosts; 0: one host.
        delay_seconds: of each packet, one way.
    """

    layers: tuple[int, ...]
    num_vectors: int = 0
    batch: int = 8
    rate_bits: float = 0.0
    delay_seconds: float = 0.0


WORKLOADS = {
    "wide": Workload((1024,) * 6),
    "deep": Workload((160,) * 60),
    "tiny": Workload((16,), num_vectors=600),
    "wide, 1 Gbit/s": Workload((1024,) * 6, rate_bits=1e9),
    "deep, 200 Mbit/s, 5 ms": Workload((160,) * 60, rate_bits=2e8, delay_seconds=0.005),
}


#: Sizes of slices; the first one is the default between hosts.
SLICES = (1 << 20, 1 << 18, 1 << 22, 1 << 24)


def make_grid(base: ParameterPoint) -> list[ParameterPoint]:
    """Return the points that a person would try."""
    buckets = [replace(base, bucket_bytes=size * _MIB) for size in (1, 4, 16, 64)]
    fused = [replace(point, fusion_threshold_bytes=4 * _MIB) for point in buckets]
    if not base.tcp_sockets:
        return [*buckets, *fused]
    sockets = [replace(point, tcp_sockets=4) for point in buckets[:3]]
    direct = [replace(point, tcp_algorithm="direct") for point in buckets[:3]]
    return [*buckets, *sockets, *direct]


# -- a rank -----------------------------------------------------------------------------------------------------------


class TurnTuner:
    """Takes points alternately, and measures a step at each.

    Args:
        points: the first one is what the others are compared with.
        rounds: turns of each.
    """

    def __init__(self, points: Sequence[ParameterPoint], rounds: int) -> None:
        self.seconds: list[list[float]] = [[] for _ in points]
        self._points, self._num_turns = points, rounds * len(points)
        self._turn, self._num_waited, self._num_settled = -1, 0, 0
        self._times: list[float] = []
        self._last = 0.0

    def step_ended(self, step: StepEnd) -> TunerDecision:
        """Implement `reigen.autotune.session.StepTuner`."""
        seconds, self._last = step.now - self._last, step.now
        self._num_waited += 1
        if self._turn >= 0:
            if not step.is_applied and self._num_waited < MAX_STEPS_TO_CHANGE:
                return NO_DECISION
            self._num_settled += 1
            if self._num_settled <= SETTLE_STEPS:
                return NO_DECISION
            self._times.append(seconds)
            if len(self._times) < _LEAST_STEPS or sum(self._times) < _BLOCK_SECONDS:
                return NO_DECISION
            self.seconds[self._turn % len(self._points)].append(statistics.median(self._times))
        self._turn += 1
        self._num_waited, self._num_settled, self._times = 0, 0, []
        point = self._points[self._turn % len(self._points)]
        if self._turn < self._num_turns:
            return TunerDecision(point)
        base = self._points[0]
        return TunerDecision(
            base, None, TuningOutcome(base, base, 1.0, 1.0, 1.0, 0.0, 0, 0.0, "all have had their turns")
        )

    def best_point(self) -> ParameterPoint:
        """Implement `reigen.autotune.session.StepTuner`."""
        return self._points[0]


def train(workload: Workload, rounds: int) -> dict[str, Any] | None:
    """Train on this rank until all is measured; rank 0 returns it."""
    import numpy as np
    import torch

    import reigen.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for width in workload.layers))
    vectors = [torch.nn.Parameter(torch.zeros(64)) for _ in range(workload.num_vectors)]
    parameters = [*model.parameters(), *vectors]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1e-4))
    inputs = torch.randn(workload.batch, workload.layers[0])
    job = context.current()
    is_over, measured = np.zeros(1, np.int32), None
    began, num_steps = time.monotonic(), 0
    outcome: dict[str, Any] = {}
    turns: TurnTuner | None = None
    while not is_over[0]:
        optimizer.zero_grad()
        loss = model(inputs).square().mean() + sum(vector.sum() for vector in vectors)
        loss.backward()
        optimizer.step()
        num_steps += 1
        tuning = job.tuning
        if tuning is not None and turns is None and (tuning.is_final or time.monotonic() - began > _TUNING_SECONDS):
            base, chosen = tuning.first, tuning.point
            outcome = {"seconds": time.monotonic() - began, "base": asdict(base), "chosen": asdict(chosen)}
            points = [*dict.fromkeys([base, chosen, *make_grid(base)])]
            turns = TurnTuner(points, rounds)
            tuning.follow(turns, lambda text: None)
        elif tuning is not None and turns is not None and tuning.is_final:
            measured = outcome | {"points": [asdict(point) for point in points], "times": turns.seconds}
        if num_steps % 20 == 0:
            is_over[0] = measured is not None
            hvd.broadcast_(torch.from_numpy(is_over), 0, name="is_over")
    hvd.shutdown()
    return measured


# -- the controller ---------------------------------------------------------------------------------------------------


def run_workload(workload: Workload, rounds: int) -> dict[str, Any]:
    """Run a job; return what rank 0 has measured.

    Raises:
        MachineError: a rank failed, or did not end in time.
        Unavailable: there can be no stand-in machines.
    """
    command = [sys.executable, "-m", "benchmarks.autotune", "--rank", json.dumps(asdict(workload)), str(rounds)]
    with tempfile.TemporaryDirectory(prefix="reigen-bench-") as name:
        directory = Path(name)
        output = directory / "result"
        command.append(str(output))
        if workload.rate_bits:
            _run_on_hosts(workload, command, directory)
        else:
            options = ["-np", "2", "--autotune"]
            done = subprocess.run(
                [sys.executable, "-m", "reigen", "run", *options, *command],
                capture_output=True,
                text=True,
                timeout=_PATIENCE_SECONDS,
                check=False,
            )
            if done.returncode:
                raise MachineError(done.stderr[-3000:])
            print(done.stderr, file=sys.stderr)
        found: dict[str, Any] = json.loads(output.read_text())
    return found


def _run_on_hosts(workload: Workload, command: Sequence[str], directory: Path) -> None:
    network: Any = "switch" if workload.delay_seconds else "bridge"
    with Hosts(2, network=network, shared=[directory], same_uptime=True) as hosts:
        for host in hosts:
            host.shape(workload.rate_bits, workload.delay_seconds)
        variables = {"OMP_NUM_THREADS": "1", "REIGEN_AUTOTUNE": "1"}
        ranks = [
            host.start(command, env={**variables, **place}, cwd=Path.cwd())
            for host, place in zip(hosts, ps_vs_ring.ring_places(hosts), strict=True)
        ]
        try:
            for number, rank in enumerate(ranks):
                if rank.wait(_PATIENCE_SECONDS):
                    raise MachineError(f"rank {number} failed:\n{rank.output()[1][-3000:]}")
            print(ranks[0].output()[1], file=sys.stderr)
        finally:
            for rank in ranks:
                rank.close()


def run_slices(rounds: int) -> str:
    """Return a table of sizes of slices at 1 Gbit/s, and at 200 Mbit/s; the first one is the default between hosts."""
    rows = []
    for rate in (1e9, 2e8):
        settings = ps_vs_ring.Settings(rate, compute_seconds=0.05, num_steps=20, rounds=rounds)
        seconds: list[list[float]] = [[] for _ in SLICES]
        with ps_vs_ring.machines(2, settings) as hosts:
            for _ in range(rounds):
                for size, times in zip(SLICES, seconds, strict=True):
                    environ = {"REIGEN_KV_SLICE_BYTES": str(size)}
                    times.append(ps_vs_ring.measure(hosts, ps_vs_ring.EQUAL, settings, environ)[0])
        for size, times in zip(SLICES, seconds, strict=True):
            ratios = [default / time for default, time in zip(seconds[0], times, strict=True)]
            speeds = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
            cells = f"{rate / 1e6:.0f} Mbit/s", f"{size >> 10} KiB", f"{1000 * statistics.median(times):.1f} ms"
            rows.append([*cells, speeds])
            print(*rows[-1], sep=", ", file=sys.stderr)
    return markdown(["network", "slice", "step", "relative to 1 MiB"], rows)


def summarize(found: dict[str, Any]) -> dict[str, Any]:
    """Return speeds relative to the beginning: of what was chosen, and of the best of the grid."""
    base = found["times"][0]
    ratios = [[b / o for b, o in zip(base, times, strict=True)] for times in found["times"]]
    points = found["points"]
    grid = [place for place, point in enumerate(points) if place == 0 or point != found["chosen"]]
    if found["chosen"] in [asdict(point) for point in make_grid(ParameterPoint(**points[0]))]:
        grid = [*range(len(points))]
    halves = [[statistics.median(one[half::2]) for one in ratios] for half in (0, 1)]
    chosen = points.index(found["chosen"])
    bests = [max(grid, key=half.__getitem__) for half in halves]
    return {
        "chosen": statistics.median(ratios[chosen]),
        "grid": statistics.fmean((halves[1][bests[0]], halves[0][bests[1]])),
        "grid_point": points[bests[0]],
        "other_grid_point": points[bests[1]],
        "base_seconds": statistics.median(base),
    }


def format_point(point: dict[str, Any]) -> str:
    """Return a point in few words."""
    sizes = f"fusion {point['fusion_threshold_bytes'] >> 20}, bucket {point['bucket_bytes'] >> 20} MiB"
    return f"{sizes}, {point['tcp_algorithm']} {point['tcp_sockets']}" if point["tcp_sockets"] else sizes


def make_table(found: Mapping[str, dict[str, Any]], rounds: int, command: str, machine: Machine) -> Record:
    """Return what was found, as a table.

    Args:
        found: by workload, what `run_workload` has returned.
        rounds: turns of each point.
        command: what was run.
        machine: as it was before.
    """
    lines: dict[str, dict[str, Quantity | str]] = {}
    for name, each in found.items():
        summary = summarize(each)
        points = (summary[point] for point in ("grid_point", "other_grid_point"))
        best = ["the beginning" if point == each["base"] else format_point(point) for point in points]
        lines[{"tiny": "600 small tensors"}.get(name, name)] = {
            "step": Quantity(1000 * summary["base_seconds"], 0),
            "chosen": Quantity(summary["chosen"], 3),
            "best of the grid": Quantity(summary["grid"], 3),
            "chosen / grid": Quantity(summary["chosen"] / summary["grid"], 3),
            "tuning ended after": Quantity(each["seconds"], 0),
            "best of the grid was": "; or ".join(dict.fromkeys(best)),
        }
    units = {"step": "ms", "tuning ended after": "s"}
    names = [*next(iter(lines.values()), {})]
    columns = [Column(name, units.get(name, "")) for name in names]
    return make_record(command, f"2 ranks, {rounds} alternating rounds", "workload", columns, lines, machine)


def main(argv: Sequence[str]) -> int:
    """Measure workloads and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.autotune", description=__doc__)
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(WORKLOADS)}; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each point (default: 5)")
    parser.add_argument("--json", type=Path, help="write the table to this file, and every round next to it")
    chosen = parser.parse_args(argv)
    if chosen.workloads == ["slices"]:
        print(run_slices(chosen.rounds))
        return 0
    unknown = set(chosen.workloads) - set(WORKLOADS)
    if unknown:
        parser.error(f"there is no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    head = ["workload", "step", "chosen", "grid", "chosen / grid", "search", "parameters chosen", "best of the grid"]
    rows: list[list[str]] = []
    all_found: dict[str, dict[str, Any]] = {}
    before = this_machine()
    for name in chosen.workloads or WORKLOADS:
        print(f"{name} ...", file=sys.stderr)
        try:
            found = run_workload(WORKLOADS[name], chosen.rounds)
        except (Unavailable, MachineError, subprocess.TimeoutExpired) as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        all_found[name], summary = found, summarize(found)
        rows.append(
            [
                name,
                f"{1000 * summary['base_seconds']:.1f} ms",
                f"{summary['chosen']:.3f}",
                f"{summary['grid']:.3f}",
                f"{summary['chosen'] / summary['grid']:.3f}",
                f"{found['seconds']:.0f} s",
                format_point(found["chosen"]),
                " / ".join(dict.fromkeys(format_point(summary[name]) for name in ("grid_point", "other_grid_point"))),
            ]
        )
        print(markdown(head, rows[-1:]), file=sys.stderr)
        if chosen.json is not None:
            command = shlex.join(
                ["python", "-m", "benchmarks.autotune", *chosen.workloads, "--rounds", str(chosen.rounds)]
            )
            make_table(all_found, chosen.rounds, command, before).save(chosen.json)
            every_round = json.dumps({"machine": str(before), "found": all_found}).encode()
            write_atomically(chosen.json.with_suffix(".rounds.json"), [every_round])
    print(markdown(head, rows))
    return 0 if len(rows) == len(chosen.workloads or WORKLOADS) else 1


def _rank(arguments: Sequence[str]) -> int:
    fields = json.loads(arguments[0])
    workload = Workload(**fields | {"layers": tuple(fields["layers"])})
    measured = train(workload, int(arguments[1]))
    if measured is not None:
        write_atomically(arguments[2], [json.dumps(measured).encode()])
    return 0


if __name__ == "__main__":
    run: Callable[[Sequence[str]], int] = _rank if sys.argv[1:2] == ["--rank"] else main
    sys.exit(run(sys.argv[2:] if run is _rank else sys.argv[1:]))
