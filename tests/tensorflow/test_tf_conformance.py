"""The adapter of eager tensors passes the public suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl.api import is_autograph_artifact

import reigen.tensorflow as hvd
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


def test_a_result_is_not_copied() -> None:
    memory = np.empty(4096 + 64, np.uint8)
    array = memory[-memory.ctypes.data % 64 :][:4096].view(np.float32)
    tensor = TensorFlowAdapter().wrap(array, None)
    assert tensor._numpy_internal().ctypes.data == array.ctypes.data


def test_autograph_does_not_rewrite_a_collective() -> None:
    assert is_autograph_artifact(hvd.allreduce)
