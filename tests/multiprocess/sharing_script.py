"""A training with parameters that exist once a host, as a script that launchers start; tests compare with plain torch.

Gradients are small multiples of a power of two and the same whatever the weights are, so that their sum over the
samples of a step is exact: any number of ranks, and one process without Reigen, comes to the same bits.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import torch

#: Divisible by 1, 2, 3 and 4 ranks.
SAMPLES = 12
STEPS = 5


def make_model() -> torch.nn.Module:
    """Large enough that every rank of a few owns some of it."""
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(31, 200), torch.nn.Linear(200, 100), torch.nn.Linear(100, 3))


def make_optimizer(model: torch.nn.Module, name: str = "Adam") -> torch.optim.Optimizer:
    """A plain one."""
    cls: Any = getattr(torch.optim, name)
    optimizer: torch.optim.Optimizer = cls(model.parameters(), lr=0.01)
    return optimizer


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0, size: int = 1) -> None:
    """Steps with these numbers; every rank takes its part of each step's samples."""
    for step in steps:
        optimizer.zero_grad()
        terms: list[torch.Tensor] = []
        for sample in range(rank, SAMPLES, size):
            generator = torch.Generator().manual_seed(1000 * step + sample)
            for parameter in model.parameters():
                gradient = torch.randint(-15, 16, parameter.shape, generator=generator) * 2.0**-7
                terms.append((parameter * gradient).sum())
        torch.stack(terms).sum().backward()
        optimizer.step()


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all weights, and of all that the optimizer keeps."""
    found = hashlib.sha256()
    kept = optimizer.state_dict()["state"]
    states = [value for number in sorted(kept) for _, value in sorted(kept[number].items())]
    for value in [*model.state_dict().values(), *states]:
        found.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def truth() -> str:
    """What one process with plain torch comes to."""
    model = make_model()
    optimizer = make_optimizer(model)
    train(model, optimizer, range(STEPS))
    return digest(model, optimizer)


def main() -> None:
    """Train; print rank, size, number of hosts, number of elements that this rank updates, and the digest."""
    import reigen.torch as hvd
    from reigen import context

    torch.set_num_threads(1)
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(make_optimizer(model), op=hvd.Sum, share_parameters=True)
    train(model, optimizer, range(STEPS), hvd.rank(), hvd.size())
    owned = sum(own.piece.numel for shared in optimizer._shared for own in shared.own)
    line = json.dumps([hvd.rank(), hvd.size(), len(context.current().hosts), owned, digest(model, optimizer)])
    os.write(1, (line + "\n").encode())  # one write: ranks may share a pipe
    hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main()
