"""What the page about TensorFlow leaves to its reader, and what its program must have done."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import reigen.tensorflow as hvd

Names = dict[str, Any]


def given_tensorflow() -> Names:
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    names = {"tf": tf, "model": model, "optimizer": keras.optimizers.SGD(0.1)}
    return {**names, "compute_loss": lambda made, wanted: tf.reduce_mean(tf.square(made - wanted))}


def check_tensorflow(names: Names) -> None:
    x = np.random.default_rng(hvd.rank()).normal(size=(32, 4)).astype(np.float32)
    before = names["model"].get_weights()[0]
    names["step"](x, x.sum(1, keepdims=True))
    weights = names["model"].get_weights()[0]
    assert not np.array_equal(weights, before)
    assert np.array_equal(hvd.allgather(weights[None]), [weights] * hvd.size())
