"""A training in an `hvd.elastic.Job` whose newcomers get the state by a broadcast, for which all members wait.

The last slot's first process dies in a step, the second one in the middle of that broadcast, and the third one stays.
"""

import os
import signal

import torch

import reigen.torch as hvd
from reigen.elastic import pauses, state_transfer
from reigen.torch.elastic import training


def main() -> None:
    pauses.LEAST_ANNOUNCED_SECONDS = pauses.LEAST_MEASURED_BYTES = 0
    state_transfer._is_readable = lambda _: False  # as for a newcomer on a host without members
    dies = os.environ["REIGEN_SLOT"] == "2" and int(os.environ["REIGEN_INCARNATION"])
    if dies == 1:
        training.broadcast_tensors = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    hvd.init()
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with hvd.elastic.Job(model, optimizer, data=hvd.elastic.Cursor(1 << 30, global_batch=12)) as job:
        for step in job.steps(epochs=1):
            with step:
                for part in step.parts:
                    model(torch.ones(len(part.indices), 256)).square().mean().backward()
                optimizer.step()
            view = hvd.elastic.history().changes[-1].epoch
            if view == 1 and step.number == 3 and hvd.rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if view > 3 and step.size == 3:
                break
        print(f"{hvd.rank()} {next(model.parameters()).sum().item():.9g}", flush=True)


if __name__ == "__main__":
    main()
