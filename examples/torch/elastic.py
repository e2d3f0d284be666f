"""Handwritten digits in an elastic job: kill a process while it trains, and the others go on.

    reigen run -np 4 --min-np 2 python examples/torch/elastic.py
    kill -9 PROCESS     # any of those that the script names; another one comes in its place

Each image is used once an epoch, whoever dies: the sampler deals what is left of the epoch to those who are left.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import reigen.torch as hvd

BATCH = 16  # images per step and rank
GOAL = 0.95  # of the test images


def load() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """1,437 images to train on; images and labels to test with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:], order[:360]
    return TensorDataset(images[train], labels[train]), images[test], labels[test]


def say(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images (default: %(default)s)")
    epochs = parser.parse_args().epochs
    hvd.init()
    print(f"process {os.getpid()} is rank {hvd.rank()} of {hvd.size()}", flush=True)
    dataset, test_images, test_labels = load()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(dataset)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0, accuracy=0.0)
    state.register_reset_callbacks([lambda: say(f"{hvd.size()} ranks go on at epoch {state.epoch}, step {state.step}")])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < epochs:
            start, first, loss = time.perf_counter(), state.step, torch.zeros(())
            for number, (images, labels) in enumerate(DataLoader(dataset, BATCH, sampler=sampler)):
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                sampler.record_batch(number, len(labels))
                state.step += 1
                if state.step % 10 == 0:
                    state.commit()  # a death goes back to here, and newcomers join here
            mine = slice(hvd.rank(), None, hvd.size())
            correct = (model(test_images[mine]).argmax(1) == test_labels[mine]).sum()
            state.accuracy = hvd.allreduce(correct, op=hvd.Sum).item() / len(test_labels)
            took = time.perf_counter() - start  # of an epoch, or of what was left of it
            rate, left = (state.step - first) * BATCH * hvd.size() / took, (epochs - state.epoch - 1) * took
            line = f"epoch {state.epoch + 1:3}/{epochs}  {hvd.size()} ranks  accuracy {state.accuracy:.4f}"
            say(f"{line}  loss {loss.item():.4f}  {rate:,.0f} samples/s  ETA {left:.0f} s")
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    say(f"test accuracy {state.accuracy:.4f}, wanted {GOAL}")
    return 0 if state.accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
