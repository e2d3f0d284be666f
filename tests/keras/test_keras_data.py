"""Data that is divided among the ranks: every rank takes as many steps, whatever the number of rows is."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import reigen.keras as hvd
from tests.keras import keras_models as models


class Batches(keras.utils.PyDataset):
    """Batches of 4 rows; the last one is smaller."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.x, self.y = models.make_data(rows)

    @property
    def num_batches(self) -> int:
        return -(-len(self.x) // 4)

    def __getitem__(self, index: int) -> Any:
        rows = slice(4 * index, 4 * index + 4)
        return self.x[rows], self.y[rows]


def shard_rows(rows: int, options: dict[str, Any]) -> tuple[list[int], list[int]]:
    x, y = hvd.shard(np.arange(rows), np.arange(rows) * 2, **options)
    assert (y == 2 * x).all()
    return x.tolist(), hvd.shard(np.arange(rows), **options).tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[0, 3, 6], [1, 4, 0], [2, 5, 1]]),
        ({"uneven": "drop"}, [[0, 3], [1, 4], [2, 5]]),
    ],
)
def test_rows(keras_pools, options, expected):
    assert keras_pools(3).run(shard_rows, 7, options, init=True) == [(rows, rows) for rows in expected]


def test_rows_are_shuffled_alike(keras_pools):
    results = keras_pools(2).run(shard_rows, 8, {"shuffle_seed": 5}, init=True)
    order = np.random.default_rng(5).permutation(8).tolist()
    assert [rows for rows, _ in results] == [order[0::2], order[1::2]]


def fit_uneven(rows: int, uneven: Any, as_dataset: bool) -> tuple[bytes, int]:
    model = models.make_model(1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
    model.compile(optimizer=optimizer, loss="mse")
    if as_dataset:
        dataset = hvd.ShardedDataset(Batches(rows), uneven)
        model.fit(dataset, epochs=2, verbose=0)
        assert len(dataset) * 2 == optimizer.iterations
    else:
        models.fit(model, *hvd.shard(*models.make_data(rows), uneven=uneven), 4, epochs=2)
    return models.bits(model), int(keras.ops.convert_to_numpy(optimizer.iterations))


@pytest.mark.parametrize(
    ("rows", "uneven", "as_dataset", "steps"),
    [(17, "repeat", True, 3), (17, "drop", True, 2), (19, "repeat", False, 3), (17, "drop", False, 2)],
)
def test_uneven_data_takes_as_many_steps_on_all_ranks(keras_pools, rows, uneven, as_dataset, steps):
    first, second = keras_pools(2).run(fit_uneven, rows, uneven, as_dataset, init=True)
    assert first == second
    assert first[1] == 2 * steps


def mistakes() -> list[str]:
    messages = []
    for attempt in (
        hvd.shard,
        lambda: hvd.shard(np.zeros(3), np.zeros(4)),
        lambda: hvd.shard(np.zeros(1)),
        lambda: hvd.shard(np.zeros(4), uneven="pad"),
        lambda: hvd.ShardedDataset(Batches(4)),
    ):
        with pytest.raises(ValueError, match=r"rows|ranks|uneven") as raised:
            attempt()
        messages.append(str(raised.value))
    return messages


def test_mistakes(keras_pools):
    parts = ["as many rows", "as many rows", "fewer than 2 ranks", "uneven must be", "fewer than 2 ranks"]
    for messages in keras_pools(2).run(mistakes, init=True):
        assert all(part in message for part, message in zip(parts, messages, strict=True))
