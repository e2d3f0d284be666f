"""A training in an `hvd.elastic.Job` whose processes note what a newcomer costs them, for `benchmarks.elastic`.

Arguments: a directory; millions of parameters; ``sgd`` (with momentum) or ``adam``; how many newcomers there are. The
last rank kills itself some steps after it has come, and its place is started again. The others write down how long each
step was, up to the end of the update, with its size, and how long the parts of each change took.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import reigen.torch as hvd

NUM_LAYERS, BATCH = 6, 8
STEPS_TOGETHER = 8


def make_model(millions: float) -> nn.Module:
    width = round((millions * 1e6 / NUM_LAYERS) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(NUM_LAYERS)))


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=1e-5)
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


class PartTimes:
    """Times of the parts of changes: methods of the job's training, by name."""

    def __init__(self, training: Any, names: tuple[str, ...]) -> None:
        self._seconds: dict[str, float] = {}
        for name in names:
            setattr(training, name, self._timed(name, getattr(training, name)))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin

        return call

    def take(self) -> dict[str, float]:
        """Return the times since the last call."""
        taken, self._seconds = self._seconds, {}
        return taken


def main() -> None:
    directory, millions, name, num_joins = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    hvd.init()
    model = make_model(millions)
    optimizer = make_optimizer(name, model)
    inputs = torch.randn(BATCH, next(model.parameters()).shape[1])
    data = hvd.elastic.Cursor(1 << 40, per_rank_batch=BATCH, seed=1)
    steps: list[dict[str, Any]] = []
    is_newcomer = os.environ.get("REIGEN_ELASTIC_CANDIDATE") == "1"
    joins = int(os.environ["REIGEN_INCARNATION"]) if is_newcomer else 0
    together = size = full_size = 0
    with hvd.elastic.Job(model, optimizer, data=data) as job:
        parts = PartTimes(job.training, ("change_view", "enter_view", "transfer", "digest"))
        at = time.perf_counter()
        for step in job.steps(epochs=1):
            with step:
                for _ in step.parts:
                    model(inputs).square().mean().backward()
                optimizer.step()
                found = parts.take()
                if found:
                    found["rebuild"] = hvd.elastic.history().changes[-1].seconds
                now = time.perf_counter()
                steps.append({"size": step.size, "seconds": now - at, "parts": found})
                at = now
            full_size = max(full_size, step.size)
            joins += step.size > size > 0
            together = together + 1 if step.size == size == full_size else 0
            size = step.size
            if together == STEPS_TOGETHER:
                if joins == num_joins:
                    break
                if step.rank == size - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
    if not is_newcomer:
        (directory / f"steps.{job.rank}").write_text(json.dumps(steps))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
