"""MovieLens' ratings, and tables whose rows lie on parameter servers, for recommender.py."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import generated_data
import numpy as np

from reigen import kv


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
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


def load(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """(number, 2) of users and films, both counted from 0, and (number,) of stars."""
    with tempfile.TemporaryDirectory() as made:
        if options.data is None:
            generated_data.write_movielens(Path(made), 400, 200, options.num_ratings)
        file = (options.data or Path(made)) / "ratings.csv"
        table = np.loadtxt(file, delimiter=",", skiprows=1, usecols=(0, 1, 2))
    # Numbers of films have gaps.
    pairs = np.stack([np.unique(table[:, column], return_inverse=True)[1] for column in (0, 1)], axis=1)
    return pairs, table[:, 2].astype(np.float32)


class Table:
    """Rows of numbers on the servers, under a key of a store."""

    def __init__(self, store: kv.KVStore, key: str, shape: tuple[int, int], seed: int) -> None:
        self._store, self._key, self._shape = store, key, shape
        values = np.random.default_rng(seed).normal(0, 0.1, shape).astype(np.float32)
        store.init(key, kv.RowSparse(np.arange(shape[0]), values, shape))

    def fetch(self, numbers: np.ndarray) -> np.ndarray:
        """A row for each number, as the servers have them now."""
        rows = kv.RowSparse([], np.empty((0, self._shape[1]), np.float32), self._shape)
        self._store.row_sparse_pull(self._key, out=rows, row_ids=numbers)
        return np.asarray(rows.values)[np.searchsorted(rows.indices, numbers)]

    def push(self, numbers: np.ndarray, gradients: np.ndarray) -> None:
        """Send gradients; those of the same row are added up, and those of all workers."""
        self._store.push(self._key, kv.RowSparse(numbers, gradients, self._shape))
