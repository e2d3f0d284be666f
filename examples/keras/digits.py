"""Handwritten digits with Keras 3: `KERAS_BACKEND=jax reigen run -np 2 python examples/keras/digits.py`.

Any backend will do: tensorflow, jax or torch. Each rank takes its share of every batch. Lines that make it distributed
are marked with (*); without a launcher the same script trains alone. --data reads MNIST.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import keras
import mnist_data
import numpy as np
from common import Show, choose_device
from progress import Progress
from sklearn.datasets import load_digits

import reigen.keras as hvd  # (*)

BATCH = 32  # images per step, on all ranks together
RATE = 2e-3  # for that batch, on any number of ranks


def load(directory: Path | None) -> tuple[np.ndarray, ...]:
    """MNIST; or 1,797 images of 8 x 8 pixels that come with scikit-learn: 1,437 to train on, 360 to test."""
    if directory:
        images, labels, test_images, test_labels = mnist_data.read(directory)
        return images[..., np.newaxis], labels, test_images[..., np.newaxis], test_labels
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[360:], order[:360]
    return images[train], digits.target[train], images[test], digits.target[test]


def make_model(shape: tuple[int, ...], dropout: float) -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dropout(dropout),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def fingerprint(model: keras.Model) -> str:
    """A hash of every bit of the model."""
    digest = hashlib.sha256()
    for weights in model.get_weights():
        digest.update(weights.tobytes())
    return digest.hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="where MNIST's train-images-idx3-ubyte and the others are, or these with .gz")
    add("--epochs", type=int, default=12, help="passes over the images (default: %(default)s)")
    add("--dropout", type=float, default=0.25, help="0: the number of ranks does not matter (default: %(default)s)")
    add("--goal", type=float, default=0.97, help="exit with 1 below this accuracy (default: %(default)s)")
    options = parser.parse_args()
    hvd.init()  # (*)
    choose_device(hvd.local_rank())  # (*)
    images, labels, test_images, test_labels = load(options.data)
    keras.utils.set_random_seed(hvd.rank())  # dropout differs between the ranks ...
    model = make_model(images.shape[1:], options.dropout)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(RATE))  # (*)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # (*) ... but all start from the same weights
        hvd.callbacks.MetricAverageCallback(),  # (*)
    ]
    batch = max(1, BATCH // hvd.size())  # (*)
    together = batch * hvd.size()  # (*)
    images, labels = (each[: len(each) // together * together] for each in (images, labels))  # all batches are full
    progress = Progress(options.epochs * len(labels), is_shown=hvd.rank() == 0)
    callbacks.append(Show(progress, together))
    for epoch in range(options.epochs):
        # In another order each epoch, the same on all ranks; rank r of n has images r, r + n, r + 2 * n ...
        part = hvd.shard(images, labels, shuffle_seed=epoch)  # (*)
        history = model.fit(*part, batch_size=batch, shuffle=False, verbose=0, callbacks=callbacks)
        if hvd.rank() == 0:  # (*)
            print(f"epoch {epoch + 1:2}/{options.epochs}  mean loss {history.history['loss'][0]:.4f}", flush=True)
    mine = slice(hvd.rank(), None, hvd.size())  # (*)
    guesses = model.predict(test_images[mine], verbose=0).argmax(axis=1)
    correct = hvd.allreduce(np.float64((guesses == test_labels[mine]).sum()), op=hvd.Sum)  # (*)
    reached = float(correct) / len(test_labels)
    fingerprints = hvd.allgather_object(fingerprint(model))  # (*)
    identical = len(set(fingerprints)) == 1
    if hvd.rank() == 0:  # (*)
        how = f"{keras.backend.backend()}, {hvd.size()} rank(s), {progress.elapsed:.1f} s"
        print(f"{how}: test accuracy {reached:.4f}, wanted {options.goal}")
        print(f"weights bit-identical on all ranks: {'yes' if identical else 'NO'}  ({fingerprints[0][:16]})")
    hvd.shutdown()  # (*)
    return 0 if identical and reached >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
