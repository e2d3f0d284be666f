"""Function that workers of an elastic job with a server run, and its call."""

from __future__ import annotations

import numpy as np

import reigen
import reigen.kv
from reigen import optim


def train(num_processes: int = 0) -> tuple[int, int, float]:
    """Five rounds; returns the rank, the number of workers, and the value, which all have."""
    store = reigen.kv.create("dist_sync")
    store.set_optimizer(optim.create("test"))
    store.init("w", np.zeros(10))
    out = np.empty(10)
    for _ in range(5):
        if num_processes:
            store.resize_servers(num_processes)
        store.pushpull("w", np.ones(10), out=out)
    return store.rank, store.num_workers, float(out[0])


def main() -> None:
    print(sorted(reigen.run(train, num_proc=3, min_num_proc=2, num_servers=1)))


def main_with_more_servers() -> None:
    print(sorted(reigen.run(train, (2,), num_proc=3, min_num_proc=2, num_servers=1, max_servers=2)))
