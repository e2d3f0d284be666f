"""Adasum in place of the average: `reigen run -np 2 python examples/tensorflow/adasum.py`; 2, 4, 8 ... ranks.

With the average, more ranks mean a larger batch, so the learning rate has to be tuned again. Adasum averages the parts
that the ranks' updates share, and adds up the rest, so the learning rate of one rank still fits. Each rank has --batch
images here, and the number of ranks does change the result. `--average` is for comparison.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import tensorflow as tf
from progress import Progress
from sklearn.datasets import load_digits

import reigen.tensorflow as hvd


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


def main() -> int:
    hvd.init()
    options = parse()
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    tf.keras.utils.set_random_seed(0)
    layers = [tf.keras.layers.Dense(128, activation="relu"), tf.keras.layers.Dense(10)]
    model = tf.keras.Sequential([tf.keras.Input((64,)), *layers])
    weights, optimizer = model.trainable_variables, tf.keras.optimizers.SGD(options.lr, momentum=0.9)
    hvd.broadcast_variables(model.variables, root_rank=0)
    optimizer.build(weights)
    op = hvd.Average if options.average else hvd.Adasum

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))
        before = [tf.identity(weight) for weight in weights]
        # Each rank's optimizer makes an update of its own gradients; what is combined are these updates.
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        updates = [weight - value for weight, value in zip(weights, before, strict=True)]
        combined = hvd.grouped_allreduce(updates, op=op, name="updates")
        for weight, value, update in zip(weights, before, combined, strict=True):
            weight.assign(value + update)
        return loss

    step_images = options.batch * hvd.size()
    steps = len(train) // step_images
    progress = Progress(options.epochs * steps * step_images, is_shown=hvd.rank() == 0)
    for epoch in range(options.epochs):
        shuffled = np.random.default_rng(epoch).permutation(train)[: steps * step_images]
        for batch in shuffled.reshape(steps, step_images):
            mine = batch[hvd.rank() :: hvd.size()]
            progress.add(step_images, step(images[mine], labels[mine]))
    logits = model(images[test])
    accuracy = float(np.mean(np.argmax(logits, 1) == labels[test]))
    if hvd.rank() == 0:
        how = f"{'average' if options.average else 'Adasum'}, {hvd.size()} rank(s), {progress.elapsed:.1f} s"
        loss = float(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels[test], logits)))
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}; test loss {loss:.4f}")
    hvd.shutdown()
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
