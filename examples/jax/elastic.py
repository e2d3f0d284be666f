"""Handwritten digits in an elastic job: kill a process while it trains, and the others go on.

    reigen run -np 4 --min-np 2 python examples/jax/elastic.py
    kill -9 PROCESS     # any of those that the script names; another one comes in its place

A step has --batch images of all ranks, whoever dies: they are dealt anew to those who are left. What was done since the
last commit is done again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import reigen.jax as rj

GOAL = 0.95  # of the test images


def say(text: str) -> None:
    if rj.rank() == 0:
        print(text, flush=True)


def predict(params: Any, images: Any) -> jax.Array:
    return jax.nn.relu(images @ params["hidden"] + params["bias"]) @ params["out"]


def loss_of(params: Any, images: Any, labels: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels).sum()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="passes over the images (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=48, help="images of a step, of all ranks (default: %(default)s)")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # within jax.jit, collectives are for processors
    rj.init()
    print(f"process {os.getpid()} is rank {rj.rank()} of {rj.size()}", flush=True)
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    steps = len(train) // options.batch
    keys = jax.random.split(jax.random.key(0), 2)
    hidden, out = jax.random.normal(keys[0], (64, 128)) / 8, jax.random.normal(keys[1], (128, 10)) / 11
    params = {"hidden": hidden, "bias": jnp.zeros(128), "out": out}
    optimizer = rj.distributed(optax.sgd(0.1, momentum=0.9), op=rj.Sum)
    state = rj.elastic.JaxState(params=params, moments=optimizer.init(params), epoch=0, step=0, accuracy=0.0)
    state.register_reset_callbacks([lambda: say(f"{rj.size()} ranks go on at epoch {state.epoch}, step {state.step}")])

    @jax.jit
    def update(params: Any, moments: Any, images: Any, labels: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, images, labels)
        gradients = jax.tree.map(lambda gradient: gradient / options.batch, gradients)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, rj.allreduce(loss, op=rj.Sum) / options.batch

    @rj.elastic.run
    def fit(state: rj.elastic.JaxState) -> None:
        while state.epoch < options.epochs:
            start, first, loss = time.perf_counter(), state.step, jnp.zeros(())
            batches = np.random.default_rng(state.epoch).permutation(train)[: steps * options.batch]
            for batch in batches.reshape(steps, options.batch)[state.step :]:
                mine = batch[rj.rank() :: rj.size()]
                changed = update(state.params, state.moments, images[mine], labels[mine])
                state.params, state.moments, loss = changed
                state.step += 1
                if state.step % 10 == 0:
                    state.commit()  # a death goes back to here, and newcomers join here
            state.accuracy = float((predict(state.params, images[test]).argmax(1) == labels[test]).mean())
            took = time.perf_counter() - start  # of an epoch, or of what was left of it
            rate, left = (state.step - first) * options.batch / took, (options.epochs - state.epoch - 1) * took
            line = f"epoch {state.epoch + 1:3}/{options.epochs}  {rj.size()} ranks  accuracy {state.accuracy:.4f}"
            say(f"{line}  loss {float(loss):.4f}  {rate:,.0f} samples/s  ETA {left:.0f} s")
            state.epoch, state.step = state.epoch + 1, 0
            state.commit()

    fit(state)
    say(f"test accuracy {state.accuracy:.4f}, wanted {GOAL}")
    return 0 if state.accuracy >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
