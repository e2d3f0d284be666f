"""An `hvd.elastic.Job` that saves a checkpoint when it is told to end; argument: its path.

Lines: ``RANK rank pid`` first; ``STEP number`` when a step was applied; ``LEFT rank size number`` after that.
"""

import os
import sys
import time
from pathlib import Path

import torch

import reigen.torch as hvd
from reigen.elastic.state import Departure

CHECKPOINT = Path(sys.argv[1])


def main() -> None:
    hvd.init()
    print(f"RANK {hvd.rank()} {os.getpid()}", flush=True)
    model = torch.nn.Linear(4, 1)

    def save(departure: Departure) -> None:
        if departure.all_leave:
            job.checkpoint(CHECKPOINT)
        print(f"LEFT {job.rank} {job.size} {job.number}", flush=True)

    data = hvd.elastic.Cursor(256, global_batch=12, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = hvd.elastic.Job(model, optimizer, data=data, on_leave=save)
    with job:
        for step in job.steps(epochs=1_000_000):
            with step:
                for part in step.parts:
                    model(torch.ones(len(part.indices), 4)).mean().backward()
                optimizer.step()
            print(f"STEP {job.number}", flush=True)
            time.sleep(0.01)


main()
