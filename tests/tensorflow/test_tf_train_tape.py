"""DistributedGradientTape: on every rank the gradients of the whole batch, in eager code and in functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import reigen.tensorflow as hvd
from reigen.errors import ArgumentError
from tests.tensorflow.tf_training import (
    Net,
    alone,
    assert_close,
    assert_identical_everywhere,
    batches,
    loss_of,
    mine,
)

STEPS = 4


def train(how: str, **options: Any) -> None:
    model = Net()

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        tape = hvd.DistributedGradientTape(tape, **options)
        gradients = tape.gradient(loss, model.all)
        assert gradients[3] is None
        assert isinstance(gradients[0], tf.IndexedSlices) is not options.get("sparse_as_dense", False)
        for variable, gradient in zip(model.all, gradients, strict=True):
            if gradient is not None:
                variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    run = step if how == "eager" else tf.function(step)
    for x, y in batches(STEPS):
        run(tf.constant(mine(x)), tf.constant(mine(y)))
    assert_identical_everywhere(model.all)
    assert_close(model.all, alone(STEPS).all)


@pytest.mark.parametrize("how", ["eager", "function"])
@pytest.mark.parametrize("size", [2, 3])
def test_training_is_that_of_one_process_with_the_whole_batch(rank_pool, size, how):
    rank_pool(size).run(train, how, init=True)


def with_options(how: str) -> None:
    train(how, sparse_as_dense=True)
    train(how, gradient_predivide_factor=2.0, sparse_as_dense=True)
    train(how, groups=2)
    train(how, groups=1000, sparse_as_dense=True)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        train(how, num_groups=1)


@pytest.mark.parametrize("how", ["eager", "function"])
def test_options_change_nothing_of_the_result(rank_pool, how):
    rank_pool(2).run(with_options, how, init=True)
