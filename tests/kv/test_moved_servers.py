"""Servers that move to another process in the middle of everything: values, states and residuals are the same bits."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reigen import optim
from reigen.errors import ArgumentError, UnsupportedError
from reigen.kv import RowSparse
from reigen.kv.client.dist_store import DistStore
from tests.kv.threaded import Job, job

pytestmark = pytest.mark.slow
#: The large key is cut into slices on all servers.
CUT = {"kv_bigarray_bound": 1000, "kv_slice_bytes": 1 << 12}
NUM_ROUNDS, NUM_SERVERS = 24, 3
SHAPES: dict[str, tuple[int, ...]] = {"large": (9000,), "small": (50,), "other": (70,), "table": (40, 6)}
DENSE = ["large", "small", "other"]


def push_of(key: str, rank: int, number: int) -> np.ndarray:
    chance = np.random.default_rng([len(key), rank, number])
    return chance.standard_normal(SHAPES[key]).astype(np.float32)


def train(store: DistStore, compression: dict[str, Any], optimizer: str) -> list[bytes]:
    """Rounds of dense keys, alone and in batches, and of a sparse one; returns all that was pulled, by round."""
    if compression:
        store.set_gradient_compression(compression)
    if optimizer:
        store.set_optimizer(optim.create(optimizer, learning_rate=0.01))
    store.init(DENSE, [np.full(SHAPES[key], 0.5, np.float32) for key in DENSE])
    weight = np.zeros(SHAPES["table"], np.float32)
    store.init("table", RowSparse(np.arange(40), weight, weight.shape))
    outs, seen = {key: np.empty(SHAPES[key], np.float32) for key in DENSE}, []
    for number in range(NUM_ROUNDS):
        store.pushpull(DENSE, [push_of(key, store.rank, number) for key in DENSE], [outs[key] for key in DENSE])
        rows = np.arange(store.rank, 40, 3 + store.rank)
        store.push("table", RowSparse(rows, push_of("table", store.rank, number)[rows], weight.shape))
        received = RowSparse.empty(weight)
        store.row_sparse_pull("table", received, row_ids=np.arange(40))
        seen.append(b"".join([received.values.tobytes(), *(outs[key].tobytes() for key in DENSE)]))
    return seen


class Mover:
    """Moves servers, one after the other and again, while workers do something."""

    def __init__(self, made: Job, directory: Path, seed: int) -> None:
        self._made, self._directory, self._chance = made, str(directory), random.Random(seed)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_moves = 0

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._made.move_server(self._chance.randrange(NUM_SERVERS), self._directory)
            self.num_moves += 1

    def during(self, work: Callable[[], Any]) -> Any:
        self._thread.start()
        try:
            return work()
        finally:
            self._is_over.set()
            self._thread.join()


@pytest.mark.parametrize(
    ("compression", "optimizer"),
    [({}, "adam"), ({}, ""), ({"type": "2bit", "threshold": 0.5}, ""), ({"type": "1bit", "threshold": 0.0}, "sgd")],
    ids=["adam", "sums", "2bit", "1bit and sgd"],
)
@pytest.mark.parametrize("seed", range(int(os.environ.get("REIGEN_TEST_KILLS", "1"))))
def test_values_are_the_same_bits_as_of_servers_that_stay(
    tmp_path: Path, compression: dict[str, Any], optimizer: str, seed: int
) -> None:
    def work(store: DistStore) -> list[bytes]:
        return train(store, compression, optimizer)

    with job(2, NUM_SERVERS, **CUT) as made:
        expected = made.results(work)
    with job(2, NUM_SERVERS, **CUT) as made:
        mover = Mover(made, tmp_path / "moved", seed)
        results = mover.during(lambda: made.results(work))
    assert results == expected
    assert mover.num_moves >= NUM_SERVERS
    assert not any(path.is_file() for path in tmp_path.rglob("*")), "what was handed over is the next process's"


@pytest.mark.parametrize("staleness", [0, 2, None])
def test_each_push_counts_once(tmp_path: Path, staleness: int | None) -> None:
    def work(store: DistStore) -> np.ndarray:
        store.set_optimizer(optim.create("test"))
        store.init("w", np.zeros(3000))
        for number in range(60):
            store.push("w", np.full(3000, float(1 << store.rank)))
            if number % 7 == 0:
                store.pull("w", np.empty(3000))
        store.wait()
        store.barrier()
        out = np.empty(3000)
        store.pull("w", out)
        return out

    with job(3, NUM_SERVERS, **CUT) as made:
        results = Mover(made, tmp_path / "moved", 7).during(lambda: made.results(work, staleness=staleness))
    for each in results:
        np.testing.assert_array_equal(each, 60.0 * (1 + 2 + 4))


def test_keys_are_made_and_states_are_saved_while_servers_move(tmp_path: Path) -> None:
    def work(store: DistStore) -> tuple[bytes, ...]:
        store.set_optimizer(optim.create("adam"))
        values = []
        for number in range(12):
            key = f"w{number}"
            store.init(key, np.full(2000, float(number), np.float32))
            out = np.empty(2000, np.float32)
            store.pushpull(key, np.ones(2000, np.float32), out)
            values.append(out.tobytes())
        file = tmp_path / f"states-{store.rank}"
        store.save_optimizer_states(file)
        store.load_optimizer_states(file)
        return tuple(values)

    with job(2, NUM_SERVERS, **CUT) as made:
        expected = made.results(work)
    with job(2, NUM_SERVERS, **CUT) as made:
        assert Mover(made, tmp_path / "moved", 3).during(lambda: made.results(work)) == expected


def test_a_number_that_cannot_be_is_refused() -> None:
    def work(store: DistStore) -> None:
        with pytest.raises(UnsupportedError, match="reigen run -np 4 --min-np 2 -s 2 --max-servers 4"):
            store.resize_servers(2)
        store._member.servers_move = True  # type: ignore[misc]
        for num in (0, 4, True, "2"):
            with pytest.raises(ArgumentError, match="from 1 to 3, which is --max-servers"):
                store.resize_servers(num)  # type: ignore[arg-type]

    with job(1, NUM_SERVERS) as made:
        made.results(work)
