"""A training in an `hvd.elastic.Job` whose processes write down each step, for `benchmarks.elastic spares`.

Arguments: a directory; millions of parameters; ``sgd`` (with momentum) or ``adam``. Each process writes a file of lines
``kind number view size num_dealt num_samples time``, in seconds of the Unix epoch: ``waits`` once,
before it asks for its place; ``begin`` where a step begins, ``end`` behind its update. It ends when the file ``enough``
is there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import reigen.torch as hvd
from benchmarks.programs.elastic_join import make_model, make_optimizer

GLOBAL_BATCH = 24


def main() -> None:
    directory, millions, name = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    hvd.init()
    model = make_model(millions)
    optimizer = make_optimizer(name, model)
    width = next(model.parameters()).shape[1]
    data = hvd.elastic.Cursor(1 << 40, global_batch=GLOBAL_BATCH, seed=1)
    enough = directory / "enough"
    with (directory / f"steps.{os.getpid()}").open("w", buffering=1) as file:
        file.write(f"waits 0 0 0 0 0 {time.time()}\n")
        with hvd.elastic.Job(model, optimizer, data=data) as job:
            for step in job.steps(epochs=1):
                with step:
                    place = f"{step.number} {len(hvd.elastic.history().changes)} {step.size} {step.num_dealt}"
                    place += f" {step.parts.num_samples}"
                    file.write(f"begin {place} {time.time()}\n")
                    inputs = torch.ones(step.parts.num_samples, width)
                    for _ in step.parts:
                        model(inputs).square().mean().backward()
                    done = torch.tensor([float(enough.exists())])
                    is_over = hvd.allreduce(done, op=hvd.Max, name="enough").item()
                    optimizer.step()
                    file.write(f"end {place} {time.time()}\n")
                if is_over:
                    break


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
