"""Film recommendations in Keras 3 with embeddings whose rows lie on parameter servers: MovieLens.

    KERAS_BACKEND=torch reigen run -np 2 -s 2 python examples/keras/recommender.py
    KERAS_BACKEND=tensorflow reigen run -np 8 -s 4 python examples/keras/recommender.py --data ml-25m --factors 64 \\
        --batch 16384

A step fetches the rows of its batch from the servers, and sends the gradients of these rows back: tables may be much
larger than what a step moves. --data has ratings.csv as in https://grouplens.org/datasets/movielens/25m/; without it,
ratings are drawn. --batch is that of all workers together, so that their number does not matter. Any backend will do.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import keras
import numpy as np
from keras import ops
from progress import Progress
from recommender_data import Table, load, parse

from reigen import kv, optim


def predict(user: Any, film: Any, mean: Any) -> Any:
    """Stars, from the product of a user's row and a film's row; the last number of a row stands for itself."""
    return mean + ops.sum(user[:, :-1] * film[:, :-1], 1) + user[:, -1] + film[:, -1]


class Rows(keras.layers.Layer):
    """Stars of a step's ratings. Its weights are the rows of their users and films, which are others in each step."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.users, self.films = (self.add_weight(shape=(count, width), name=name) for name in ("users", "films"))
        self.mean = self.add_weight(shape=(1,), name="mean")

    def call(self, places: Any) -> Any:
        return predict(ops.take(self.users, places, 0), ops.take(self.films, places, 0), self.mean)[:, None]


class Sender(keras.optimizers.Optimizer):
    """Has the servers update what the weights are copies of.

    It needs values, so it runs in a step that is not compiled: ``compile(run_eagerly=True)``.
    """

    #: of the last step: of users, films and the mean
    gradients: list[np.ndarray]

    def apply(self, grads: list[Any], trainable_variables: list[keras.Variable] | None = None) -> None:
        self.gradients = [np.array(ops.convert_to_numpy(gradient)) for gradient in grads]


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
    places = np.arange(len(range(rank, options.batch, num_workers)))
    rows, sender = Rows(len(places), options.factors + 1), Sender(options.lr)
    model = keras.Sequential([keras.Input((), dtype="int32"), rows])
    model.compile(optimizer=sender, loss=keras.losses.MeanSquaredError(reduction="sum"), run_eagerly=True)
    progress = Progress(options.epochs * steps * options.batch, is_shown=rank == 0)
    for epoch in range(options.epochs):
        shuffled = np.random.default_rng(epoch).permutation(train)[: steps * options.batch]
        for batch in shuffled.reshape(steps, options.batch):
            mine = batch[rank::num_workers]
            rows.users.assign(users.fetch(pairs[mine, 0]))
            rows.films.assign(films.fetch(pairs[mine, 1]))
            rows.mean.assign(mean)
            loss = model.train_on_batch(places, stars[mine, None])
            users.push(pairs[mine, 0], sender.gradients[0])
            films.push(pairs[mine, 1], sender.gradients[1])
            store.pushpull("mean", sender.gradients[2], out=mean)
            progress.add(options.batch, loss * num_workers / options.batch)
    store.barrier()  # with a store that does not wait, others may still be at it
    error = 0.0
    if rank == 0:
        parts = users.fetch(pairs[test, 0]), films.fetch(pairs[test, 1]), mean
        guesses = ops.convert_to_numpy(predict(*map(ops.convert_to_tensor, parts)))
        error = float(np.sqrt(np.square(guesses - stars[test]).mean()))
        guess = float(np.sqrt(np.square(stars[train].mean() - stars[test]).mean()))
        how = f"{keras.backend.backend()}, {options.kvstore}, {num_workers} worker(s), {progress.elapsed:.1f} s"
        print(f"{how}: test error {error:.5f}, wanted {options.goal}; of the mean alone {guess:.5f}", flush=True)
    store.barrier()
    return error


def main() -> int:
    options = parse(__doc__)
    with keras.device("cpu"), kv.create(options.kvstore) as store:  # in a server of `reigen launch`, this is all
        error = fit(options, store)
    return 0 if error <= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
