"""A model for each half of the ranks: DistributedDataParallel over process groups of its own."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
half = max(size // 2, 1)
groups = [dist.new_group(list(range(first, min(first + half, size)))) for first in range(0, size, half)]
mine = groups[rank // half]

torch.manual_seed(rank // half)
model = DDP(nn.Linear(3, 1), process_group=mine)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 3) * (rank + step)).square().mean().backward()
    optimizer.step()
loss = torch.tensor(float(sum(p.detach().sum() for p in model.parameters())))
dist.all_reduce(loss, group=mine)
sys.stdout.write(f"RESULT {rank} {loss.item() / dist.get_world_size(mine):.5f}\n")
dist.destroy_process_group()
