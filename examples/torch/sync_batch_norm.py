"""Batch normalisation over the batches of all ranks: `reigen run -np 4 python examples/torch/sync_batch_norm.py`.

With few images a rank, the mean and variance of its own batch are poor estimates. Those of `hvd.SyncBatchNorm` are of
all ranks' images, so that a model learns the same whatever the number of ranks. `--local` is for comparison.
"""

from __future__ import annotations

import argparse
import sys

import torch
from progress import Progress
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import reigen.torch as hvd


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", action="store_true", help="each rank normalises by its own images")
    parser.add_argument("--epochs", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="images of a step, of all ranks (default: %(default)s)")
    parser.add_argument("--goal", type=float, default=0.95, help="exit with 1 below it (default: %(default)s)")
    return parser.parse_args()


def main() -> int:
    options = parse()
    hvd.init()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]

    torch.manual_seed(0)
    norm = nn.BatchNorm2d if options.local else hvd.SyncBatchNorm
    head = (nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 16, 10))
    model = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1), norm(32), nn.ReLU(), *head)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    steps = len(train) // options.batch
    progress = Progress(options.epochs * steps * options.batch, is_shown=hvd.rank() == 0)
    for epoch in range(options.epochs):
        shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
        for batch in shuffled[: steps * options.batch].split(options.batch):
            mine = batch[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            loss = cross_entropy(model(images[mine]), labels[mine], reduction="sum") * hvd.size() / len(batch)
            loss.backward()
            optimizer.step()
            progress.add(len(batch), loss.detach())
    model.eval()
    with torch.no_grad():
        outputs = model(images[test])
    accuracy = float((outputs.argmax(1) == labels[test]).float().mean())
    test_loss = float(cross_entropy(outputs, labels[test]))
    if hvd.rank() == 0:
        how = f"{hvd.size()} rank(s), {progress.elapsed:.1f} s"
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}; test loss {test_loss:.6f}")
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
