"""The optimizer is made of the model itself, before the result of DDP exists."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.ddp = DDP(self.model)

    def step(self, x):
        self.optimizer.zero_grad()
        self.ddp(x).square().sum().backward()
        self.optimizer.step()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    trainer = Trainer(torch.nn.Linear(2, 2))
    for step in range(3):
        trainer.step(torch.tensor([[1.0 + dist.get_rank(), 1.0 * step]]))
    norm = sum(each.detach().square().sum() for each in trainer.model.parameters())
    sys.stdout.write(f"RESULT {dist.get_rank()} {norm:.5f}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
