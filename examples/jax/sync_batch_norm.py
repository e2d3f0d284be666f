"""Batch normalisation over the batches of all ranks: `reigen run -np 2 python examples/jax/sync_batch_norm.py`.

With few images a rank, the mean and variance of its own batch are poor estimates. An allreduce in the layer, whose
gradient is an allreduce, too, gives those of all ranks' images, so that a model learns the same whatever the number of
ranks. `--local` is for comparison.
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

Tree = Any  # of arrays


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", action="store_true", help="each rank normalises by its own images")
    parser.add_argument("--epochs", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="images of a step, of all ranks (default: %(default)s)")
    parser.add_argument("--goal", type=float, default=0.95, help="exit with 1 below it (default: %(default)s)")
    options = parser.parse_args()
    if options.batch % rj.size():
        parser.error(f"--batch must be a multiple of the {rj.size()} ranks")
    return options


def make_params() -> Tree:
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "kernel": jax.random.normal(keys[0], (3, 3, 1, 32)) / 3,
        "norm": {"scale": jnp.ones(32), "bias": jnp.zeros(32)},
        "head": {"w": jax.random.normal(keys[1], (32 * 16, 10)) / 22, "b": jnp.zeros(10)},
    }


def predict(params: Tree, moments: jax.Array | None, images: Any, *, local: bool = False) -> tuple[Any, Any]:
    """Logits, and mean and variance of each channel: those given, or those of the images, of all ranks."""
    x = jax.lax.conv_general_dilated(
        images, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    if moments is None:
        mean, square = x.mean((0, 1, 2)), (x * x).mean((0, 1, 2))
        if not local:
            mean, square = rj.allreduce((mean, square), name="moments")  # as many images on every rank
        moments = jnp.stack([mean, square - mean * mean])
    x = (x - moments[0]) * jax.lax.rsqrt(moments[1] + 1e-5) * params["norm"]["scale"] + params["norm"]["bias"]
    x = jax.nn.relu(x).reshape(-1, 4, 2, 4, 2, 32).mean((2, 4)).reshape(len(images), -1)
    return x @ params["head"]["w"] + params["head"]["b"], moments


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # within jax.jit, collectives are for processors
    rj.init()
    options = parse()
    digits = load_digits()
    images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    params, averages = make_params(), jnp.stack([jnp.zeros(32), jnp.ones(32)])
    optimizer = rj.distributed(optax.sgd(0.05, momentum=0.9))
    state = optimizer.init(params)

    def loss_of(params: Tree, images: Any, labels: Any) -> tuple[jax.Array, jax.Array]:
        logits, moments = predict(params, None, images, local=options.local)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), moments

    @jax.jit
    def step(params: Tree, averages: jax.Array, state: Any, images: Any, labels: Any) -> tuple[Any, ...]:
        (loss, moments), gradients = jax.value_and_grad(loss_of, has_aux=True)(params, images, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), 0.9 * averages + 0.1 * moments, state, loss

    steps = len(train) // options.batch
    progress = Progress(options.epochs * steps * options.batch, is_shown=rj.rank() == 0)
    for epoch in range(options.epochs):
        shuffled = np.random.default_rng(epoch).permutation(train)[: steps * options.batch]
        for batch in shuffled.reshape(steps, options.batch):
            mine = batch[rj.rank() :: rj.size()]
            params, averages, state, loss = step(params, averages, state, images[mine], labels[mine])
            progress.add(len(batch), loss)
    logits, _ = predict(params, averages, images[test])
    accuracy = float((logits.argmax(1) == labels[test]).mean())
    loss = float(optax.softmax_cross_entropy_with_integer_labels(logits, labels[test]).mean())
    if rj.rank() == 0:
        how = f"{rj.size()} rank(s), {progress.elapsed:.1f} s"
        print(f"{how}: test accuracy {accuracy:.4f}, wanted {options.goal}; test loss {loss:.6f}")
    rj.shutdown()
    return 0 if accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
