"""Ranks with unequal amounts of data: `reigen run -np 4 python examples/jax/join.py`.

Rank 0 has the fewest images, the last rank the most, and every rank trains on all of its images in each epoch. A rank
that has no more batches calls `rj.join()`, which contributes zeros to the other ranks' allreduces until the last rank
is done; then all ranks get the last rank's weights. Ranks reduce sums over images, and the number of images, so the
zeros have no effect.
"""

from __future__ import annotations

import argparse
import hashlib
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
    parser.add_argument("--epochs", type=int, default=6, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=16, help="images of a step and rank (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=0.05, help="default: %(default)s")
    parser.add_argument("--goal", type=float, default=0.9, help="exit with 1 below it (default: %(default)s)")
    return parser.parse_args()


def share(images: np.ndarray, rank: int) -> np.ndarray:
    """A rank's images: rank r of n gets r + 1 parts of 1 + 2 + ... + n."""
    parts = rj.size() * (rj.size() + 1) // 2
    first, last = rank * (rank + 1) // 2, (rank + 1) * (rank + 2) // 2
    return images[len(images) * first // parts : len(images) * last // parts]


def predict(params: Any, images: Any) -> jax.Array:
    return jax.nn.relu(images @ params["hidden"] + params["bias"]) @ params["out"]


def loss_of(params: Any, images: Any, labels: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels).sum()


def main() -> int:
    options = parse()
    jax.config.update("jax_platforms", "cpu")  # within jax.jit, collectives are for processors
    rj.init()
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[360:], order[:360]
    keys = jax.random.split(jax.random.key(0), 2)
    hidden, out = jax.random.normal(keys[0], (64, 128)) / 8, jax.random.normal(keys[1], (128, 10)) / 11
    params = {"hidden": hidden, "bias": jnp.zeros(128), "out": out}
    optimizer = optax.sgd(options.lr, momentum=0.9)
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, images: Any, labels: Any) -> tuple[Any, Any, jax.Array]:
        mine = jax.value_and_grad(loss_of)(params, images, labels)
        (loss, gradients), count = rj.allreduce((mine, jnp.float32(len(labels))), op=rj.Sum, name="sums")
        gradients = jax.tree.map(lambda gradient: gradient / count, gradients)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss / count

    mine = share(train, rj.rank())
    counts = [len(share(train, rank)) for rank in range(rj.size())]
    progress = Progress(options.epochs * len(train), is_shown=rj.rank() == rj.size() - 1)
    steps = 0
    for epoch in range(options.epochs):
        shuffled = np.random.default_rng(epoch).permutation(mine)
        for number, batch in enumerate(np.split(shuffled, range(options.batch, len(shuffled), options.batch))):
            params, state, loss = step(params, state, images[batch], labels[batch])
            steps += 1
            of_all = sum(min(options.batch, max(0, count - number * options.batch)) for count in counts)
            progress.add(of_all, loss)
        jax.block_until_ready(params)  # the steps are over before this rank says that it has no more
        params, state = rj.broadcast_parameters((params, state), root_rank=rj.join())
    accuracy = float((predict(params, images[test]).argmax(1) == labels[test]).mean())
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))).hexdigest()
    took = rj.allgather_object((steps, digest))
    identical = len({digest for _, digest in took}) == 1
    if rj.rank() == 0:
        print(f"steps of each rank: {[steps for steps, _ in took]}")
        print(f"parameters bit-identical on all ranks: {'yes' if identical else 'NO'}")
        print(f"{rj.size()} rank(s), {progress.elapsed:.1f} s: test accuracy {accuracy:.4f}, wanted {options.goal}")
    rj.shutdown()
    return 0 if identical and accuracy >= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
