"""Training loops of users' own: mixed precision, embeddings, adversaries in one function, a rank that dies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import reigen.tensorflow as hvd
from tests.tensorflow.tf_training import assert_identical_everywhere, mine


def mixed_precision(how: str) -> None:
    """The gradients of one rank overflow: the sums do, and every rank skips the step and halves its scale."""
    keras = tf.keras
    model = keras.Sequential([keras.layers.Dense(4, dtype="mixed_float16"), keras.layers.Dense(1, dtype="float32")])
    model.build((None, 3))
    hvd.broadcast_variables(model.variables, 0)
    optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_mean(tf.square(model(x) - y)))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = step if how == "eager" else tf.function(step)
    before = [each.numpy() for each in model.variables]
    x = tf.ones((4, 3)) * (1 + hvd.rank())
    run(x, tf.fill((4, 1), 1e30 if hvd.rank() else 1.0))
    for one, other in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(one.numpy(), other)
    assert float(optimizer.dynamic_scale) == 512.0
    run(x, tf.ones((4, 1)))
    assert (model.variables[0].numpy() != before[0]).any()
    assert_identical_everywhere([each.numpy() for each in [*model.variables, *optimizer.variables]])


@pytest.mark.parametrize("how", ["eager", "function"])
def test_ranks_skip_a_step_together(rank_pool, how):
    rank_pool(2).run(mixed_precision, how, init=True)


def embedding() -> None:
    """Gradients of a layer's rows are gathered; the other layers' are one sum; the optimizer adds repeated rows up."""
    keras = tf.keras
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Embedding(9, 4), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.build((None, 2))
    start = model.get_weights()
    ids = np.random.default_rng(0).integers(0, 9, (8, 2))

    def step(model: Any, optimizer: Any, x: Any, wrap: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - 1.0))
        gradients = wrap(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return isinstance(gradients[0], tf.IndexedSlices)

    run = tf.function(step)
    found = []
    for x, wrap in ((mine(ids), hvd.DistributedGradientTape), (ids, lambda tape: tape)):
        model.set_weights(start)
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        for _ in range(3):
            assert run(model, optimizer, tf.constant(x), wrap)
        found.append(model.get_weights())
    assert_identical_everywhere(found[0])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_rows_of_an_embedding(rank_pool):
    rank_pool(2).run(embedding, init=True)


def adversaries() -> None:
    """Two networks trained in one function, whose layers are numbered otherwise on another rank."""
    keras = tf.keras
    if hvd.rank():
        keras.Sequential([keras.layers.Dense(1)]).build((None, 2))  # takes the names that rank 0's have
    first, second = (keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)]) for _ in range(2))
    for model in (first, second):
        model.build((None, 2))
        hvd.broadcast_variables(model.variables, 0)
    assert first.variables[0].path != second.variables[0].path

    @tf.function
    def step(x: Any) -> None:
        with tf.GradientTape() as one, tf.GradientTape() as two:
            made = first(x)
            loss = tf.reduce_mean(tf.square(second(made)))
        for tape, model, sign in ((one, first, 1.0), (two, second, -1.0)):
            gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
            for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
                variable.assign_sub(sign * 0.1 * gradient)

    for number in range(3):
        step(tf.constant(np.random.default_rng([number, hvd.rank()]).standard_normal((4, 2)), tf.float32))
    assert_identical_everywhere([*first.get_weights(), *second.get_weights()])


def test_two_networks_in_one_function(rank_pool):
    rank_pool(2).run(adversaries, init=True)
