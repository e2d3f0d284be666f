"""Adasum in place of the average, within `fit`: `KERAS_BACKEND=torch reigen run -np 2 python examples/keras/adasum.py`.

With the average, more ranks mean a larger batch, so the learning rate has to be tuned again. Adasum averages the parts
that the ranks' updates share, and adds up the rest, so the learning rate of one rank still fits. Each rank has --batch
images here, and the number of ranks, 2, 4, 8 and so on, does change the result. `--average` is for comparison.

`hvd.DistributedOptimizer` has no Adasum: it reduces gradients, and Adasum combines updates. Any backend will do.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import keras
import numpy as np
from common import Show, choose_device
from keras import ops
from progress import Progress
from sklearn.datasets import load_digits

import reigen.keras as hvd


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--average", action="store_true", help="plain averages, with the same learning rate")
    parser.add_argument("--epochs", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=32, help="images of a step and rank (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="of one rank (default: %(default)s)")
    parser.add_argument("--goal", type=float, default=0.9, help="exit with 1 below it (default: %(default)s)")
    options = parser.parse_args()
    if not options.average and hvd.size() & (hvd.size() - 1):
        parser.error(f"Adasum needs 1, 2, 4, 8 ... ranks, not {hvd.size()}; --average takes any number")
    return options


class CombinedSGD(keras.optimizers.SGD):
    """SGD on each rank's own gradients, whose updates are then combined over all ranks.

    It needs values, so it runs in a step that is not compiled: ``compile(run_eagerly=True)``.

    Args:
        op: how updates are combined: Adasum, or Average.
        options: of ``keras.optimizers.SGD``.
    """

    def __init__(self, op: int, **options: Any) -> None:
        super().__init__(**options)
        self._op = op

    def apply(self, grads: list[Any], trainable_variables: list[keras.Variable] | None = None) -> None:
        variables = list(trainable_variables or self._trainable_variables)
        before = [np.array(ops.convert_to_numpy(variable)) for variable in variables]
        super().apply(grads, trainable_variables)
        for number, (variable, value) in enumerate(zip(variables, before, strict=True)):
            update = ops.convert_to_numpy(variable) - value
            variable.assign(value + hvd.allreduce(update, op=self._op, name=f"update {number}"))


def main() -> int:
    hvd.init()
    options = parse()
    choose_device(hvd.local_rank())
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((64,)), *layers])
    op = hvd.Average if options.average else hvd.Adasum
    optimizer = CombinedSGD(op, learning_rate=options.lr, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"], run_eagerly=True)
    hvd.broadcast_variables(model.variables, root_rank=0)
    step_images = options.batch * hvd.size()
    steps = len(train) // step_images
    progress = Progress(options.epochs * steps * step_images, is_shown=hvd.rank() == 0)
    how = {"batch_size": options.batch, "shuffle": False, "verbose": 0, "callbacks": [Show(progress, step_images)]}
    for epoch in range(options.epochs):
        shuffled = np.random.default_rng(epoch).permutation(train)[: steps * step_images]
        mine = shuffled[hvd.rank() :: hvd.size()]
        model.fit(images[mine], labels[mine], **how)
    test_loss, accuracy = model.evaluate(images[test], labels[test], verbose=0)
    if hvd.rank() == 0:
        name = "average" if options.average else "Adasum"
        how_long = f"{keras.backend.backend()}, {name}, {hvd.size()} rank(s), {progress.elapsed:.1f} s"
        print(f"{how_long}: test accuracy {accuracy:.4f}, wanted {options.goal}; test loss {test_loss:.4f}")
    hvd.shutdown()
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
