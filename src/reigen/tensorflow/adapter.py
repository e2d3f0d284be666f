"""Eager tensors, seen as NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context, record
from tensorflow.python.framework import ops
from tensorflow.python.ops import gradients_util

from reigen.api.adapter import Array, TensorAdapter
from reigen.errors import ArgumentError, UnsupportedTypeError
from reigen.types import DTYPES, DType, dtype_named

#: The element types that travel, by TensorFlow's.
DTYPE_OF: dict[tf.DType, DType] = {tf.as_dtype(name): dtype for name, dtype in DTYPES.items()}
_BFLOAT16 = DTYPES["bfloat16"]
_BFLOAT16_ARRAY = np.dtype(tf.bfloat16.as_numpy_dtype)

#: Makes the gradients of a collective's tensors of those of its results, or the tangents of its results.
Rule = Callable[[Sequence[tf.Tensor]], list[tf.Tensor | None]]


def dtype_of(dtype: tf.DType) -> DType:
    """The element type that travels for TensorFlow's; raises UnsupportedTypeError if there is none."""
    return DTYPE_OF.get(dtype) or dtype_named(dtype.name)


def as_any_tensor(value: Any) -> tf.Tensor:
    """Return a user's argument as a tensor, of a graph or not.

    Raises:
        UnsupportedTypeError: it is none, or it is sparse.
    """
    if isinstance(value, tf.Tensor):
        return value
    if isinstance(value, tf.IndexedSlices | tf.SparseTensor | tf.RaggedTensor):
        raise UnsupportedTypeError(f"a dense tensor is needed, got {type(value).__name__}")
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise UnsupportedTypeError(f"a tensor is needed, got {type(value).__name__}: {error}") from None


def as_storage(array: Array) -> Array:
    """Return TensorFlow's array, or number, as one of the storage type."""
    array = np.asarray(array)
    return array.view(np.uint16) if array.dtype == _BFLOAT16_ARRAY else array


def from_storage(array: Array, dtype: DType) -> Array:
    """Undo `as_storage`."""
    return array.view(_BFLOAT16_ARRAY) if dtype is _BFLOAT16 else array


class TensorFlowAdapter(TensorAdapter[tf.Tensor]):
    """Eager tensors, variables, and what TensorFlow makes tensors of; collectives are recorded by its tapes.

    Tensors that are not in host memory are copied there and back.
    """

    is_immutable = True
    stop_gradient = "use tf.stop_gradient() on its input"

    def as_tensor(self, value: Any, *, writable: bool = False) -> tf.Tensor:
        if writable:
            raise ArgumentError("tensors of TensorFlow cannot be written; there is broadcast_() for variables")
        return as_any_tensor(value)

    def dtype(self, tensor: tf.Tensor) -> DType:
        return DTYPE_OF.get(tensor.dtype) or dtype_of(tensor.dtype)

    def device(self, tensor: tf.Tensor) -> str:
        """Return ``cpu``: whatever is elsewhere is staged through the host."""
        return "cpu"

    def array(self, tensor: tf.Tensor) -> tuple[Array, bool]:
        found = tensor._numpy_internal()  # tensor.numpy() is a copy
        return as_storage(found), isinstance(found, np.ndarray)

    def wrap(self, array: Array, like: tf.Tensor | None) -> tf.Tensor:
        here = context.context()
        here.ensure_initialized()
        # tf.constant() would copy the array first, lest somebody writes to it
        return ops.EagerTensor(array if like is None else from_storage(array, self.dtype(like)), here.device_name, None)

    def write(self, tensor: tf.Tensor, array: Array) -> None:
        raise AssertionError("a tensor of TensorFlow cannot be written")

    def needs_gradient(self, tensors: Sequence[tf.Tensor]) -> bool:
        """Return whether a tape, or an accumulator of forward mode, watches one of the tensors."""
        found = gradients_util.PossibleTapeGradientTypes(list(tensors))
        return bool(found != gradients_util.POSSIBLE_GRADIENT_TYPES_NONE)

    def differentiate_in_both_modes(
        self,
        forward: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
        backward: Rule,
        tangents: Rule,
        tensors: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        tensors = list(map(as_any_tensor, tensors))
        with record.stop_recording():
            results = forward(tensors)
        record_operation(results, tensors, lambda gradients: backward(list(map(_densify, gradients))), tangents)
        return results

    def zeros_like(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return zeros that depend on the tensor; its gradient is zeros, too."""
        return tf.where(False, tensor, tf.zeros_like(tensor))

    def take_rows(self, tensor: tf.Tensor, begin: int, shape: tuple[int, ...]) -> tf.Tensor:
        """Return rows of a tensor, by functions that can be differentiated."""
        count = shape[0] if shape else 1
        rows = tensor[begin : begin + count]
        missing = count - rows.shape[0]
        if missing:
            rows = tf.pad(rows, [[0, missing]] + [[0, 0]] * (len(rows.shape) - 1))
        return tf.reshape(rows, shape)


def record_operation(
    results: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor], backward: Rule, tangents: Rule
) -> None:
    """Tell TensorFlow's tapes and accumulators of forward mode how a collective is differentiated.

    Without ``tangents`` TensorFlow would transpose the gradient, which averages where the collective does not.
    """
    record.record_operation(
        "ReigenCollective",
        list(results),
        list(tensors),
        lambda *gradients: backward(gradients),
        lambda *given: tangents(given),
    )


def _densify(gradient: Any) -> Any:
    return gradient if gradient is None else tf.convert_to_tensor(gradient)
