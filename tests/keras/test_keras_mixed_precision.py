"""mixed_float16: all ranks skip a step if the gradients of one of them are not finite, and scale the loss alike."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import reigen.keras as hvd
from tests.keras import keras_models as models


def train_with_overflow(wrapped_before: bool, passes: int) -> tuple[bytes, bytes, float, int]:
    """Rank 1's third batch has a number whose gradient is infinite in float16."""
    x, y = models.make_data()
    local_x, local_y = (np.copy(each) for each in hvd.shard(x, y))
    if hvd.rank() == 1:
        local_x[8] = 6e4
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((models.FEATURES,)), keras.layers.Dense(1, dtype=keras.DTypePolicy("mixed_float16"))]
    )
    plain = keras.optimizers.SGD(0.01, momentum=0.9)
    if wrapped_before:
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.LossScaleOptimizer(plain, initial_scale=1024.0), backward_passes_per_step=passes
        )
    else:
        inner = hvd.DistributedOptimizer(plain, backward_passes_per_step=passes)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)
    model.compile(optimizer=optimizer, loss="mse")
    models.fit(model, local_x[:8], local_y[:8], 4)
    before = models.bits(model)
    models.fit(model, local_x[8:12], local_y[8:12], 4)
    skipped = models.bits(model)
    models.fit(model, local_x[12:], local_y[12:], 4)
    scale = float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))
    applied = int(keras.ops.convert_to_numpy(optimizer.inner_optimizer._iterations))
    assert before == skipped
    return skipped, models.bits(model), scale, applied


@pytest.mark.parametrize(("wrapped_before", "passes"), [(False, 1), (True, 1), (False, 2)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(keras_pools, wrapped_before, passes):
    first, second = keras_pools(2).run(train_with_overflow, wrapped_before, passes, init=True)
    assert first == second
    skipped, after, scale, applied = first
    assert scale == 512.0
    assert applied == 5
    assert after != skipped


def compile_under_policy() -> tuple[str, bool, list[float]]:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = models.make_model(1)
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
        history = models.fit(model, *hvd.shard(*models.make_data()), 4, epochs=3)
        return type(model.optimizer).__name__, len(set(_gather(models.bits(model)))) == 1, history.history["loss"]
    finally:
        keras.config.set_dtype_policy("float32")


def _gather(value: Any) -> list[Any]:
    return hvd.allgather_object(value)


def test_the_loss_scale_that_compile_adds(keras_pools):
    for name, equal, losses in keras_pools(2).run(compile_under_policy, init=True):
        assert name == "LossScaleOptimizer"
        assert equal
        assert losses[-1] < losses[0]
