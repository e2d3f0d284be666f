"""Handwritten digits with Keras 3: `KERAS_BACKEND=jax reigen run -np 2 python examples/keras/digits.py`.

Any backend will do: tensorflow, jax or torch. Each rank takes its share of the images. Lines that make it distributed
are marked with (*); without a launcher the same script trains alone.
"""

from __future__ import annotations

import argparse
import hashlib
import sys

import keras
import numpy as np
from common import Show, choose_device
from progress import Progress
from sklearn.datasets import load_digits

import reigen.keras as hvd  # (*)

EPOCHS = 12
BATCH = 32  # images per step, on all ranks together
RATE = 2e-3
GOAL = 0.97  # of the test images


def load() -> tuple[np.ndarray, ...]:
    """1,797 images of 8 x 8 pixels that come with scikit-learn: 1,437 to train on, 360 to test."""
    digits = load_digits()
    images = (digits.images[..., np.newaxis] / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    train, test = order[360:], order[:360]
    return images[train], digits.target[train], images[test], digits.target[test]


def make_model() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.25),
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
    argparse.ArgumentParser(description=__doc__).parse_args()
    hvd.init()  # (*)
    choose_device(hvd.local_rank())  # (*)
    images, labels, test_images, test_labels = load()
    keras.utils.set_random_seed(hvd.rank())  # dropout differs between the ranks ...
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(RATE))  # (*)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # (*) ... but all start from the same weights
        hvd.callbacks.MetricAverageCallback(),  # (*)
        hvd.callbacks.LearningRateWarmupCallback(RATE, warmup_epochs=2),  # (*)
    ]
    images, labels = hvd.shard(images, labels, shuffle_seed=0)  # (*) as many on every rank
    batch = max(1, BATCH // hvd.size())  # (*)
    together = batch * hvd.size()  # (*)
    progress = Progress(EPOCHS * -(-len(labels) // batch) * together, is_shown=hvd.rank() == 0)
    callbacks.append(Show(progress, together))
    model.fit(images, labels, batch_size=batch, epochs=EPOCHS, verbose=0, callbacks=callbacks)
    mine = slice(hvd.rank(), None, hvd.size())  # (*)
    guesses = model.predict(test_images[mine], verbose=0).argmax(axis=1)
    correct = hvd.allreduce(np.float64((guesses == test_labels[mine]).sum()), op=hvd.Sum)  # (*)
    reached = float(correct) / len(test_labels)
    fingerprints = hvd.allgather_object(fingerprint(model))  # (*)
    identical = len(set(fingerprints)) == 1
    if hvd.rank() == 0:  # (*)
        how = f"{keras.backend.backend()}, {hvd.size()} rank(s), {progress.elapsed:.1f} s"
        print(f"{how}: test accuracy {reached:.4f}, wanted {GOAL}")
        print(f"weights bit-identical on all ranks: {'yes' if identical else 'NO'}  ({fingerprints[0][:16]})")
    hvd.shutdown()  # (*)
    return 0 if identical and reached >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
