"""Film recommendations in JAX with embeddings whose rows lie on parameter servers: MovieLens.

    reigen run -np 2 -s 2 python examples/jax/recommender.py
    reigen run -np 8 -s 4 python examples/jax/recommender.py --data ml-25m --factors 64 --batch 16384

A step fetches the rows of its batch from the servers, and sends the gradients of these rows back: tables may be much
larger than what a step moves. --data has ratings.csv as in https://grouplens.org/datasets/movielens/25m/; without it,
ratings are drawn. --batch is that of all workers together, so that their number does not matter.
"""

from __future__ import annotations

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from progress import Progress
from recommender_data import Table, load, parse

from reigen import kv, optim


def predict(user: jax.Array, film: jax.Array, mean: jax.Array) -> jax.Array:
    """Stars, from the product of a user's row and a film's row; the last number of a row stands for itself."""
    return mean + (user[:, :-1] * film[:, :-1]).sum(1) + user[:, -1] + film[:, -1]


@jax.jit
def loss_and_gradients(
    user: jax.Array, film: jax.Array, mean: jax.Array, stars: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def loss_of(user: jax.Array, film: jax.Array, mean: jax.Array) -> jax.Array:
        return jnp.square(predict(user, film, mean) - stars).sum()

    return jax.value_and_grad(loss_of, (0, 1, 2))(user, film, mean)


def fit(options: argparse.Namespace, store: kv.KVStore) -> float:
    """The error, on rank 0."""
    pairs, stars = load(options)
    order = np.random.default_rng(0).permutation(len(stars))
    test, train = order[: len(order) // 10], order[len(order) // 10 :]
    store.set_optimizer(optim.create("adam", learning_rate=options.lr, rescale_grad=1 / options.batch))
    users, films = (
        Table(store, name, (int(pairs[:, column].max()) + 1, options.factors + 1), column)
        for column, name in enumerate(("users", "films"))
    )
    mean = np.array([stars[train].mean()], np.float32)
    store.init("mean", mean)
    rank, num_workers, steps = store.rank, store.num_workers, len(train) // options.batch
    progress = Progress(options.epochs * steps * options.batch, is_shown=rank == 0)
    for epoch in range(options.epochs):
        shuffled = np.random.default_rng(epoch).permutation(train)[: steps * options.batch]
        for batch in shuffled.reshape(steps, options.batch):
            mine = batch[rank::num_workers]
            rows = users.fetch(pairs[mine, 0]), films.fetch(pairs[mine, 1])
            loss, gradients = loss_and_gradients(*rows, mean, stars[mine])
            users.push(pairs[mine, 0], np.asarray(gradients[0]))
            films.push(pairs[mine, 1], np.asarray(gradients[1]))
            store.pushpull("mean", np.asarray(gradients[2]), out=mean)
            progress.add(options.batch, loss * num_workers / options.batch)
    store.barrier()  # with a store that does not wait, others may still be at it
    error = 0.0
    if rank == 0:
        guesses = predict(users.fetch(pairs[test, 0]), films.fetch(pairs[test, 1]), mean)
        error = float(np.sqrt(np.square(guesses - stars[test]).mean()))
        guess = float(np.sqrt(np.square(stars[train].mean() - stars[test]).mean()))
        how = f"{options.kvstore}, {num_workers} worker(s), {progress.elapsed:.1f} s"
        print(f"{how}: test error {error:.5f}, wanted {options.goal}; of the mean alone {guess:.5f}", flush=True)
    store.barrier()
    return error


def main() -> int:
    jax.config.update("jax_platforms", "cpu")  # the servers have the numbers in main memory
    options = parse(__doc__)
    with kv.create(options.kvstore) as store:  # in a server that `reigen launch` has started, this is all
        error = fit(options, store)
    return 0 if error <= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
