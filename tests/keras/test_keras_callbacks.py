"""Callbacks in ``fit``, on each backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import reigen.keras as hvd
from reigen.errors import ArgumentError
from tests.keras import keras_models as models


class Rates(keras.callbacks.Callback):
    """Learning rates during each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        self.seen.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


def run_schedule(callback: Any, epochs: int, optimizer: Any = None) -> tuple[list[float], list[float], Any]:
    """Three batches an epoch."""
    model = models.make_model(1)
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer or keras.optimizers.SGD(0.1)), loss="mse")
    rates = Rates()
    x, y = models.make_data()
    history = models.fit(model, x[:12], y[:12], 4, epochs=epochs, callbacks=[callback, rates])
    return rates.seen, history.history["lr"], model


def warm_up() -> Any:
    seen, logged, _ = run_schedule(hvd.callbacks.LearningRateWarmupCallback(0.3, warmup_epochs=2, verbose=1), 3)
    return seen, logged


def test_warm_up_raises_the_rate_batch_by_batch(keras_pools):
    pool = keras_pools(2)
    results = pool.run(warm_up, init=True)
    # from 0.3 / 2 to 0.3 in six batches; then it stays
    expected = [0.3 / 2 * (1 + batch / 6) for batch in range(1, 7)] + [0.3] * 3
    for seen, logged in results:
        assert seen == pytest.approx(expected, rel=1e-6)
        assert logged == pytest.approx(expected[2::3], rel=1e-6)
    assert "Epoch 2: finished gradual learning rate warmup to 0.3." in pool.output(0)[0]


def schedules() -> Any:
    make = hvd.callbacks.LearningRateScheduleCallback
    stairs = run_schedule(make(0.2, lambda epoch: 0.5**epoch, start_epoch=1, end_epoch=3), 4)[0]
    smooth = run_schedule(make(0.2, lambda epoch: 1 + epoch, staircase=False), 2)[0]
    constant = run_schedule(make(0.2, 0.25, start_epoch=1), 2)[0]
    return stairs, smooth, constant


def test_schedules(keras_pools):
    for stairs, smooth, constant in keras_pools(1).run(schedules, init=True):
        assert stairs == pytest.approx([0.1] * 6 + [0.05] * 6, rel=1e-6)  # 0.1 is the optimizer's own
        assert smooth == pytest.approx([0.2 * (1 + batch / 3) for batch in range(6)], rel=1e-6)
        assert constant == pytest.approx([0.1] * 3 + [0.05] * 3, rel=1e-6)


def correct_momentum(correct: bool) -> Any:
    """SGD by hand in float64: before the batch in which the rate changes, the velocity is scaled with it, or is not."""
    x, y = models.make_data(12)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((models.FEATURES,)), keras.layers.Dense(1, use_bias=False)])
    weights = model.get_weights()[0].astype(np.float64)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), loss="mse")
    callback = hvd.callbacks.LearningRateScheduleCallback(
        0.1, lambda epoch: [1.0, 0.1][epoch], momentum_correction=correct
    )
    models.fit(model, x, y, 4, epochs=2, callbacks=[callback])
    velocity, rate = np.zeros_like(weights), 0.1
    for step in range(6):
        if step == 3:
            rate, velocity = 0.01, velocity * (0.1 if correct else 1.0)
        rows = slice(4 * (step % 3), 4 * (step % 3) + 4)
        gradient = 2 * x[rows].T @ (x[rows] @ weights - y[rows]) / 4
        velocity = 0.9 * velocity - rate * gradient
        weights = weights + velocity
    return float(np.abs(model.get_weights()[0] - weights).max())


@pytest.mark.parametrize("correct", [True, False])
def test_momentum_correction(keras_pools, correct):
    assert keras_pools(1).run(correct_momentum, correct, init=True)[0] < 1e-5


def average_metrics() -> tuple[dict[str, Any], dict[str, Any]]:
    class Before(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(dict(logs))

    seen: list[dict[str, Any]] = []
    model = models.make_model(hvd.rank())
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse", metrics=["mae"])
    data = hvd.shard(*models.make_data())
    callbacks = [Before(), hvd.callbacks.MetricAverageCallback()]
    history = models.fit(model, *data, 4, validation_data=data, callbacks=callbacks)
    return seen[0], {name: values[0] for name, values in history.history.items()}


def test_metrics_are_averaged_for_the_callbacks_behind(keras_pools):
    (own, averaged), (other, same) = keras_pools(2).run(average_metrics, init=True)
    assert averaged == same
    assert own["loss"] != other["loss"]
    assert set(own) == {"loss", "mae", "val_loss", "val_mae"}
    assert averaged == pytest.approx({name: (own[name] + other[name]) / 2 for name in own}, rel=1e-6)


def broadcast(lazy: bool) -> tuple[bytes, list[float]]:
    keras.utils.set_random_seed(hvd.rank())
    layers = [keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = keras.Sequential(layers if lazy else [keras.Input((models.FEATURES,)), *layers])
    plain = keras.optimizers.SGD(0.1 * (hvd.rank() + 1), momentum=0.9)
    model.compile(optimizer=hvd.DistributedOptimizer(plain), loss="mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=1)]
    models.fit(model, *hvd.shard(*models.make_data()), 4, callbacks=callbacks)
    states = [keras.ops.convert_to_numpy(each).astype(float).sum().item() for each in model.optimizer.variables]
    return models.bits(model), states


@pytest.mark.parametrize("lazy", [False, True])
def test_broadcast_gives_all_ranks_the_roots_weights_and_optimizer(keras_pools, lazy):
    first, second = keras_pools(2).run(broadcast, lazy, init=True)
    assert first == second
    assert first[1][1] == pytest.approx(0.2)


def keep_local() -> list[float]:
    model = models.make_model(hvd.rank())
    layer = model.layers[-1]
    layer.bias.assign([float(hvd.rank())])
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.0), local_layers=[layer])
    model.compile(optimizer=optimizer, loss="mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=layer.trainable_variables)
    models.fit(model, *hvd.shard(*models.make_data()), 4, callbacks=[callback])
    return layer.get_weights()[1].tolist()


def test_local_variables_are_not_broadcast(keras_pools):
    assert keras_pools(2).run(keep_local, init=True) == [[0.0], [1.0]]


def checkpoint(directory: str) -> list[str]:
    model = models.make_model(1)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    callback = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    callback.filepath = str(Path(directory) / f"rank{hvd.rank()}.keras")
    models.fit(model, *hvd.shard(*models.make_data()), 4, epochs=2, callbacks=[callback])
    hvd.barrier()
    return sorted(each.name for each in Path(directory).iterdir())


def checkpoint_nowhere() -> str:
    model = models.make_model(1)
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    with pytest.raises(ArgumentError, match="has no filepath") as raised:
        models.fit(model, *models.make_data(), 4, callbacks=[hvd.callbacks.BestModelCheckpoint(monitor="loss")])
    return str(raised.value)


def test_a_checkpoint_without_a_path_fails_on_all_ranks(keras_pools):
    first, second = keras_pools(2).run(checkpoint_nowhere, init=True)
    assert first == second


def test_the_best_model_is_saved_by_rank_0(keras_pools, tmp_path):
    assert keras_pools(2).run(checkpoint, str(tmp_path), init=True) == [["rank0.keras"]] * 2
