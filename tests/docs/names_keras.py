"""What the pages about Keras leave to their reader, and what their programs must have done."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import reigen.keras as hvd

Names = dict[str, Any]
IMAGES = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
LABELS = IMAGES.sum(1, keepdims=True)


def make_model() -> Any:
    keras.utils.set_random_seed(hvd.rank())
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])


def _check_alike(model: Any) -> None:
    weights = model.get_weights()[0]
    assert np.array_equal(hvd.allgather(weights[None]), [weights] * hvd.size())


def given_keras() -> Names:
    return {"make_model": make_model, "x": IMAGES, "y": LABELS}


def check_keras(names: Names) -> None:
    assert len(names["x"]) == len(IMAGES) // 2
    _check_alike(names["model"])


def given_elastic() -> Names:
    hvd.init()
    model = make_model()

    def gradients_of(images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(images) - labels))
        return tape.gradient(loss, model.trainable_variables)

    data = hvd.elastic.Cursor(len(IMAGES), global_batch=64, seed=1)
    names = {"keras": keras, "model": model, "data": data, "gradients_of": gradients_of}
    return {**names, "images": IMAGES, "labels": LABELS}


def check_elastic(names: Names) -> None:
    assert names["step"].is_last
    _check_alike(names["model"])
