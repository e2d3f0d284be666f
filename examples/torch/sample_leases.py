"""Handwritten digits on parameter servers, with workers that come and go: each image counts once an epoch.

    reigen run -np 3 --min-np 1 -s 2 python examples/torch/sample_leases.py
    kill -9 PROCESS     # any of those that the script names; another one comes in its place

Workers lease batches of images. A batch whose worker dies goes to another one, and is in the weights once all the same.
With `--replicate-servers 2`, servers may be killed as well.
"""

from __future__ import annotations

import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from reigen import kv
from reigen.torch import Trainer

EPOCHS = 15
BATCH = 16  # images
GOAL = 0.95  # of the test images


def main() -> int:
    digits = load_digits()  # 1,797 images of 8 x 8 pixels that come with scikit-learn
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]

    torch.set_num_threads(1)  # the model is small
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    with kv.create("dist_async") as store:
        trainer = Trainer(model.named_parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store)
        num_images = 0
        for epoch in range(EPOCHS):
            for lease in store.sample_leases(len(train), BATCH, epochs=epoch + 1, seed=1):
                batch = train[lease.indices]
                trainer.zero_grad()
                cross_entropy(model(images[batch]), labels[batch], reduction="sum").backward()
                trainer.step(len(batch))
                num_images += len(batch)
            with torch.no_grad():
                accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
            name = f"worker {store.rank} of {store.num_workers} (process {os.getpid()})"
            print(f"epoch {epoch + 1:2}/{EPOCHS}  {name}: {num_images} images, accuracy {accuracy:.3f}", flush=True)
    return 0 if accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
