"""Collectives of values, which give NumPy arrays, and of the variables of a session: for the legacy Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from numpy.typing import NDArray

from reigen.api.operations import Average
from reigen.tensorflow import functions, ops
from reigen.tensorflow.compression import Compression

Value = NDArray[Any]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Value:
    """Reduce a value over all ranks; see :func:`reigen.tensorflow.allreduce`.

    Args:
        value: a tensor, a variable, an array or a number; of the same shape and dtype on every rank.
        name: matches the ranks' calls.
        average: deprecated; use ``op``.
        prescale_factor: the value is multiplied by it before.
        postscale_factor: the result is multiplied by it.
        op: Average (also if None), Sum, Min, Max, Product or Adasum.
        compression: the element type in which it travels.
    """
    options = {"compression": compression, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return _evaluate(lambda: ops.allreduce(value, average=average, op=op, name=name, **options))


def allgather(value: Any, name: str | None = None) -> Value:
    """All ranks' values, concatenated along dimension 0, in rank order; ``name`` matches the ranks' calls."""
    return _evaluate(lambda: ops.allgather(value, name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Value:
    """The root's value, on every rank; ``name`` matches the ranks' calls."""
    return _evaluate(lambda: ops.broadcast(value, root_rank, name=name))


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Value:
    """Reduce over all ranks, and return this rank's rows; ``name`` matches the ranks' calls."""
    return _evaluate(lambda: ops.reducescatter(value, op=op, name=name))


def broadcast_global_variables(root_rank: int) -> None:
    """Overwrite all variables of Keras's session with those of the root.

    Raises:
        RuntimeError: eager execution is on, so that there is no session; use the callback, or `broadcast_variables`.
    """
    operation = functions.broadcast_global_variables(root_rank)
    tf.compat.v1.keras.backend.get_session().run(operation)


def _evaluate(function: Any) -> Value:
    with tf.init_scope():
        session = None if tf.executing_eagerly() else tf.compat.v1.keras.backend.get_session()
        found: Value = function().numpy() if session is None else session.run(function())
        return found
