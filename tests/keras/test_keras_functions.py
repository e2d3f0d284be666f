"""Collectives of values, and of variables."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import reigen.keras as hvd


def run_functions() -> dict[str, Any]:
    rank = hvd.rank()
    tensor = keras.ops.convert_to_tensor(np.full((2, 2), rank + 1.0, np.float32))
    results = {
        "average": hvd.allreduce(tensor, name="a"),
        "sum": hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0),
        "compressed": hvd.allreduce(tensor, compression=hvd.Compression.fp16),
        "number": hvd.allreduce(float(rank)),
        "variable": hvd.allreduce(keras.Variable(np.full(1, rank, np.float32)), op=hvd.Max),
        "gathered": hvd.allgather(np.full(rank + 1, rank, np.int32)),
        "root's": hvd.broadcast(np.full(2, rank, np.int64), 1),
        "rows": hvd.reducescatter(np.arange(3, dtype=np.float32) * (rank + 1)),
    }
    assert all(isinstance(each, np.ndarray) for each in results.values())
    return {name: (each.dtype.name, each.tolist()) for name, each in results.items()}


def test_functions_give_arrays(keras_pools):
    first, second = keras_pools(2).run(run_functions, init=True)
    expected = {
        "average": ("float32", [[1.5, 1.5]] * 2),
        "sum": ("float32", [[6.0, 6.0]] * 2),
        "compressed": ("float32", [[1.5, 1.5]] * 2),
        "number": ("float64", 0.5),
        "variable": ("float32", [1.0]),
        "gathered": ("int32", [0, 1, 1]),
        "root's": ("int64", [1, 1]),
    }
    assert first == {**expected, "rows": ("float32", [0.0, 1.5])}
    assert second == {**expected, "rows": ("float32", [3.0])}


def broadcast_variables() -> list[Any]:
    rank = hvd.rank()
    given = [
        keras.Variable(np.full((2, 3), rank, np.float32)),
        keras.Variable(np.float32(rank)),
        keras.Variable(np.full(2, rank + 0.5), dtype="bfloat16"),
        keras.Variable(np.full(2, 7 + rank), dtype="uint8", trainable=False),
        keras.random.SeedGenerator(rank + 3).state,
        keras.Variable(np.zeros((0, 2), np.float32)),
    ]
    hvd.broadcast_variables(given, root_rank=1)
    return [np.asarray(keras.ops.convert_to_numpy(each)).astype(float).tolist() for each in given]


def test_variables_of_any_type(keras_pools):
    expected = [[[1.0] * 3] * 2, 1.0, [1.5, 1.5], [8.0, 8.0]]
    first, second = keras_pools(2).run(broadcast_variables, init=True)
    assert first == second
    assert first[:4] == expected
    assert first[4][0] == 4.0


def broadcast_different() -> str:
    with pytest.raises(hvd.HorovodInternalError) as raised:
        hvd.broadcast_variables([keras.Variable(np.zeros(2 + hvd.rank(), np.float32))], 0)
    return str(raised.value)


def test_variables_that_differ(keras_pools):
    for message in keras_pools(2).run(broadcast_different, init=True):
        assert "rank 0: variable 0: float32 (2,)" in message
        assert "rank 1: variable 0: float32 (3,)" in message


def broadcast_different_numbers() -> tuple[str, list[float]]:
    rank = hvd.rank()
    with pytest.raises(hvd.HorovodInternalError) as raised:
        hvd.broadcast_variables([keras.Variable(np.zeros(2, np.float32)) for _ in range(3 - rank)], 0)
    again = keras.Variable(np.full(2, rank, np.float32))
    hvd.broadcast_variables([again] * 3, 0)
    return str(raised.value), np.asarray(keras.ops.convert_to_numpy(again)).tolist()


def test_variables_that_differ_in_number(keras_pools):
    """Nobody waits for the variables that the other rank has not; the job goes on."""
    for message, values in keras_pools(2).run(broadcast_different_numbers, init=True):
        assert "the ranks have different variables" in message
        assert values == [0.0, 0.0]


def ask_for_global_variables() -> None:
    with pytest.raises(ValueError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)


def test_there_are_no_global_variables(keras_pools):
    keras_pools(1).run(ask_for_global_variables, init=True)
