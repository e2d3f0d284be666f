"""SyncBatchNormalization is one layer over the concatenated batch: compared with Keras's own, in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import reigen.tensorflow as hvd
from tests.tensorflow.tf_training import assert_identical_everywhere

CHANNELS = 4
EXACT = {"rtol": 1e-9, "atol": 1e-9}
#: rows of each rank
UNEVEN = {2: [(3, 3), (1, 6), (5, 0)], 3: [(2, 2, 2), (0, 3, 0)]}


def compare(rows: tuple[int, ...], tail: tuple[int, ...], how: str, **options: Any) -> None:
    random = np.random.default_rng(len(tail))
    shape = (sum(rows), *tail, CHANNELS)
    layer = hvd.SyncBatchNormalization(dtype="float64", momentum=0.7, **options)
    truth = tf.keras.layers.BatchNormalization(dtype="float64", momentum=0.7, **options)
    for each in (layer, truth):
        each.build((None, *tail, CHANNELS))
        each.set_weights([np.arange(1.0, CHANNELS + 1) + index for index in range(4)])

    def run(layer: Any, x: Any, dy: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return y, tape.gradient(y, [x, *layer.trainable_weights], output_gradients=dy)

    own_run = run if how == "eager" else tf.function(run)
    for _ in range(2):
        x, dy = random.standard_normal(shape) * 0.3 + 10 * np.arange(CHANNELS), random.standard_normal(shape)
        begin, end = sum(rows[: hvd.rank()]), sum(rows[: hvd.rank() + 1])
        expected, (dx, *of_weights) = run(truth, tf.constant(x), tf.constant(dy))
        y, (own_dx, *own_of_weights) = own_run(layer, tf.constant(x[begin:end]), tf.constant(dy[begin:end]))
        np.testing.assert_allclose(y, expected[begin:end], **EXACT)
        np.testing.assert_allclose(own_dx, dx[begin:end], **EXACT)
        for mine, theirs in zip(own_of_weights, of_weights, strict=True):
            np.testing.assert_allclose(hvd.allreduce(mine, op=hvd.Sum), theirs, **EXACT)
    for mine, theirs in zip(layer.get_weights(), truth.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, **EXACT)
    assert_identical_everywhere(layer.get_weights())
    np.testing.assert_allclose(layer(x, training=False), truth(x, training=False), **EXACT)


def every_shape(size: int, how: str) -> None:
    for rows in UNEVEN[size]:
        compare(rows, (), how)
    compare(UNEVEN[size][0], (3, 2), how)
    compare(UNEVEN[size][-1], (5,), how, epsilon=0.1, name="sync")


@pytest.mark.parametrize("how", ["eager", "function"])
@pytest.mark.parametrize("size", [2, 3])
def test_it_is_a_layer_over_the_whole_batch(rank_pool, size, how):
    rank_pool(size).run(every_shape, size, how, init=True)


def in_a_model() -> None:
    """In fit, with two such layers; saved, and loaded."""
    with pytest.raises(ValueError, match="fused"):
        hvd.SyncBatchNormalization(fused=True)
    layers = [tf.keras.layers.Dense(4), hvd.SyncBatchNormalization(), hvd.SyncBatchNormalization(axis=1)]
    model = tf.keras.Sequential(layers)
    model.build((None, 3))
    hvd.broadcast_variables(model.variables, 0)
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01))
    model.compile(optimizer=optimizer, loss=tf.keras.losses.MeanSquaredError())
    x = np.random.default_rng(hvd.rank()).standard_normal((8, 3)).astype(np.float32)
    model.fit(x, x @ np.ones((3, 4), np.float32), batch_size=4, epochs=2, verbose=0)
    assert_identical_everywhere(model.get_weights())
    again = type(layers[1]).from_config(layers[1].get_config())
    assert again.get_config() == layers[1].get_config()


def test_it_trains_in_a_model(rank_pool):
    rank_pool(2).run(in_a_model, init=True)


def test_it_works_with_the_legacy_keras(legacy_pool):
    legacy_pool.run(every_shape, 2, "function", init=True)
    legacy_pool.run(in_a_model, init=True)
