"""Handwritten digits with Flax on any number of processes: `reigen run -np 2 python examples/jax/flax_digits.py`.

A convolutional network, whose training is Flax's own: the optimizer of its TrainState is all that changes. Lines that
make it distributed are marked with (*).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

import reigen.jax as rj  # (*)

BATCH = 48  # images per step, on all ranks together


class Net(nn.Module):
    """Two convolutions and two dense layers."""

    @nn.compact
    def __call__(self, images: Any) -> Any:
        x = nn.relu(nn.Conv(16, (3, 3))(images))
        x = nn.avg_pool(nn.relu(nn.Conv(32, (3, 3))(x)), (2, 2), (2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))


@jax.jit
def train_step(state: TrainState, images: Any, labels: Any) -> tuple[TrainState, jax.Array]:
    def loss_of(params: Any) -> jax.Array:
        logits = state.apply_fn(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradients), rj.allreduce(loss)  # (*)


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # within jax.jit, collectives are for processors
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--goal", type=float, default=0.95, help="exit with 1 below it (default: %(default)s)")
    options = parser.parse_args()
    rj.init()  # (*)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (digits.images[order] / 16).astype(np.float32)[..., None], digits.target[order]
    net = Net()
    params = net.init(jax.random.key(rj.rank()), images[:1])
    params = rj.broadcast_parameters(params, root_rank=0)  # (*) all start from the same weights
    optimizer = rj.distributed(optax.sgd(0.1, momentum=0.9))  # (*)
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optimizer)

    share = BATCH // rj.size()  # (*)
    start = time.perf_counter()
    for epoch in range(1, options.epochs + 1):
        order = np.random.default_rng(epoch).permutation(np.arange(360, len(labels)))  # the first 360 are for the test
        for begin in range(0, len(order) - BATCH + 1, BATCH):
            mine = order[begin + rj.rank() * share :][:share]  # (*)
            state, loss = train_step(state, images[mine], labels[mine])
        if rj.rank() == 0:  # (*)
            loss_now = float(loss)  # waits for the step
            rate = epoch * (len(order) // BATCH * BATCH) / (time.perf_counter() - start)
            eta = f"ETA {(options.epochs - epoch) * len(order) / rate:.0f} s"
            print(f"epoch {epoch}/{options.epochs}  {rate:6,.0f} samples/s  loss {loss_now:.4f}  {eta}", flush=True)

    reached = float((net.apply(state.params, images[:360]).argmax(1) == labels[:360]).mean())
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.params))).hexdigest()
    identical = len(set(rj.allgather_object(digest))) == 1  # (*)
    if rj.rank() == 0:  # (*)
        print(f"{rj.size()} rank(s): test accuracy {reached:.4f}, wanted {options.goal}")
        print(f"parameters bit-identical on all ranks: {'yes' if identical else 'NO'}  ({digest[:16]})")
    rj.shutdown()  # (*)
    return 0 if identical and reached >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
