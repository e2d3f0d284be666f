"""Handwritten digits on any number of processes: `reigen run -np 2 python examples/torch/digits.py`.

Each rank takes its share of every batch. Lines that make it distributed are marked with (*); without a launcher the
same script trains alone. --data reads MNIST: `digits.py --data mnist --epochs 3`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from pathlib import Path

import mnist_data
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import reigen.torch as hvd  # (*)

BATCH = 32  # images per step, on all ranks together


def load(directory: Path | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """MNIST; or 1,797 images of 8 x 8 pixels that come with scikit-learn: 1,437 to train on, 360 to test."""
    if directory:
        images, labels, test_images, test_labels = map(torch.from_numpy, mnist_data.read(directory))
        return images.unsqueeze(1), labels, test_images.unsqueeze(1), test_labels
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return images[train], labels[train], images[test], labels[test]


def make_model(height: int, width: int, dropout: float) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(64 * (height // 2) * (width // 2), 128),
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
        parts = zip(images[mine].split(256), labels[mine].split(256), strict=True)
        correct = torch.stack([(model(part).argmax(1) == right).sum() for part, right in parts]).sum()
    return hvd.allreduce(correct, op=hvd.Sum).item() / len(labels)  # (*)


def fingerprint(model: nn.Module) -> str:
    """A hash of every bit of the model."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="where MNIST's train-images-idx3-ubyte and the others are, or these with .gz")
    add("--epochs", type=int, default=15, help="passes over the images (default: %(default)s)")
    add("--dropout", type=float, default=0.25, help="0: the number of ranks does not matter (default: %(default)s)")
    add("--goal", type=float, default=0.97, help="exit with 1 below this accuracy (default: %(default)s)")
    options = parser.parse_args()
    hvd.init()  # (*)
    images, labels, test_images, test_labels = load(options.data)
    torch.manual_seed(hvd.rank())  # dropout differs between the ranks ...
    model = make_model(images.shape[2], images.shape[3], options.dropout)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (*) ... but all start from the same weights
    optimizer = torch.optim.Adam(model.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # (*)
    epochs, steps = options.epochs, options.epochs * -(-len(labels) // BATCH)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)

    start = time.perf_counter()
    seen, reached = 0, 0.0
    for epoch in range(1, epochs + 1):
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
            eta = f"ETA {(epochs * len(labels) - seen) / rate:.0f} s"
            if LIVE:
                show(f"epoch {epoch:2}/{epochs}  {rate:6,.0f} samples/s  accuracy {reached:.4f}  {eta} ")
        reached = accuracy(model, test_images, test_labels)
        mean_loss = hvd.allreduce(total_loss).item()  # (*)
        line = f"epoch {epoch:2}/{epochs}  {rate:6,.0f} samples/s  loss {mean_loss:.4f}  accuracy {reached:.4f}  {eta} "
        show(line, final=epoch == epochs)

    fingerprints = hvd.allgather_object(fingerprint(model))  # (*)
    identical = len(set(fingerprints)) == 1
    seconds = time.perf_counter() - start
    show(f"{hvd.size()} rank(s), {seconds:.1f} s: test accuracy {reached:.4f}, wanted {options.goal}", final=True)
    show(
        f"parameters bit-identical on all ranks: {'yes' if identical else 'NO'}  ({fingerprint(model)[:16]})",
        final=True,
    )
    hvd.shutdown()  # (*)
    return 0 if identical and reached >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
