"""Batch normalisation over the batches of all ranks: `reigen run -np 2 python examples/tensorflow/sync_batch_norm.py`.

With few images a rank, the mean and variance of its own batch are poor estimates. Those of `hvd.SyncBatchNormalization`
are of all ranks' images, so that a model learns the same whatever the number of ranks. `--local` is for comparison.
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
    parser.add_argument("--local", action="store_true", help="each rank normalises by its own images")
    parser.add_argument("--epochs", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="images of a step, of all ranks (default: %(default)s)")
    parser.add_argument("--goal", type=float, default=0.95, help="exit with 1 below it (default: %(default)s)")
    return parser.parse_args()


def make_model(*, local: bool) -> tf.keras.Model:
    layers = tf.keras.layers
    norm = (layers.BatchNormalization if local else hvd.SyncBatchNormalization)(momentum=0.9)
    head = [layers.MaxPooling2D(2), layers.Flatten(), layers.Dense(10)]
    body = [layers.Conv2D(32, 3, padding="same"), norm, layers.ReLU()]
    return tf.keras.Sequential([tf.keras.Input((8, 8, 1)), *body, *head])


def main() -> int:
    options = parse()
    hvd.init()
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")
    digits = load_digits()
    images, labels = (digits.images[..., np.newaxis] / 16).astype(np.float32), digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    tf.keras.utils.set_random_seed(0)
    model = make_model(local=options.local)
    weights, optimizer = model.trainable_variables, tf.keras.optimizers.SGD(0.05, momentum=0.9)
    hvd.broadcast_variables(model.variables, root_rank=0)

    @tf.function(reduce_retracing=True)
    def step(x: tf.Tensor, y: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            # Summed over the images of this rank, divided by the batch of all: ranks may have unequal shares.
            loss = tf.reduce_sum(losses) * factor
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return loss

    steps = len(train) // options.batch
    progress = Progress(options.epochs * steps * options.batch, is_shown=hvd.rank() == 0)
    factor = tf.constant(hvd.size() / options.batch, tf.float32)
    for epoch in range(options.epochs):
        shuffled = np.random.default_rng(epoch).permutation(train)[: steps * options.batch]
        for batch in shuffled.reshape(steps, options.batch):
            mine = batch[hvd.rank() :: hvd.size()]
            progress.add(len(batch), step(images[mine], labels[mine], factor))
    logits = model(images[test])
    accuracy = float(np.mean(np.argmax(logits, 1) == labels[test]))
    loss = float(tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels[test], logits)))
    if hvd.rank() == 0:
        how = f"{hvd.size()} rank(s), {progress.elapsed:.1f} s"
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}; test loss {loss:.6f}")
    hvd.shutdown()
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
