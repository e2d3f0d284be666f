"""An elastic training on a GPU, in a Job or with `hvd.elastic.run`, whose steps are written down.

Ranks share the GPU, so each has a host of its own in NCCL's eyes. Lines: ``STEP number rank size digest``, at the end
``DONE number rank size digest``. Arguments: ``job`` or ``run``, number of steps behind the first one of a view with
AWAITED_SIZE ranks (default: any).
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

import torch
from torch.nn.functional import mse_loss

import reigen.torch as hvd

_NUM_SAMPLES, _BATCH = 96, 12


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    kind, num_steps = sys.argv[1], int(sys.argv[2])
    awaited, last = int(os.environ.get("AWAITED_SIZE", "0")), 1 << 30
    os.environ["NCCL_HOSTID"] = f"slot-{os.environ['REIGEN_SLOT']}"
    hvd.init()
    cuda = torch.device("cuda", 0)
    torch.cuda.set_device(cuda)
    torch.manual_seed(hvd.rank())  # ranks begin with different weights, and get those of rank 0
    inputs = torch.randn(_NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(5)).to(cuda)
    targets = inputs.sum(1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(cuda)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def say(word: str, number: int) -> None:
        print(f"{word} {number} {hvd.rank()} {hvd.size()} {digest(model)}", flush=True)

    if kind == "job":
        data = hvd.elastic.Cursor(_NUM_SAMPLES, global_batch=_BATCH, seed=3)
        with hvd.elastic.Job(model, optimizer, data=data) as job:
            for step in job.steps(1 << 20):
                if last == 1 << 30 and hvd.size() >= awaited:
                    last = step.number + num_steps
                if step.number == last:
                    break
                with step:
                    for part in step.parts:
                        batch = torch.from_numpy(part.indices).to(cuda)
                        mse_loss(model(inputs[batch]), targets[batch]).backward()
                    optimizer.step()
                    say("STEP", step.number)
                    time.sleep(0.02)
            say("DONE", job.number)
        return
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def train(state: object) -> None:
        nonlocal last
        while state.step < last:
            if last == 1 << 30 and hvd.size() >= awaited:
                last = state.step + num_steps
            generator = torch.Generator().manual_seed(state.step)
            mine = torch.randperm(_NUM_SAMPLES, generator=generator)[:_BATCH][hvd.rank() :: hvd.size()].to(cuda)
            optimizer.zero_grad()
            mse_loss(model(inputs[mine]), targets[mine]).backward()
            optimizer.step()
            torch.cuda.synchronize()
            state.step += 1
            say("STEP", state.step)
            time.sleep(0.02)
            state.commit()

    train(state)
    say("DONE", state.step)


if __name__ == "__main__":
    main()
