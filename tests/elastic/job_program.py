"""A training in an `hvd.elastic.Job`, whose steps are written down.

Lines: ``TRY number view rank size epoch indices`` before gradients are computed; ``STEP number view rank size digest
time`` when the weights have changed; ``SETTLED`` with the same fields and ``DONE`` at the end. So the samples of each
step that was applied are known, whoever died in it. Arguments: epochs, samples, seconds a step.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch._dynamo.trace_rules  # as the two below: loaded later otherwise, by each process

import reigen.elastic_job
import reigen.engine_factory  # noqa: F401
import reigen.torch as hvd
from reigen import context


class Model(torch.nn.Module):
    """With what a step changes besides weights, if ``KIND`` says so: running statistics, random numbers."""

    def __init__(self) -> None:
        super().__init__()
        kinds = os.environ.get("KIND", "")
        more = [torch.nn.BatchNorm1d(16)] * ("norm" in kinds) + [torch.nn.Dropout(0.2)] * ("dropout" in kinds)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), *more, torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
        found.update(optimizer.state[parameter]["momentum_buffer"].numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    num_epochs, num_samples, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    print("IMPORTED", flush=True)
    while (path := os.environ.get("WAITS_FOR")) and not Path(path).exists():
        time.sleep(0.01)
    hvd.init()
    torch.manual_seed(hvd.rank())  # ranks begin with different weights, and get those of rank 0
    inputs = torch.randn(num_samples, 8, generator=torch.Generator().manual_seed(5))
    targets = inputs.sum(1, keepdim=True)
    model = Model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        share_parameters=os.environ.get("SHARE") == "1",
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    data = hvd.elastic.Cursor(num_samples, global_batch=int(os.environ.get("BATCH", "16")), seed=3)
    resume, every = os.environ.get("RESUME"), int(os.environ.get("EVERY", "0"))
    least = int(os.environ.get("MIN", "1"))
    with hvd.elastic.Job(model, optimizer, scheduler, data=data, min_size=least, resume=resume) as job:
        for step in job.steps(num_epochs):
            elastic = context.elastic_job()
            place = f"{step.number} {elastic.epoch if elastic else 0} {hvd.rank()} {hvd.size()}"
            with step:
                if step.number == int(os.environ.get("FAIL_AT", "-1")):
                    raise OSError("the disk of this rank is full")
                indices = [index for part in step.parts for index in part.indices.tolist()]
                print(f"TRY {place} {step.epoch} {json.dumps(indices)}", flush=True)
                for part in step.parts:
                    batch = torch.from_numpy(part.indices)
                    torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
                time.sleep(seconds / 2)
                if os.environ.get("CATCHES") == "1":
                    try:
                        optimizer.step()
                    except Exception as error:  # noqa: BLE001  a program that wants to know nothing
                        print(f"CAUGHT {type(error).__name__}", flush=True)
                else:
                    optimizer.step()
                print(f"STEP {place} {digest(model, optimizer)} {time.monotonic()}", flush=True)
                time.sleep(seconds / 2)
                scheduler.step()
            if every and job.number % every == 0 and Path(os.environ["CHECKPOINTS"]).exists():
                job.checkpoint(Path(os.environ["CHECKPOINTS"]) / f"{job.number}.pt")
        print(f"SETTLED {job.number} {optimizer.param_groups[0]['lr']}", flush=True)
    print(f"DONE {hvd.rank()} {hvd.size()} {digest(model, optimizer)} {job.num_undone}", flush=True)


if __name__ == "__main__":
    main()
