"""Processor time of a training step: one rank alone, gradient buckets, shared parameters; all in one job, by turns.

    reigen run -np 2 python -m benchmarks.shared_step --picture docs/shared-parameters.svg

Processor time is what a rank's threads use, the engine's included. It says what a step costs also where other work
runs on the machine, and nothing of waiting; `reigen bench train-step` measures the time that a user sees. "Alone" are
ranks beside each other that do not communicate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import reigen.torch as hvd
from benchmarks.harness.machine import this_machine
from benchmarks.harness.models import Training
from benchmarks.harness.report import markdown
from benchmarks.harness.work import Case

ALONE, BUCKETS, SHARED = "one rank alone", "reigen", "reigen, shared parameters"
_WARMUP = 3
_STEPS = 5


def trainings(case: Case) -> dict[str, Training]:
    """The same training in every mode."""

    def wrapped(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
        return hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def sharing(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
        return hvd.DistributedOptimizer(optimizer, model.named_parameters(), share_parameters=True)

    return {
        ALONE: Training(case, hvd.rank()),
        BUCKETS: Training(case, hvd.rank(), wrap_optimizer=wrapped),
        SHARED: Training(case, hvd.rank(), wrap_optimizer=sharing),
    }


def measure(case: Case, rounds: int) -> dict[str, list[float]]:
    """Processor seconds of a step in each round, of the rank that used most."""
    works = trainings(case)
    for work in works.values():
        for _ in range(_WARMUP):
            work.operate()
    seconds: dict[str, list[float]] = {mode: [] for mode in works}
    for _ in range(rounds):
        for mode, work in works.items():
            work.operate()  # caches hold what the mode before left there
            begin = time.process_time()
            for _ in range(_STEPS):
                work.operate()
            used = torch.tensor((time.process_time() - begin) / _STEPS, dtype=torch.float64)
            seconds[mode].append(float(hvd.allreduce(used, name="used", op=hvd.Max)))
    for work in works.values():
        work.close()
    return seconds


def draw(found: dict[str, dict[str, list[float]]], file: Path) -> None:
    """A column for each mode, in steps of one rank alone."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "reigen"  # the same picture for the same figures
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    modes = (ALONE, BUCKETS, SHARED)
    for index, mode in enumerate(modes):
        heights = [statistics.median(found[title][mode]) / statistics.median(found[title][ALONE]) for title in found]
        axes.bar([place + (index - 1) * 0.27 for place in range(len(found))], heights, 0.27, label=mode)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(found)), list(found))
    axes.set_ylabel("processor time of a step, one rank alone = 1")
    axes.set_title(f"{hvd.size()} ranks on one host")
    figure.legend(loc="outside lower center", ncols=len(modes))
    figure.savefig(file, metadata={"Date": None})


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="mlp+sgd,mlp+adam,deep+sgd,deep+adam", metavar="A,B", help="model+optimizer")
    parser.add_argument("--rounds", type=int, default=5, metavar="R", help="turns of each mode (5)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it, too (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    chosen = parser.parse_args(arguments)
    cores = sorted(os.sched_getaffinity(0))
    machine = this_machine()
    hvd.init()
    os.sched_setaffinity(0, {cores[hvd.local_rank() % len(cores)]})
    found = {name: measure(Case(f"{name}/"), chosen.rounds) for name in chosen.cases.split(",")}
    if hvd.rank() == 0:
        lines = []
        for title, seconds in found.items():
            times = [f"{statistics.median(seconds[mode]) * 1e3:.1f} ms" for mode in (ALONE, BUCKETS, SHARED)]
            quotients = [shared / alone for shared, alone in zip(seconds[SHARED], seconds[ALONE], strict=True)]
            lines.append([title, *times, f"{statistics.median(quotients):.2f}"])
        headings = ["", ALONE, BUCKETS, SHARED, "shared / alone"]
        sys.stdout.write(f"{hvd.size()} ranks; {machine}\n\n{markdown(headings, lines)}\n")
        if chosen.json is not None:
            chosen.json.write_text(json.dumps(found, indent=1))
        if chosen.picture is not None:
            draw(found, chosen.picture)
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
