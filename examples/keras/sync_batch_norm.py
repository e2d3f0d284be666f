"""Batch normalisation over all ranks: `KERAS_BACKEND=jax reigen run -np 2 python examples/keras/sync_batch_norm.py`.

With few images a rank, the mean and variance of its own batch are poor estimates. Those of the layer here are of all
ranks' images, so that a model learns the same whatever the number of ranks. `--local` is for comparison.

Any backend will do: the layer asks Reigen's package for that backend, whose allreduce has a gradient. Keras has no
public hook for the moments, so the layer overrides a private method, `_moments`; without it, the script ends with an
error. On TensorFlow, use `reigen.tensorflow.SyncBatchNormalization`, which also takes unequal batches and masks.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

import keras
import numpy as np
from common import Show, choose_device
from keras import ops
from progress import Progress
from sklearn.datasets import load_digits

import reigen.keras as hvd

BACKEND = import_module(f"reigen.{keras.backend.backend()}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", action="store_true", help="each rank normalises by its own images")
    parser.add_argument("--epochs", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="images of a step, of all ranks (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="default: %(default)s")
    parser.add_argument("--goal", type=float, default=0.95, help="exit with 1 below it (default: %(default)s)")
    options = parser.parse_args()
    if options.batch % hvd.size():
        parser.error(f"--batch must be a multiple of the {hvd.size()} ranks")
    if not options.local and not hasattr(keras.layers.BatchNormalization, "_moments"):
        parser.error(f"Keras {keras.__version__} has no BatchNormalization._moments to override; seen with 3.15")
    return options


class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalisation whose mean and variance are those of all ranks' batches, which are equally large."""

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean = BACKEND.allreduce(ops.mean(inputs, self._reduction_axes), name=f"{self.path}.mean")
        squares = ops.mean(ops.square(inputs - mean), self._reduction_axes)
        return mean, BACKEND.allreduce(squares, name=f"{self.path}.variance")


def make_model(*, local: bool) -> keras.Model:
    layers = keras.layers
    norm = (layers.BatchNormalization if local else SyncBatchNormalization)(momentum=0.9)
    head = [layers.MaxPooling2D(2), layers.Flatten(), layers.Dense(10)]
    body = [layers.Conv2D(32, 3, padding="same"), norm, layers.ReLU()]
    return keras.Sequential([keras.Input((8, 8, 1)), *body, *head])


def main() -> int:
    hvd.init()
    options = parse()
    choose_device(hvd.local_rank())
    digits = load_digits()
    images, labels = (digits.images[..., np.newaxis] / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    keras.utils.set_random_seed(0)
    model = make_model(local=options.local)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(options.lr, momentum=0.9))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], jit_compile=False)
    hvd.broadcast_variables(model.variables, root_rank=0)
    steps, share = len(train) // options.batch, options.batch // hvd.size()
    progress = Progress(options.epochs * steps * options.batch, is_shown=hvd.rank() == 0)
    how = {"batch_size": share, "shuffle": False, "verbose": 0, "callbacks": [Show(progress, options.batch)]}
    for epoch in range(options.epochs):
        shuffled = np.random.default_rng(epoch).permutation(train)[: steps * options.batch]
        mine = shuffled[hvd.rank() :: hvd.size()]  # in each step, a part of the same batch
        model.fit(images[mine], labels[mine], **how)
    test_loss, accuracy = model.evaluate(images[test], labels[test], verbose=0)
    if hvd.rank() == 0:
        how_long = f"{keras.backend.backend()}, {hvd.size()} rank(s), {progress.elapsed:.1f} s"
        print(f"{how_long}: test accuracy {accuracy:.4f}, wanted {options.goal}; test loss {test_loss:.6f}")
    hvd.shutdown()
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
