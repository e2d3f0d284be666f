"""The shape of scripts whose processes torch.multiprocessing starts: one for each device, which it hands over."""

import argparse
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.utils.data
import torch.utils.data.distributed
from torch import nn

parser = argparse.ArgumentParser(description="Training with spawned workers")
parser.add_argument("--dist-url", default="tcp://127.0.0.1:23457", type=str)
parser.add_argument("--workers", default=2, type=int, help="one for each device")
parser.add_argument("--lr", default=0.1, type=float)


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    def all_reduce(self):
        total: torch.Tensor = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()


def main():
    args = parser.parse_args()
    mp.spawn(main_worker, nprocs=args.workers, args=(args.workers, args))


def main_worker(gpu, ngpus_per_node, args):
    dist.init_process_group(backend="gloo", init_method=args.dist_url, world_size=ngpus_per_node, rank=gpu)
    torch.manual_seed(gpu)
    model: nn.Module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model = torch.nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)

    data = torch.linspace(-1, 1, 160).reshape(40, 4).sin()
    dataset = torch.utils.data.TensorDataset(data, (data.sum(1) > 0).long())
    sampler = torch.utils.data.distributed.DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = torch.utils.data.DataLoader(dataset, batch_size=5, sampler=sampler)
    losses = AverageMeter()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, target in loader:
            loss = criterion(model(images), target)
            losses.update(loss.item(), images.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    losses.all_reduce()
    parameters = sum(p.detach().square().sum() for p in model.parameters())
    if gpu == 0:
        sys.stdout.write(f"RESULT {losses.count:.0f} {losses.sum / losses.count:.5f} {parameters:.5f}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
