"""Handwritten digits through a key-value store: two workers, and two servers that hold the weights.

    reigen run -np 2 -s 2 python examples/torch/kvstore.py --kvstore dist_sync

Without servers: `reigen run -np 2 python examples/torch/kvstore.py --kvstore ring`; alone: `--kvstore local`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from progress import Progress
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import reigen.torch as hvd
from reigen import kv
from reigen.torch import Trainer

EPOCHS = 15
BATCH = 32  # images per step, of all workers together: their number does not matter
GOAL = 0.96  # of the test images
#: The threshold is one of gradients as they are sent: summed over a batch. Far below them, too little gets through.
COMPRESSION: dict[str, dict[str, Any]] = {
    "2bit": {"type": "2bit", "threshold": 2.0},
    "int8": {"type": "int8"},
    "fp16": {"type": "fp16"},
}


def load() -> tuple[torch.Tensor, ...]:
    """1,797 images of 8 x 8 pixels that come with scikit-learn: 1,437 to train on, 360 to test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return images[train], labels[train], images[test], labels[test]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stores = ["dist_sync", "dist_async", "dist_ssp", "ring", "local"]
    parser.add_argument("--kvstore", choices=stores, default="dist_sync", help="default: %(default)s")
    parser.add_argument("--staleness", type=int, default=2, help="dist_ssp: how many steps a worker may be ahead")
    parser.add_argument("--lr", type=float, default=0.1, help="falls to a tenth after 10 epochs (default: %(default)s)")
    parser.add_argument("--compression", choices=COMPRESSION, help="of the gradients")
    options = parser.parse_args()

    torch.set_num_threads(1)  # the model is small
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    sgd = {"learning_rate": options.lr, "momentum": 0.9}
    staleness = {"staleness": options.staleness} if options.kvstore == "dist_ssp" else {}
    with kv.create(options.kvstore, **staleness) as store:
        hvd.init()  # behind the store: in servers that `reigen launch` has started, it is all
        if options.kvstore == "local" and hvd.size() > 1:
            parser.error(f"--kvstore local is for one process: the {hvd.size()} workers would train a model each")
        compression = COMPRESSION.get(options.compression)
        trainer = Trainer(model.named_parameters(), "sgd", sgd, kvstore=store, compression_params=compression)
        rank, num_workers = store.rank, store.num_workers
        images, labels, test_images, test_labels = load()
        steps = len(labels) // BATCH
        progress = Progress(EPOCHS * steps * BATCH, is_shown=rank == 0)
        for epoch in range(1, EPOCHS + 1):
            # The same permutation on every worker: each image is used at most once an epoch, by one worker.
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
            for batch in order[: steps * BATCH].split(BATCH):
                mine = batch[rank::num_workers]
                trainer.zero_grad()
                loss = cross_entropy(model(images[mine]), labels[mine], reduction="sum")
                loss.backward()
                trainer.step(BATCH)  # the gradients of all workers are added up
                progress.add(BATCH, loss.detach() / len(mine))
            if epoch == 10:
                trainer.set_learning_rate(options.lr / 10)  # the servers', too
            with torch.no_grad():
                outputs = model(test_images)
            accuracy = (outputs.argmax(1) == test_labels).float().mean().item()
            if rank == 0:
                print(f"epoch {epoch:2}/{EPOCHS}  accuracy {accuracy:.4f}", flush=True)
    if rank == 0:
        how = f"{options.kvstore}, {num_workers} worker(s), {progress.elapsed:.1f} s"
        test_loss = cross_entropy(outputs, test_labels).item()
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {GOAL}; test loss {test_loss:.4f}")
    return 0 if accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
