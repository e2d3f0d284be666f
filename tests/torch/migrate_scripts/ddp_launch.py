"""The shape of older examples: --local_rank from torch.distributed.launch, clipping, and a run without DDP, too."""

import argparse
import os
import sys

import torch
import torch.utils.data.distributed
from torch import distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

parser = argparse.ArgumentParser(description="Training")
parser.add_argument("--local_rank", default=0, type=int)
parser.add_argument("--lr", type=float, default=0.5)


def reduce_tensor(tensor):
    rt = tensor.clone()
    dist.all_reduce(rt)
    rt /= dist.get_world_size()
    return rt


def main():
    args = parser.parse_args()
    args.distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    args.world_size = 1
    if args.distributed:
        dist.init_process_group(backend="gloo", init_method="env://")
        args.world_size = dist.get_world_size()

    torch.manual_seed(3)
    data = torch.randn(32, 6)
    dataset = torch.utils.data.TensorDataset(data, data.sum(1, keepdim=True))
    sampler = torch.utils.data.distributed.DistributedSampler(dataset, shuffle=False) if args.distributed else None
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)

    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=args.lr,
        momentum=0.9,
    )

    for _ in range(2):
        for inputs, target in loader:
            loss = nn.functional.mse_loss(model(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()

    reduced = reduce_tensor(loss.detach()) if args.distributed else loss.detach()
    if not args.distributed or dist.get_rank() == 0:
        sys.stdout.write(f"RESULT {args.world_size} {args.local_rank} {reduced.item():.5f}\n")


if __name__ == "__main__":
    main()
