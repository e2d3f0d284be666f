"""The optimizer is made of the model itself, where the result of DDP has no name: it belongs to a class."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817


class Runner:
    def __init__(self, net):
        self.net = DDP(net)

    def step(self, opt, x):
        opt.zero_grad()
        self.net(x).square().sum().backward()
        opt.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    net = torch.nn.Linear(2, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    runner = Runner(net)
    for step in range(3):
        runner.step(opt, torch.tensor([[1.0 + dist.get_rank(), 1.0 * step]]))
    norm = sum(each.detach().square().sum() for each in net.parameters())
    sys.stdout.write(f"RESULT {dist.get_rank()} {norm:.5f}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
