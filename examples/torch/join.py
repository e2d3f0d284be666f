"""Ranks with unequal amounts of data: `reigen run -np 4 python examples/torch/join.py`.

Rank 0 has the fewest images, the last rank the most, and every rank trains on all of its images in each epoch. In
`hvd.uneven_data`, a rank that has no more batches contributes nothing to the others' reductions, and gets their weights
when the last rank is done. (In scripts written for Horovod, `hvd.join()` waits in this way.)
"""

from __future__ import annotations

import argparse
import hashlib
import sys

import torch
from progress import Progress
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import reigen.torch as hvd


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="images of a step and rank (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="default: %(default)s")
    parser.add_argument("--goal", type=float, default=0.9, help="exit with 1 below it (default: %(default)s)")
    return parser.parse_args()


def share(images: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's images: rank r of n gets r + 1 parts of 1 + 2 + ... + n."""
    parts = hvd.size() * (hvd.size() + 1) // 2
    first, last = rank * (rank + 1) // 2, (rank + 1) * (rank + 2) // 2
    return images[len(images) * first // parts : len(images) * last // parts]


def main() -> int:
    options = parse()
    hvd.init()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    mine = share(train, hvd.rank())
    counts = [len(share(train, rank)) for rank in range(hvd.size())]
    progress = Progress(options.epochs * len(train), is_shown=hvd.rank() == hvd.size() - 1)
    steps = 0
    for epoch in range(options.epochs):
        shuffled = mine[torch.randperm(len(mine), generator=torch.Generator().manual_seed(epoch))]
        with hvd.uneven_data(optimizer, model):
            for number, batch in enumerate(shuffled.split(options.batch)):
                optimizer.zero_grad()
                loss = cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
                optimizer.step()
                steps += 1
                of_all = sum(min(options.batch, max(0, count - number * options.batch)) for count in counts)
                progress.add(of_all, loss.detach())
    with torch.no_grad():
        accuracy = float((model(images[test]).argmax(1) == labels[test]).float().mean())
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in model.state_dict().values())).hexdigest()
    took = hvd.allgather_object((steps, digest))
    identical = len({digest for _, digest in took}) == 1
    if hvd.rank() == 0:
        print(f"steps of each rank: {[steps for steps, _ in took]}")
        print(f"parameters bit-identical on all ranks: {'yes' if identical else 'NO'}")
        print(f"{hvd.size()} rank(s), {progress.elapsed:.1f} s: test accuracy {accuracy:.4f}, wanted {options.goal}")
    return 0 if identical and accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
