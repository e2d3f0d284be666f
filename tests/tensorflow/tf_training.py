"""Models and data that the tests of training share, and the independent truth: one process, the whole batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import reigen.tensorflow as hvd

#: Everything is float64: what is equal up to the order of sums is equal to ten digits.
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
#: exact as float32, in which optimizers of version 1 keep it
LR = 0.125
ROWS = 12  # divisible by 1, 2, 3 and 4 ranks


class Net(tf.Module):
    """Two dense layers and a table of rows."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        random = np.random.default_rng(seed)
        self.table = tf.Variable(random.standard_normal((7, 4)), name="table")
        self.inner = tf.Variable(random.standard_normal((4, 5)), name="inner")
        self.outer = tf.Variable(random.standard_normal((5, 2)), name="outer")
        self.unused = tf.Variable(random.standard_normal((3,)), name="unused")

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(tf.gather(self.table, x) @ self.inner) @ self.outer

    @property
    def dense(self) -> list[tf.Variable]:
        return [self.inner, self.outer]

    @property
    def all(self) -> list[tf.Variable]:
        return [self.table, self.inner, self.outer, self.unused]


def batches(steps: int, seed: int = 1) -> Iterator[tuple[Any, Any]]:
    random = np.random.default_rng(seed)
    for _ in range(steps):
        yield random.integers(0, 7, ROWS).astype(np.int32), random.standard_normal((ROWS, 2))


def mine(rows: Any) -> Any:
    """This rank's rows."""
    return np.array_split(rows, hvd.size())[hvd.rank()]


def loss_of(model: Net, x: Any, y: Any) -> tf.Tensor:
    return tf.reduce_mean(tf.square(model(x) - y))


def alone(steps: int, lr: float = LR) -> Net:
    """The truth: gradient descent of one process on the whole batches."""
    model = Net()
    for x, y in batches(steps):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        for variable, gradient in zip(model.all, tape.gradient(loss, model.all), strict=True):
            if gradient is not None:
                variable.assign_sub(lr * tf.convert_to_tensor(gradient))
    return model


def assert_close(variables: list[Any], expected: list[Any]) -> None:
    for one, other in zip(variables, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), **TOLERANCE)


def assert_identical_everywhere(values: list[Any]) -> None:
    """Every bit is the same on all ranks."""
    digest = hashlib.sha256(b"".join(np.asarray(value).tobytes() for value in values)).hexdigest()
    assert len(set(hvd.allgather_object(digest))) == 1
