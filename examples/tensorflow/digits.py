"""Handwritten digits on any number of processes: `reigen run -np 2 python examples/tensorflow/digits.py`.

A loop of one's own, with a gradient tape in a `tf.function`. Each rank takes its share of every batch. Lines that make
it distributed are marked with (*); without a launcher the same script trains alone. --data reads MNIST.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path

import mnist_data
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import reigen.tensorflow as hvd  # (*)

BATCH = 32  # images per step, on all ranks together


def load(directory: Path | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """MNIST; or 1,797 images of 8 x 8 pixels that come with scikit-learn: 1,437 to train on, 360 to test."""
    if directory:
        images, labels, test_images, test_labels = mnist_data.read(directory)
        return images[..., np.newaxis], labels, test_images[..., np.newaxis], test_labels
    digits = load_digits()
    images = digits.images[..., np.newaxis].astype(np.float32) / 16
    labels = digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    return images[train], labels[train], images[test], labels[test]


def make_model(shape: tuple[int, ...], dropout: float) -> tf.keras.Model:
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dropout(dropout),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.build((None, *shape))
    return model


def show(text: str) -> None:
    if hvd.rank() == 0:  # (*)
        print(text, flush=True)


def fingerprint(model: tf.keras.Model) -> str:
    """A hash of every bit of the weights."""
    return hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="where MNIST's train-images-idx3-ubyte and the others are, or these with .gz")
    add("--epochs", type=int, default=15, help="passes over the images (default: %(default)s)")
    add("--dropout", type=float, default=0.25, help="0: the number of ranks does not matter (default: %(default)s)")
    add("--goal", type=float, default=0.97, help="exit with 1 below this accuracy (default: %(default)s)")
    options = parser.parse_args()
    hvd.init()  # (*)
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")  # (*)
    images, labels, test_images, test_labels = load(options.data)
    tf.keras.utils.set_random_seed(hvd.rank())  # dropout differs between the ranks ...
    model = make_model(images.shape[1:], options.dropout)
    optimizer = tf.keras.optimizers.Adam(2e-3)
    hvd.broadcast_variables(model.variables, root_rank=0)  # (*) ... but all start from the same weights

    @tf.function(reduce_retracing=True)
    def step(x: tf.Tensor, y: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
            # Summed over the images of this rank, divided by the batch of all: ranks may have unequal shares.
            loss = tf.reduce_sum(losses) * factor
        tape = hvd.DistributedGradientTape(tape)  # (*)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    epochs, start, seen = options.epochs, time.perf_counter(), 0
    for epoch in range(1, epochs + 1):
        total_loss = tf.zeros(())
        # The same permutation on every rank: each image is used once an epoch, by one rank.
        order = np.random.default_rng(epoch).permutation(len(labels))
        for batch in np.split(order, range(BATCH, len(order), BATCH)):
            mine = batch[hvd.rank() :: hvd.size()]  # (*)
            factor = tf.constant(hvd.size() / len(batch), tf.float32)
            total_loss += step(images[mine], labels[mine], factor) * len(batch) / len(labels)
            seen += len(batch)
        # Each rank looks at its share of the images; the counts are added up.
        share = slice(hvd.rank(), None, hvd.size())  # (*)
        guesses = model.predict(test_images[share], batch_size=256, verbose=0).argmax(1)
        correct = np.count_nonzero(guesses == test_labels[share])
        reached = float(hvd.allreduce(tf.constant(correct), op=hvd.Sum)) / len(test_labels)  # (*)
        mean_loss = float(hvd.allreduce(total_loss))  # (*)
        rate = seen / (time.perf_counter() - start)
        eta = f"ETA {(epochs * len(labels) - seen) / rate:.0f} s"
        show(f"epoch {epoch:2}/{epochs}  {rate:6,.0f} samples/s  loss {mean_loss:.4f}  accuracy {reached:.4f}  {eta}")

    fingerprints = hvd.allgather_object(fingerprint(model))  # (*)
    identical = len(set(fingerprints)) == 1
    seconds = time.perf_counter() - start
    show(f"{hvd.size()} rank(s), {seconds:.1f} s: test accuracy {reached:.4f}, wanted {options.goal}")
    show(f"weights bit-identical on all ranks: {'yes' if identical else 'NO'}  ({fingerprint(model)[:16]})")
    hvd.shutdown()  # (*)
    return 0 if identical and reached >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
