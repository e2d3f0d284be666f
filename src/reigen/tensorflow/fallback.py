"""Collectives in graphs as functions of Python that TensorFlow calls, where there are no operations of our own.

Each holds one of TensorFlow's threads while it waits, and runs in this process alone: a SavedModel with one cannot be
loaded by another. They run in the order of the trace, which is the same on all ranks, so that no rank waits for what
another has not begun: in functions TensorFlow sees to that, and in other graphs each depends on the one before, so that
to run one is to run those before it, too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

from reigen.api.adapter import empty_like
from reigen.api.native_calls import NativeCall
from reigen.errors import ArgumentError, CollectiveError, UnsupportedError
from reigen.tensorflow.adapter import as_storage, from_storage
from reigen.tensorflow.errors import remember
from reigen.tensorflow.queries import decode
from reigen.types import dtype_named

#: The last operation of a graph that is no function's.
_last: weakref.WeakKeyDictionary[Any, tf.Operation] = weakref.WeakKeyDictionary()

Differentiate = Callable[[str, Sequence[tf.Tensor], Sequence[tf.Tensor], Sequence[Any]], list[Any]]


def emit(text: str, tensors: Sequence[tf.Tensor], differentiate: Differentiate) -> list[tf.Tensor]:
    """Add an operation to the graph; ``differentiate`` makes its gradients: `graph.gradients_of`."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def collective(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[Any]]]:
        outputs = tf.numpy_function(functools.partial(_run, text), inputs, [tensor.dtype for tensor in inputs])
        call = decode(text)
        for given, made in zip(inputs, outputs, strict=True):
            if not isinstance(call, NativeCall) or call.row.in_place:
                made.set_shape(given.shape)
            elif given.shape.rank is not None:
                made.set_shape([None, *given.shape[1:]])
        return outputs, lambda *gradients: differentiate(text, inputs, outputs, gradients)

    graph = tf.compat.v1.get_default_graph()
    if isinstance(graph, FuncGraph):
        return list(collective(*tensors))
    last = _last.get(graph)
    with tf.control_dependencies([] if last is None else [last]):
        made = list(collective(*[tf.identity(tensor) for tensor in tensors]))
    if graph._get_control_flow_context() is None:
        _last[graph] = made[0].op
    return made


def _run(text: str, *values: Any) -> list[Any]:
    try:
        call = decode(text)
        if isinstance(call, NativeCall):
            return _run_call(call, list(map(np.ascontiguousarray, values)), values)
        answer = call.answer()
        return [np.array(answer if isinstance(answer, int) else answer.wait().value, np.int32)]
    except CollectiveError as error:
        raise RuntimeError(remember(error)) from None
    except UnsupportedError as error:  # TensorFlow makes another error of a NotImplementedError
        raise ArgumentError(str(error)) from None


def _run_call(call: NativeCall, arrays: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    row, splits = call.row, None
    if row.returns_splits:
        splits = tuple(arrays[1].tolist()) or None
        arrays, values = arrays[:1], values[:1]
    dtypes = [dtype_named(array.dtype.name) for array in arrays]
    sources = [as_storage(array).reshape(np.shape(value)) for array, value in zip(arrays, values, strict=True)]
    targets = list(map(empty_like, sources)) if row.in_place else None
    result = call.start(sources, dtypes, targets, splits=splits, blocking=True).wait()
    outcomes = result.members if call.is_grouped else [result]
    made = [from_storage(each.on_host, dtype) for each, dtype in zip(outcomes, dtypes, strict=True)]
    return [*made, np.array(result.received_splits, np.int32)] if row.returns_splits else made
