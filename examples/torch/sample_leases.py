"""Handwritten digits on parameter servers, with workers that come and go: each image counts once an epoch.

    reigen run -np 3 --min-np 1 -s 2 python examples/torch/sample_leases.py
    kill -9 PROCESS     # any of those that the script names; another one comes in its place

Workers lease batches of images. A batch whose worker dies goes to another one, and is in the weights once all the same.
With `--replicate-servers 2`, servers may be killed as well.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from progress import Progress
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from reigen import kv
from reigen.torch import Trainer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="images of a lease (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.1, help="default: %(default)s")
    parser.add_argument("--goal", type=float, default=0.95, help="of the test images (default: %(default)s)")
    options = parser.parse_args()

    digits = load_digits()  # 1,797 images of 8 x 8 pixels that come with scikit-learn
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]

    torch.set_num_threads(1)  # the model is small
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    with kv.create("dist_async") as store:
        trainer = Trainer(model.named_parameters(), "sgd", {"learning_rate": options.lr}, kvstore=store)
        num_batches = -(-len(train) // options.batch)
        progress = Progress(options.epochs * num_batches * options.batch, is_shown=store.rank == 0)
        num_images, num_shown, loss = 0, 0, torch.zeros(())
        for epoch in range(options.epochs):
            for lease in store.sample_leases(len(train), options.batch, epochs=epoch + 1, seed=1):
                batch = train[lease.indices]
                trainer.zero_grad()
                loss = cross_entropy(model(images[batch]), labels[batch])
                (loss * len(batch)).backward()
                trainer.step(len(batch))
                num_images += len(batch)
                # All workers' batches: they are numbered in the order in which they are leased.
                progress.add(max(0, lease.number - num_shown) * options.batch, loss.detach())
                num_shown = max(num_shown, lease.number)
            progress.add(((epoch + 1) * num_batches - num_shown) * options.batch, loss.detach())
            num_shown = (epoch + 1) * num_batches
            with torch.no_grad():
                accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
            name = f"worker {store.rank} of {store.num_workers} (process {os.getpid()})"
            epochs = f"epoch {epoch + 1:2}/{options.epochs}"
            print(f"{epochs}  {name}: {num_images} images, accuracy {accuracy:.4f}", flush=True)
    print(f"worker {store.rank}: {num_images} images, test accuracy {accuracy:.4f}, wanted {options.goal}")
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
