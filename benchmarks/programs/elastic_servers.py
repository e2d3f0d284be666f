"""Workers of parameter servers that lease samples, or whose servers move, for `benchmarks.elastic_servers`.

``leases FLOATS BATCHES TURNS``: turns of batches, with a pull and a push of a key each, without leases and with them.
``moves MILLIONS MOVES``: synchronous rounds of 20 keys; now and then the number of server processes changes from 1 to 2
or back. Rank 0 writes a line of JSON: by turn, milliseconds of a batch without and with leases; or, by move,
milliseconds of the longest round behind it, above the median, and the median of those before.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time

import numpy as np

import reigen.kv
import reigen.optim

_BATCH, _NUM_KEYS = 32, 20
_CALIBRATION_ROUNDS, _MIN_WINDOW_ROUNDS, _WINDOW_SECONDS = 10, 12, 3.0


def lease_samples(store: reigen.kv.KVStore, num_floats: int, num_batches: int, num_turns: int) -> list[list[float]]:
    """Return milliseconds of a worker's batch by turn: without leases, with them."""
    found: list[list[float]] = []
    weights, gradient = np.zeros(num_floats, np.float32), np.ones(num_floats, np.float32)
    store.set_optimizer(reigen.optim.create("sgd", learning_rate=1e-6))
    store.init("w", weights)
    num_samples = num_batches * store.num_workers * _BATCH
    for turn in range(num_turns + 1):
        store.barrier()
        begin = time.perf_counter()
        for _ in range(num_batches):
            store.pull("w", out=weights)
            store.push("w", gradient).wait()
        store.barrier()
        middle = time.perf_counter()
        for _ in store.sample_leases(num_samples, _BATCH, first_epoch=turn, epochs=turn + 1):
            store.pull("w", out=weights)
            store.push("w", gradient)
        end = time.perf_counter()
        if turn:  # the first one warms up
            found.append([(middle - begin) * 1000 / num_batches, (end - middle) * 1000 / num_batches])
    return found


def move_servers(store: reigen.kv.KVStore, millions: float, num_moves: int) -> list[list[float]]:
    """Return, by move, milliseconds of the longest round above the median of those before, and that median."""
    store.set_optimizer(reigen.optim.create("sgd", learning_rate=1e-6, momentum=0.9))
    shape = (int(millions * 1e6) // _NUM_KEYS,)
    keys = [f"w{number}" for number in range(_NUM_KEYS)]
    values = [np.zeros(shape, np.float32) for _ in keys]
    gradients = [np.ones(shape, np.float32) for _ in keys]
    store.init(keys, values)

    def run_rounds(count: int) -> list[float]:
        took = []
        for _ in range(count):
            begin = time.perf_counter()
            store.pushpull(keys, gradients, out=values)
            took.append((time.perf_counter() - begin) * 1000)
        return took

    run_rounds(2)
    usual = statistics.median(run_rounds(_CALIBRATION_ROUNDS)) / 1000
    window = np.array([max(_MIN_WINDOW_ROUNDS, math.ceil(_WINDOW_SECONDS / usual))], np.float32)
    store.init("window", window)  # that of rank 0
    store.pull("window", out=window)
    found: list[list[float]] = []
    for move in range(num_moves):
        median = statistics.median(run_rounds(int(window[0])))
        if store.rank == 0:
            store.resize_servers(2 - move % 2)
        found.append([max(run_rounds(int(window[0]))) - median, median])
    return found


def main() -> None:
    kind, *numbers = sys.argv[1:]
    with reigen.kv.create("dist_async" if kind == "leases" else "dist_sync") as store:
        if kind == "leases":
            found: list[list[float]] = lease_samples(store, *map(int, numbers))
        else:
            found = move_servers(store, float(numbers[0]), int(numbers[1]))
        if store.rank == 0:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
