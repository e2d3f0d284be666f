"""A rank that dies, or is interrupted, in ``fit``: the others' ends with an error that names it, and they can exit."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import keras
import numpy as np
import pytest

import reigen.keras as hvd
from reigen.errors import MismatchError
from reigen.testing import RankError, RankPool
from tests.keras import keras_models as models
from tests.keras.conftest import BACKENDS, backend_environment

#: as errors write it
_NAMES_RANK_1 = re.compile(r"rank(\(s\))? 1\b")


class InSecondBatch(keras.callbacks.Callback):
    """Sends this process a signal, on rank 1."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1 and hvd.rank() == 1:
            os.kill(os.getpid(), self.number)


def fit_until_it_ends(number: int) -> str:
    hvd.init()
    try:
        model = models.make_model(1)
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
        x, y = hvd.shard(*models.make_data())
        try:
            models.fit(model, x, y, 4, epochs=50, callbacks=[InSecondBatch(number)])
        except KeyboardInterrupt:
            return "interrupted"
        except Exception as error:  # noqa: BLE001 - which kind it is depends on the backend
            return f"{type(error).__name__}: {error}"
        return "it ended"
    finally:
        hvd.shutdown()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_is_killed_in_fit(backend):
    with RankPool(3, env=backend_environment(backend)) as pool:
        with pytest.raises(RankError) as raised:
            pool.run(fit_until_it_ends, int(signal.SIGKILL))
        assert [failure.rank for failure in raised.value.failures] == [1]
        for rank in (0, 2):
            assert _NAMES_RANK_1.search(raised.value.results[rank])


def test_a_rank_is_interrupted_in_fit(keras_pools):
    first, second = keras_pools(2).run(fit_until_it_ends, int(signal.SIGINT))
    assert second == "interrupted"
    assert _NAMES_RANK_1.search(first)


def interrupts_a_step() -> str:
    """Where Ctrl-C comes when a step has begun: JAX has given it the memory of the variables."""
    hvd.init()
    try:
        model = models.make_model(1)
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
        model.make_train_function()
        run, calls = model.train_function, iter(range(100))

        def run_and_interrupt(*args: Any) -> Any:
            result = run(*args)
            if next(calls) == 2:
                raise KeyboardInterrupt
            return result

        model.train_function = run_and_interrupt
        try:
            models.fit(model, *models.make_data(), 4, epochs=2)
        except KeyboardInterrupt:
            return "interrupted"
        return "it ended"
    finally:
        hvd.shutdown()


def test_ctrl_c_in_a_step_stays_what_it_is(keras_pools):
    assert keras_pools(1).run(interrupts_a_step) == ["interrupted"]


def fails_in_the_loss() -> str:
    def loss(truth: Any, prediction: Any) -> Any:
        raise ValueError("this loss is wrong")

    hvd.init()
    try:
        model = models.make_model(1)
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss=loss)
        with pytest.raises(ValueError, match="this loss is wrong"):
            models.fit(model, *models.make_data(), 4)
        return "ended"
    finally:
        hvd.shutdown()


def test_an_error_in_the_first_step_is_the_users(keras_pools):
    assert keras_pools(1).run(fails_in_the_loss) == ["ended"]


def fits_another_model() -> str:
    hvd.init()
    try:
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(3 + hvd.rank())])
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
        with pytest.raises(MismatchError) as raised:
            model.fit(np.ones((8, 8)), np.ones((8, 3 + hvd.rank())), batch_size=4, verbose=0)
        return str(raised.value)
    finally:
        hvd.shutdown()


def test_ranks_with_different_models_are_told_so(keras_pools):
    first, second = keras_pools(2).run(fits_another_model)
    assert first == second
    assert "rank" in first
