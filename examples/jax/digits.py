"""Handwritten digits with JAX on any number of processes: `reigen run -np 2 python examples/jax/digits.py`.

Each rank takes its share of every batch. Lines that make it distributed are marked with (*); without a launcher the
same script trains alone. --data reads MNIST.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import mnist_data
import numpy as np
import optax
from sklearn.datasets import load_digits

import reigen.jax as rj  # (*)

BATCH = 48  # images per step, on all ranks together


def load(directory: Path | None) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """MNIST; or 1,797 images of 8 x 8 pixels that come with scikit-learn: 1,437 to train on, 360 to test."""
    if directory:
        images, labels, test_images, test_labels = mnist_data.read(directory)
        return images.reshape(len(images), -1), labels, test_images.reshape(len(test_images), -1), test_labels
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.data[order] / 16).astype(np.float32)
    return images[360:], digits.target[order][360:], images[:360], digits.target[order][:360]


def make_params(seed: int, pixels: int) -> dict[str, dict[str, jax.Array]]:
    keys = jax.random.split(jax.random.key(seed), 2)
    return {
        "hidden": {"w": jax.random.normal(keys[0], (pixels, 256)) / pixels**0.5, "b": jnp.zeros(256)},
        "out": {"w": jax.random.normal(keys[1], (256, 10)) / 16, "b": jnp.zeros(10)},
    }


def predict(params: Any, images: Any) -> jax.Array:
    hidden = jax.nn.relu(images @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def loss_of(params: Any, images: Any, labels: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels).mean()


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # within jax.jit, collectives are for processors
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help="where MNIST's train-images-idx3-ubyte and the others are, or these with .gz")
    add("--epochs", type=int, default=15, help="passes over the images (default: %(default)s)")
    add("--goal", type=float, default=0.96, help="exit with 1 below this accuracy (default: %(default)s)")
    options = parser.parse_args()
    rj.init()  # (*)
    images, labels, test_images, test_labels = load(options.data)
    params = make_params(seed=rj.rank(), pixels=images.shape[1])
    params = rj.broadcast_parameters(params, root_rank=0)  # (*) all start from the same weights
    optimizer = rj.distributed(optax.adam(2e-3))  # (*)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, images: Any, labels: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, rj.allreduce(loss)  # (*)

    epochs, start = options.epochs, time.perf_counter()
    share = BATCH // rj.size()  # (*)
    for epoch in range(1, epochs + 1):
        # The same permutation on every rank: each image is used at most once an epoch, by one rank.
        order = np.random.default_rng(epoch).permutation(len(labels))
        for begin in range(0, len(order) - BATCH + 1, BATCH):
            mine = order[begin + rj.rank() * share :][:share]  # (*)
            params, state, loss = step(params, state, images[mine], labels[mine])
        if rj.rank() == 0:  # (*)
            loss_now = float(loss)  # waits for the step
            rate = epoch * (len(labels) // BATCH * BATCH) / (time.perf_counter() - start)
            eta = f"ETA {(epochs - epoch) * len(labels) / rate:.0f} s"
            print(f"epoch {epoch:2}/{epochs}  {rate:6,.0f} samples/s  loss {loss_now:.4f}  {eta}", flush=True)

    reached = float((predict(params, test_images).argmax(1) == test_labels).mean())
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))).hexdigest()
    identical = len(set(rj.allgather_object(digest))) == 1  # (*)
    if rj.rank() == 0:  # (*)
        seconds = time.perf_counter() - start
        print(f"{rj.size()} rank(s), {seconds:.1f} s: test accuracy {reached:.4f}, wanted {options.goal}")
        print(f"parameters bit-identical on all ranks: {'yes' if identical else 'NO'}  ({digest[:16]})")
    rj.shutdown()  # (*)
    return 0 if identical and reached >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
