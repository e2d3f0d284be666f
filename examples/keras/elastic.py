"""Handwritten digits in an elastic job: kill a process while it trains, and the others go on.

    KERAS_BACKEND=torch reigen run -np 4 --min-np 2 python examples/keras/elastic.py
    kill -9 PROCESS     # any of those that the script names; another one comes in its place

Any backend will do: tensorflow, jax or torch. A step has --batch images of all ranks, whoever dies: they are dealt anew
to those who are left. What was done since the last commit is done again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import keras
import numpy as np
from common import choose_device
from sklearn.datasets import load_digits

import reigen.keras as hvd

GOAL = 0.95  # of the test images


def say(text: str) -> None:
    if hvd.rank() == 0:
        print(text, flush=True)


class Batches(keras.utils.PyDataset):
    """This rank's part of the batches that are left of an epoch."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, state: Any, batch: int) -> None:
        super().__init__()
        self._images, self._labels = images, labels
        order = np.random.default_rng(state.epoch).permutation(len(labels))[: len(labels) // batch * batch]
        self._mine = order.reshape(-1, batch)[state.batch :, hvd.rank() :: hvd.size()]

    def __len__(self) -> int:
        return len(self._mine)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._images[self._mine[index]], self._labels[self._mine[index]]


def make_model() -> keras.Model:
    layers = [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=48, help="images of a step, of all ranks (default: %(default)s)")
    options = parser.parse_args()
    hvd.init()
    choose_device(hvd.local_rank())
    print(f"process {os.getpid()} is rank {hvd.rank()} of {hvd.size()}", flush=True)
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    keras.utils.set_random_seed(0)
    model = make_model()
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    state.register_reset_callbacks(
        [lambda: say(f"{hvd.size()} ranks go on at epoch {state.epoch}, batch {state.batch}")]
    )
    steps = len(train) // options.batch

    def accuracy() -> float:
        return float((model.predict(images[test], verbose=0).argmax(1) == labels[test]).mean())

    @hvd.elastic.run
    def fit(state: Any) -> None:
        callbacks = [
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.callbacks.MetricAverageCallback(),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=10),  # a death goes back, newcomers join here
        ]
        while state.epoch + state.batch // steps < options.epochs:  # a commit may lie behind the last batch
            state.epoch, state.batch = state.epoch + state.batch // steps, state.batch % steps
            batches, start = Batches(images[train], labels[train], state, options.batch), time.perf_counter()
            history = model.fit(batches, verbose=0, shuffle=False, callbacks=callbacks)
            took = time.perf_counter() - start  # of an epoch, or of what was left of it
            rate, left = len(batches) * options.batch / took, (options.epochs - state.epoch) * took
            line = f"epoch {state.epoch:3}/{options.epochs}  {hvd.size()} ranks  accuracy {accuracy():.4f}"
            say(f"{line}  loss {history.history['loss'][0]:.4f}  {rate:,.0f} samples/s  ETA {left:.0f} s")

    fit(state)
    reached = accuracy()
    say(f"test accuracy {reached:.4f}, wanted {GOAL}")
    return 0 if reached >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
