"""The adapter of eager tensors passes the public suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from reigen.tensorflow.adapter import TensorFlowAdapter
from reigen.testing import check_adapter


def differentiate(
    function: Callable[[list[Any]], list[Any]], tensors: list[Any], weights: list[Any]
) -> list[tf.Tensor | None]:
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        results = function(tensors)
    return tape.gradient(results, tensors, output_gradients=weights)


@pytest.mark.parametrize("size", [1, 3])
def test_tensors(rank_pool, size):
    assert len(check_adapter(TensorFlowAdapter, rank_pool(size), differentiate=differentiate)) == 10
