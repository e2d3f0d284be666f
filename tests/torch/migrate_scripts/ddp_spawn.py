"""The shape of PyTorch's tutorial for DistributedDataParallel: torch.multiprocessing starts the processes."""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817


def setup(rank, world_size):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12355")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo_basic(rank, world_size):
    setup(rank, world_size)
    torch.manual_seed(rank)  # DDP makes the models equal

    model = ToyModel()
    ddp_model = DDP(model)

    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.1)

    inputs = torch.arange(200, dtype=torch.float32).reshape(20, 10) / (200 * (rank + 1))
    for _ in range(5):
        optimizer.zero_grad()
        loss = loss_fn(ddp_model(inputs), torch.ones(20, 5))
        loss.backward()
        optimizer.step()

    total = loss.detach().clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    parts = [torch.zeros_like(loss) for _ in range(world_size)]
    dist.all_gather(parts, loss.detach())
    names = [None] * world_size
    dist.all_gather_object(names, f"rank {rank}")
    dist.barrier()
    if rank == 0:
        keys = list(ddp_model.module.state_dict())
        sys.stdout.write(f"RESULT {total.item():.5f} {sum(parts).item():.5f} {names} {keys}\n")
    cleanup()


if __name__ == "__main__":
    n_procs = 2
    mp.spawn(
        demo_basic,
        args=(n_procs,),
        nprocs=n_procs,
        join=True,
    )
