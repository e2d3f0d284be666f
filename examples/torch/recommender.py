"""Film recommendations with embeddings whose rows lie on parameter servers: MovieLens.

    reigen run -np 2 -s 2 python examples/torch/recommender.py
    reigen run -np 8 -s 4 python examples/torch/recommender.py --data ml-25m --factors 64 --batch 16384

A step fetches the rows of its batch from the servers, and sends the gradients of these rows back: tables may be much
larger than what a step moves. --data has ratings.csv as in https://grouplens.org/datasets/movielens/25m/; without it,
ratings are drawn. --batch is that of all workers together, so that their number does not matter.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import generated_data
import numpy as np
import torch
from progress import Progress
from torch import nn

from reigen import kv
from reigen.torch import Trainer


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kvstore", choices=["dist_sync", "dist_async"], default="dist_sync", help="default: %(default)s")
    add("--data", type=Path, help="the directory of ratings.csv")
    add("--num-ratings", type=int, default=20_000, help="how many ratings to draw (default: %(default)s)")
    add("--factors", type=int, default=8, help="numbers of a user's or film's row (default: %(default)s)")
    add("--epochs", type=int, default=4, help="default: %(default)s")
    add("--batch", type=int, default=512, help="ratings of a step, of all workers together (default: %(default)s)")
    add("--lr", type=float, default=0.03, help="of Adam (default: %(default)s)")
    add("--goal", type=float, default=0.6, help="exit with 1 above this root of the mean square (default: %(default)s)")
    return parser.parse_args()


def load(options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """(number, 2) of users and films, both counted from 0, and (number,) of stars."""
    with tempfile.TemporaryDirectory() as made:
        if options.data is None:
            generated_data.write_movielens(Path(made), 400, 200, options.num_ratings)
        file = (options.data or Path(made)) / "ratings.csv"
        table = np.loadtxt(file, delimiter=",", skiprows=1, usecols=(0, 1, 2))
    # Numbers of films have gaps.
    pairs = np.stack([np.unique(table[:, column], return_inverse=True)[1] for column in (0, 1)], axis=1)
    return torch.tensor(pairs), torch.tensor(table[:, 2], dtype=torch.float32)


class Factors(nn.Module):
    """Stars, from the product of a user's row and a film's row; the last number of a row stands for itself."""

    def __init__(self, num_users: int, num_films: int, factors: int, mean: float) -> None:
        super().__init__()
        self.users = nn.Embedding(num_users, factors + 1, sparse=True)
        self.films = nn.Embedding(num_films, factors + 1, sparse=True)
        self.mean = nn.Parameter(torch.tensor([mean]))
        for table in (self.users, self.films):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        user, film = self.users(pairs[:, 0]), self.films(pairs[:, 1])
        return self.mean + (user[:, :-1] * film[:, :-1]).sum(1) + user[:, -1] + film[:, -1]


def fetch(trainer: Trainer, model: Factors, pairs: torch.Tensor) -> None:
    """Have the tables hold the rows of these pairs as the servers have them now."""
    trainer.row_sparse_pull(model.users.weight, pairs[:, 0])
    trainer.row_sparse_pull(model.films.weight, pairs[:, 1])


def fit(options: argparse.Namespace, store: kv.KVStore) -> float:
    """The error, on rank 0."""
    torch.manual_seed(0)
    pairs, stars = load(options)
    order = torch.randperm(len(stars), generator=torch.Generator().manual_seed(0))
    test, train = order[: len(order) // 10], order[len(order) // 10 :]
    num_users, num_films = (pairs.amax(0) + 1).tolist()
    model = Factors(num_users, num_films, options.factors, float(stars[train].mean()))
    tables = {"params": [model.users.weight, model.films.weight], "stype": "row_sparse"}
    groups = [tables, {"params": [model.mean]}]
    steps = len(train) // options.batch
    rank, num_workers = store.rank, store.num_workers
    trainer = Trainer(groups, "adam", {"learning_rate": options.lr}, kvstore=store)
    progress = Progress(options.epochs * steps * options.batch, is_shown=rank == 0)
    for epoch in range(options.epochs):
        shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
        for batch in shuffled[: steps * options.batch].split(options.batch):
            mine = batch[rank::num_workers]
            fetch(trainer, model, pairs[mine])
            trainer.zero_grad()
            loss = (model(pairs[mine]) - stars[mine]).square().sum()
            loss.backward()
            trainer.step(options.batch)  # the gradients of all workers are added up, row by row
            progress.add(options.batch, loss.detach() * num_workers / options.batch)
    store.barrier()  # with a store that does not wait, others may still be at it
    error = 0.0
    if rank == 0:
        fetch(trainer, model, pairs[test])
        with torch.no_grad():
            error = float((model(pairs[test]) - stars[test]).square().mean().sqrt())
        guess = float((stars[train].mean() - stars[test]).square().mean().sqrt())
        how = f"{options.kvstore}, {num_workers} worker(s), {progress.elapsed:.1f} s"
        print(f"{how}: test error {error:.5f}, wanted {options.goal}; of the mean alone {guess:.5f}", flush=True)
    store.barrier()
    return error


def main() -> int:
    options = parse()
    with kv.create(options.kvstore) as store:  # in a server that `reigen launch` has started, this is all
        error = fit(options, store)
    return 0 if error <= options.goal else 1


if __name__ == "__main__":
    sys.exit(main())
