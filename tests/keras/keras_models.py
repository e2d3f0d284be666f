"""Models, data and comparisons of these tests; run in rank processes, on any backend of Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import reigen.keras as hvd

ROWS, FEATURES = 48, 6


def make_data(rows: int = ROWS) -> tuple[Any, Any]:
    """The same on every rank."""
    random = np.random.default_rng(7)
    x = random.normal(size=(rows, FEATURES)).astype(np.float32)
    return x, np.tanh(x.sum(axis=1, keepdims=True)).astype(np.float32)


def make_model(seed: int) -> Any:
    """Weights differ by the seed."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])


def bits(model: Any) -> bytes:
    """All bits of its weights."""
    return b"".join(np.ascontiguousarray(each).tobytes() for each in model.get_weights())


def flat(model: Any) -> Any:
    """All weights, as one vector of float64."""
    return np.concatenate([each.astype(np.float64).ravel() for each in model.get_weights()])


def fit(model: Any, x: Any, y: Any, batch_size: int, **options: Any) -> Any:
    """Rows in their order."""
    return model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0, **options)


def fit_both(make_optimizer: Any, wrap: Any = hvd.DistributedOptimizer, **compile_options: Any) -> tuple[Any, Any, Any]:
    """Train with all ranks, compiled with these options, and the whole batches with plain Keras alone.

    Returns:
        Both models, and the history of the first one.
    """
    x, y = make_data()
    shared, alone = make_model(seed=hvd.rank() + 1), make_model(seed=1)
    alone.compile(optimizer=make_optimizer(), loss="mse", metrics=["mae"])
    history = fit(alone, x, y, 4 * hvd.size(), epochs=2)
    shared.compile(optimizer=wrap(make_optimizer()), loss="mse", metrics=["mae"], **compile_options)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    shared_x, shared_y = hvd.shard(x, y)
    together = fit(shared, shared_x, shared_y, 4, epochs=2, callbacks=callbacks)
    return shared, alone, (together.history, history.history)
