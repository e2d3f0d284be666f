"""Ranks with unequal amounts of data: `reigen run -np 4 python examples/tensorflow/join.py`.

Rank 0 has the fewest images, the last rank the most, and every rank trains on all of its images in each epoch. A rank
that has no more batches calls `hvd.join()`, which contributes zeros to the other ranks' allreduces until the last rank
is done; then all ranks get the last rank's weights. Ranks reduce sums over images, and the number of images, so the
zeros have no effect.
"""

from __future__ import annotations

import argparse
import hashlib
import sys

import numpy as np
import tensorflow as tf
from progress import Progress
from sklearn.datasets import load_digits

import reigen.tensorflow as hvd


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="images of a step and rank (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="default: %(default)s")
    parser.add_argument("--goal", type=float, default=0.9, help="exit with 1 below it (default: %(default)s)")
    return parser.parse_args()


def share(images: np.ndarray, rank: int) -> np.ndarray:
    """A rank's images: rank r of n gets r + 1 parts of 1 + 2 + ... + n."""
    parts = hvd.size() * (hvd.size() + 1) // 2
    first, last = rank * (rank + 1) // 2, (rank + 1) * (rank + 2) // 2
    return images[len(images) * first // parts : len(images) * last // parts]


def main() -> int:
    options = parse()
    hvd.init()
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
    optimizer.build(weights)
    state = [*weights, *optimizer.variables]
    hvd.broadcast_variables(state, root_rank=0)

    @tf.function(reduce_retracing=True)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))
        mine = [*tape.gradient(loss, weights), loss, tf.cast(tf.shape(y)[0], tf.float32)]
        *sums, loss, count = hvd.grouped_allreduce(mine, op=hvd.Sum, name="sums")
        optimizer.apply_gradients(zip([each / count for each in sums], weights, strict=True))
        return loss / count

    mine = share(train, hvd.rank())
    counts = [len(share(train, rank)) for rank in range(hvd.size())]
    progress = Progress(options.epochs * len(train), is_shown=hvd.rank() == hvd.size() - 1)
    steps = 0
    for epoch in range(options.epochs):
        shuffled = np.random.default_rng(epoch).permutation(mine)
        for number, batch in enumerate(np.split(shuffled, range(options.batch, len(shuffled), options.batch))):
            loss = step(images[batch], labels[batch])
            steps += 1
            of_all = sum(min(options.batch, max(0, count - number * options.batch)) for count in counts)
            progress.add(of_all, loss)
        hvd.broadcast_variables(state, root_rank=hvd.join())
    accuracy = float(np.mean(np.argmax(model(images[test]), 1) == labels[test]))
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights)).hexdigest()
    took = hvd.allgather_object((steps, digest))
    identical = len({digest for _, digest in took}) == 1
    if hvd.rank() == 0:
        print(f"steps of each rank: {[steps for steps, _ in took]}")
        print(f"weights bit-identical on all ranks: {'yes' if identical else 'NO'}")
        print(f"{hvd.size()} rank(s), {progress.elapsed:.1f} s: test accuracy {accuracy:.4f}, wanted {options.goal}")
    hvd.shutdown()
    return 0 if identical and accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
