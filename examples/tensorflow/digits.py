"""Handwritten digits on any number of processes: `reigen run -np 2 python examples/tensorflow/digits.py`.

A loop of one's own, with a gradient tape in a `tf.function`. Each rank takes its share of every batch. Lines that make
it distributed are marked with (*); without a launcher the same script trains alone.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import reigen.tensorflow as hvd  # (*)

EPOCHS = 15
BATCH = 32  # images per step, on all ranks together
GOAL = 0.97  # of the test images


def load() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """1,797 images of 8 x 8 pixels that come with scikit-learn: 1,437 to train on, 360 to test."""
    digits = load_digits()
    images = digits.images[..., np.newaxis].astype(np.float32) / 16
    labels = digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    return images[train], labels[train], images[test], labels[test]


def make_model() -> tf.keras.Model:
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.25),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.build((None, 8, 8, 1))
    return model


def show(text: str) -> None:
    if hvd.rank() == 0:  # (*)
        print(text, flush=True)


def fingerprint(model: tf.keras.Model) -> str:
    """A hash of every bit of the weights."""
    return hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    hvd.init()  # (*)
    if gpus := tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices(gpus[hvd.local_rank() % len(gpus)], "GPU")  # (*)
    images, labels, test_images, test_labels = load()
    tf.keras.utils.set_random_seed(hvd.rank())  # dropout differs between the ranks ...
    model = make_model()
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

    start, seen = time.perf_counter(), 0
    for epoch in range(1, EPOCHS + 1):
        total_loss = tf.zeros(())
        # The same permutation on every rank: each image is used once an epoch, by one rank.
        order = np.random.default_rng(epoch).permutation(len(labels))
        for batch in np.split(order, range(BATCH, len(order), BATCH)):
            mine = batch[hvd.rank() :: hvd.size()]  # (*)
            factor = tf.constant(hvd.size() / len(batch), tf.float32)
            total_loss += step(images[mine], labels[mine], factor) * len(batch) / len(labels)
            seen += len(batch)
        # Each rank looks at its share of the images; the counts are added up.
        mine = slice(hvd.rank(), None, hvd.size())  # (*)
        correct = np.count_nonzero(np.argmax(model(test_images[mine]), 1) == test_labels[mine])
        reached = float(hvd.allreduce(tf.constant(correct), op=hvd.Sum)) / len(test_labels)  # (*)
        mean_loss = float(hvd.allreduce(total_loss))  # (*)
        rate = seen / (time.perf_counter() - start)
        eta = f"ETA {(EPOCHS * len(labels) - seen) / rate:.0f} s"
        show(f"epoch {epoch:2}/{EPOCHS}  {rate:6,.0f} samples/s  loss {mean_loss:.4f}  accuracy {reached:.4f}  {eta}")

    fingerprints = hvd.allgather_object(fingerprint(model))  # (*)
    identical = len(set(fingerprints)) == 1
    seconds = time.perf_counter() - start
    show(f"{hvd.size()} rank(s), {seconds:.1f} s: test accuracy {reached:.4f}, wanted {GOAL}")
    show(f"weights bit-identical on all ranks: {'yes' if identical else 'NO'}  ({fingerprint(model)[:16]})")
    hvd.shutdown()  # (*)
    return 0 if identical and reached >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
