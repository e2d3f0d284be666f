"""Adasum in place of the average: `reigen run -np 2 python examples/jax/adasum.py`; 2, 4, 8 ... ranks.

With the average, more ranks mean a larger batch, so the learning rate has to be tuned again. Adasum averages the parts
that the ranks' updates share, and adds up the rest, so the learning rate of one rank still fits. Each rank has --batch
images here, and the number of ranks does change the result. `--average` is for comparison.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from progress import Progress
from sklearn.datasets import load_digits

import reigen.jax as rj


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--average", action="store_true", help="plain averages, with the same learning rate")
    parser.add_argument("--epochs", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=32, help="images of a step and rank (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="of one rank (default: %(default)s)")
    parser.add_argument("--goal", type=float, default=0.9, help="exit with 1 below it (default: %(default)s)")
    options = parser.parse_args()
    if not options.average and rj.size() & (rj.size() - 1):
        parser.error(f"Adasum needs 1, 2, 4, 8 ... ranks, not {rj.size()}; --average takes any number")
    return options


def predict(params: Any, images: Any) -> jax.Array:
    return jax.nn.relu(images @ params["hidden"] + params["bias"]) @ params["out"]


def loss_of(params: Any, images: Any, labels: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels).mean()


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # within jax.jit, collectives are for processors
    rj.init()
    options = parse()
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    keys = jax.random.split(jax.random.key(0), 2)
    hidden, out = jax.random.normal(keys[0], (64, 128)) / 8, jax.random.normal(keys[1], (128, 10)) / 11
    params = rj.broadcast_parameters({"hidden": hidden, "bias": jnp.zeros(128), "out": out}, root_rank=0)
    optimizer = optax.sgd(options.lr, momentum=0.9)
    state = optimizer.init(params)
    op = rj.Average if options.average else rj.Adasum

    @jax.jit
    def step(params: Any, state: Any, images: Any, labels: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
        # Each rank's optimizer makes an update of its own gradients; what is combined are these updates.
        updates, state = optimizer.update(gradients, state, params)
        updates = rj.allreduce(updates, op=op, name="updates")
        return optax.apply_updates(params, updates), state, loss

    step_images = options.batch * rj.size()
    steps = len(train) // step_images
    progress = Progress(options.epochs * steps * step_images, is_shown=rj.rank() == 0)
    for epoch in range(options.epochs):
        shuffled = np.random.default_rng(epoch).permutation(train)[: steps * step_images]
        for batch in shuffled.reshape(steps, step_images):
            mine = batch[rj.rank() :: rj.size()]
            params, state, loss = step(params, state, images[mine], labels[mine])
            progress.add(step_images, loss)
    accuracy = float((predict(params, images[test]).argmax(1) == labels[test]).mean())
    if rj.rank() == 0:
        how = f"{'average' if options.average else 'Adasum'}, {rj.size()} rank(s), {progress.elapsed:.1f} s"
        loss = float(loss_of(params, images[test], labels[test]))
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}; test loss {loss:.4f}")
    rj.shutdown()
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
