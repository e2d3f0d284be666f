"""A training with an optimizer and a sampler, whose every committed step is written down.

Lines: ``STEP number rank size digest time``, where ``digest`` is that of weights and optimizer; at the end ``LEDGER``
and the indices that were trained on, in the order of the steps. Arguments: epochs, samples, seconds a step, which end
when the file SLOW_UNTIL is there.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch

import reigen.torch as hvd


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
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(range(num_samples), seed=3)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0, ledger=[])
    state.register_reset_callbacks([lambda: print(f"VIEW {hvd.rank()} {hvd.size()} {time.monotonic()}", flush=True)])

    @hvd.elastic.run
    def train(state: object) -> None:
        while state.epoch < num_epochs:
            loader = torch.utils.data.DataLoader(range(num_samples), batch_size=4, sampler=sampler)
            for number, batch in enumerate(loader):
                if state.step == int(os.environ.get("FAIL_AT", "-1")):
                    raise OSError("the disk of this rank is full")
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
                optimizer.step()
                if (path := os.environ.get("SLOW_UNTIL")) is None or not Path(path).exists():
                    time.sleep(seconds)
                dealt = hvd.allgather_object(batch.tolist(), name="ledger")
                state.ledger = [*state.ledger, dealt]
                state.step += 1
                sampler.record_batch(number, len(batch))
                line = f"STEP {state.step} {hvd.rank()} {hvd.size()} {digest(model, optimizer)} {time.monotonic()}"
                print(line, flush=True)
                state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)

    train(state)
    print(f"DONE {hvd.rank()} {hvd.size()} {digest(model, optimizer)}", flush=True)
    print(f"LEDGER {json.dumps(state.ledger)}", flush=True)


if __name__ == "__main__":
    main()
