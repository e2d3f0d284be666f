"""The optimizer is made by a function that gets the model in DDP, of parameters that are chosen before."""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817


def setup():
    dist.init_process_group("gloo")


def train(batches, model):
    chosen = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(chosen, lr=0.1, momentum=0.9)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(chosen, 0.5)
        optimizer.step()


def main():
    setup()
    torch.manual_seed(6 + dist.get_rank())
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    model = DDP(model)
    train([torch.tensor([[1.0 + dist.get_rank(), 1.0 * step]]) for step in range(3)], model)
    norm = sum(each.detach().square().sum() for each in model.parameters())
    sys.stdout.write(f"RESULT {dist.get_rank()} {norm:.5f}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
