"""Handwritten digits on any number of processes: `reigen run -np 2 python examples/torch/digits.py`.

Each rank takes its share of every batch. Lines that make it distributed are marked with (*); without a launcher the
same script trains alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import reigen.torch as hvd  # (*)

EPOCHS = 15
BATCH = 32  # images per step, on all ranks together
GOAL = 0.97  # of the test images


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """1,797 images of 8 x 8 pixels that come with scikit-learn: 1,437 to train on, 360 to test."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return images[train], labels[train], images[test], labels[test]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


#: On a terminal one line renews itself. Under `reigen run` a rank writes into a pipe, and is told what lies behind it.
LIVE = sys.stdout.isatty() or "REIGEN_TERMINAL" in os.environ


def show(text: str, *, final: bool = False) -> None:
    if hvd.rank() == 0:  # (*)
        print(f"\r{text}" if LIVE else text, end="" if LIVE and not final else "\n", flush=True)


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Each rank looks at its share of the images; the counts are added up."""
    model.eval()
    mine = slice(hvd.rank(), None, hvd.size())  # (*)
    with torch.no_grad():
        correct = (model(images[mine]).argmax(1) == labels[mine]).sum()
    return hvd.allreduce(correct, op=hvd.Sum).item() / len(labels)  # (*)


def fingerprint(model: nn.Module) -> str:
    """A hash of every bit of the model."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    hvd.init()  # (*)
    images, labels, test_images, test_labels = load()
    torch.manual_seed(hvd.rank())  # dropout differs between the ranks ...
    model = make_model()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (*) ... but all start from the same weights
    optimizer = torch.optim.Adam(model.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # (*)
    steps = EPOCHS * -(-len(labels) // BATCH)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)

    start = time.perf_counter()
    seen, reached = 0, 0.0
    for epoch in range(1, EPOCHS + 1):
        model.train()
        total_loss = torch.zeros(())
        # The same permutation on every rank: each image is used once an epoch, by one rank.
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            mine = batch[hvd.rank() :: hvd.size()]  # (*)
            optimizer.zero_grad()
            if len(mine):
                # Summed over the images of this rank, divided by the batch of all: ranks may have unequal shares.
                loss = cross_entropy(model(images[mine]), labels[mine], reduction="sum") * hvd.size() / len(batch)
                loss.backward()
                total_loss += loss.detach() * len(batch) / len(labels)
            optimizer.step()
            scheduler.step()
            seen += len(batch)
            rate = seen / (time.perf_counter() - start)
            eta = f"ETA {(EPOCHS * len(labels) - seen) / rate:.0f} s"
            if LIVE:
                show(f"epoch {epoch:2}/{EPOCHS}  {rate:6,.0f} samples/s  accuracy {reached:.4f}  {eta} ")
        reached = accuracy(model, test_images, test_labels)
        mean_loss = hvd.allreduce(total_loss).item()  # (*)
        line = f"epoch {epoch:2}/{EPOCHS}  {rate:6,.0f} samples/s  loss {mean_loss:.4f}  accuracy {reached:.4f}  {eta} "
        show(line, final=epoch == EPOCHS)

    fingerprints = hvd.allgather_object(fingerprint(model))  # (*)
    identical = len(set(fingerprints)) == 1
    seconds = time.perf_counter() - start
    show(f"{hvd.size()} rank(s), {seconds:.1f} s: test accuracy {reached:.4f}, wanted {GOAL}", final=True)
    show(
        f"parameters bit-identical on all ranks: {'yes' if identical else 'NO'}  ({fingerprint(model)[:16]})",
        final=True,
    )
    hvd.shutdown()  # (*)
    return 0 if identical and reached >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
