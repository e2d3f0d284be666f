"""Handwritten digits in an elastic job: kill a process while it trains, and the others go on.

    reigen run -np 4 --min-np 2 python examples/torch/elastic.py
    kill -9 PROCESS     # any of those that the script names; another one comes in its place

Each image is used once an epoch, whoever dies: the sampler deals what is left of the epoch to those who are left. The
batch of all processes stays the same, so that learning rates need no thought.
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


def load(batch: int) -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """Of 1,437 images as many as give full batches; images and labels to test with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[360:][: (len(order) - 360) // batch * batch], order[:360]
    return TensorDataset(images[train], labels[train]), images[test], labels[test]


def say(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images (default: %(default)s)")
    parser.add_argument("--goal", type=float, default=0.95, help="exit with 1 below it (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=48, help="images of a step, of all ranks (default: %(default)s)")
    options = parser.parse_args()
    hvd.init()
    print(f"process {os.getpid()} is rank {hvd.rank()} of {hvd.size()}", flush=True)
    dataset, test_images, test_labels = load(options.batch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(dataset)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0, accuracy=0.0)
    state.register_reset_callbacks([lambda: say(f"{hvd.size()} ranks go on at epoch {state.epoch}, step {state.step}")])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        batch = max(1, options.batch // hvd.size())  # of a rank; a change of ranks calls this again
        while state.epoch < options.epochs:
            start, first, loss = time.perf_counter(), state.step, torch.zeros(())
            for number, (images, labels) in enumerate(DataLoader(dataset, batch, sampler=sampler)):
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
            mean = hvd.allreduce(loss.detach(), name="loss").item()  # of the last step
            took = time.perf_counter() - start  # of an epoch, or of what was left of it
            rate, left = (state.step - first) * options.batch / took, (options.epochs - state.epoch - 1) * took
            line = f"epoch {state.epoch + 1:3}/{options.epochs}  {hvd.size()} ranks  accuracy {state.accuracy:.4f}"
            say(f"{line}  loss {mean:.4f}  {rate:,.0f} samples/s  ETA {left:.0f} s")
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    say(f"test accuracy {state.accuracy:.4f}, wanted {options.goal}")
    return 0 if state.accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
