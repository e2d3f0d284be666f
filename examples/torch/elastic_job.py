"""Handwritten digits in an elastic job whose steps survive: kill a process, and no step and no image is lost.

    reigen run -np 4 --min-np 2 python examples/torch/elastic_job.py
    kill -9 PROCESS     # any of those that the script names; another one comes in its place

The step in which a process dies is undone, its images are dealt to those who are left, and it is run again. The batch
stays the same, so that learning rates need no thought. With --checkpoint FILE the job goes on from there when it is
started again, with any number of processes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import reigen.torch as hvd


class Digits(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images of handwritten digits with their labels: 1,437 to train on, or 360 to test with."""

    def __init__(self, *, is_training: bool) -> None:
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        chosen = order[360:] if is_training else order[:360]
        self.images = (torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16)[chosen]
        self.labels = torch.tensor(digits.target)[chosen]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]


def evaluate(model: nn.Module, test: Digits) -> tuple[float, float]:
    """Share of the test images that are recognized, and the loss of all of them."""
    model.eval()
    with torch.no_grad():
        outputs = model(test.images)
    model.train()
    loss = cross_entropy(outputs, test.labels)
    return float((outputs.argmax(1) == test.labels).float().mean()), float(loss)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images (20)")
    parser.add_argument("--batch", type=int, default=64, help="images of a step, of all processes together (64)")
    parser.add_argument("--dropout", type=float, default=0.1, help="0: the number of processes does not matter (0.1)")
    parser.add_argument("--goal", type=float, default=0.95, help="exit with 1 below this accuracy (0.95)")
    parser.add_argument("--min-size", type=int, default=1, help="with fewer processes steps wait (1)")
    parser.add_argument("--workers", type=int, default=0, help="processes that load images ahead, each rank (0)")
    parser.add_argument("--checkpoint", type=Path, help="written after each epoch; begin with it if it is there")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="slows training down: time to kill somebody")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    hvd.init()
    print(f"process {os.getpid()} is rank {hvd.rank()} of {hvd.size()}", flush=True)
    train, test = Digits(is_training=True), Digits(is_training=False)
    torch.manual_seed(hvd.rank())  # all start from the weights of rank 0; dropout differs
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(arguments.dropout), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.epochs)
    data = hvd.elastic.Cursor(len(train), global_batch=arguments.batch, seed=1)
    size = hvd.size()
    with hvd.elastic.Job(
        model, optimizer, scheduler, data=data, min_size=arguments.min_size, resume=arguments.checkpoint
    ) as job:
        loader = hvd.elastic.StepLoader(job, train, num_workers=arguments.workers)
        start, seen, last_loss = time.perf_counter(), 0, 0.0
        for step in job.steps(arguments.epochs):
            if job.size != size:
                size = job.size
                print(f"rank {job.rank}: {size} ranks at step {step.number}, {job.num_undone} undone here", flush=True)
            with step:
                for images, labels in loader.batches(step):
                    loss = cross_entropy(model(images), labels)
                    loss.backward()
                    last_loss = loss.item()
                time.sleep(arguments.step_seconds)
                optimizer.step()
                if step.is_last:
                    scheduler.step()
            if step.is_last and step.is_applied:
                seen += len(train)
                rate = seen / (time.perf_counter() - start)
                eta = (arguments.epochs - step.epoch - 1) * len(train) / rate
                if job.rank == 0:
                    found = f"epoch {step.epoch + 1}: {evaluate(model, test)[0]:.1%} of the test images"
                    print(f"{found}  loss {last_loss:.4f}  {rate:,.0f} samples/s  ETA {eta:.0f} s", flush=True)
                if arguments.checkpoint:
                    job.checkpoint(arguments.checkpoint)
        rank = job.rank
    accuracy, test_loss = evaluate(model, test)
    if rank == 0:
        print(f"test accuracy {accuracy:.4f}, wanted {arguments.goal}; test loss {test_loss:.4f}", flush=True)
    return 0 if accuracy >= arguments.goal else 1


if __name__ == "__main__":
    sys.exit(main())
