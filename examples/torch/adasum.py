"""Adasum in place of the average: `reigen run -np 2 python examples/torch/adasum.py`; 2, 4, 8 ... ranks.

With the average, more ranks mean a larger batch, so the learning rate has to be tuned again. Adasum averages the parts
that the ranks' updates share, and adds up the rest, so the learning rate of one rank still fits. Each rank has --batch
images here, and the number of ranks does change the result. `--average` is for comparison.
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
    parser.add_argument("--average", action="store_true", help="plain averages, with the same learning rate")
    parser.add_argument("--epochs", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=32, help="images of a step and rank (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="of one rank (default: %(default)s)")
    parser.add_argument("--goal", type=float, default=0.9, help="exit with 1 below it (default: %(default)s)")
    options = parser.parse_args()
    if not options.average and hvd.size() & (hvd.size() - 1):
        parser.error(f"Adasum needs 1, 2, 4, 8 ... ranks, not {hvd.size()}; --average takes any number")
    return options


def main() -> int:
    hvd.init()
    options = parse()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), op=hvd.Average if options.average else hvd.Adasum
    )
    step_images = options.batch * hvd.size()
    steps = len(train) // step_images
    progress = Progress(options.epochs * steps * step_images, is_shown=hvd.rank() == 0)
    for epoch in range(options.epochs):
        shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
        for batch in shuffled[: steps * step_images].split(step_images):
            mine = batch[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            loss = cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
            progress.add(len(batch), loss.detach())
    with torch.no_grad():
        outputs = model(images[test])
    accuracy = float((outputs.argmax(1) == labels[test]).float().mean())
    if hvd.rank() == 0:
        how = f"{'average' if options.average else 'Adasum'}, {hvd.size()} rank(s), {progress.elapsed:.1f} s"
        test_loss = float(cross_entropy(outputs, labels[test]))
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}; test loss {test_loss:.4f}")
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
