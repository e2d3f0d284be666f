"""NDArrays, seen as NumPy arrays."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

from reigen.api.adapter import Array, TensorAdapter
from reigen.errors import ArgumentError, UnsupportedTypeError
from reigen.mxnet import arrays
from reigen.types import DType


class MXNetAdapter(TensorAdapter[Any]):
    """:class:`~reigen.api.adapter.TensorAdapter` for dense NDArrays, also those of ``mx.np``.

    It waits for MXNet's pending writes to one. Those of a GPU are copied to the host and back.
    """

    def as_tensor(self, value: Any, *, writable: bool = False) -> Any:
        """Return the value itself, if it is a dense NDArray."""
        if not arrays.is_ndarray(value):
            raise UnsupportedTypeError(f"an NDArray of MXNet is needed, got {type(value).__name__}")
        if arrays.is_sparse(value):
            raise UnsupportedTypeError(f"an NDArray of storage type {value.stype} is not supported; use tostype()")
        if writable and not value.writable:
            raise ArgumentError("an in-place collective needs an NDArray that may be written, and this one is not")
        return value

    def dtype(self, tensor: Any) -> DType:
        """Return the element type."""
        return arrays.dtype_of(tensor)

    def device(self, tensor: Any) -> str:
        """Return ``cpu`` or ``gpu``."""
        return "cpu" if arrays.on_host(tensor) else str(tensor.context.device_type)

    def array(self, tensor: Any) -> tuple[Array, bool]:
        if arrays.on_host(tensor):
            return arrays.view(tensor), True
        copied = tensor.asnumpy()
        return np.ascontiguousarray(copied).view(arrays.dtype_of(tensor).storage).reshape(tensor.shape), False

    def wrap(self, array: Array, like: Any) -> Any:
        if like is None:
            return mx.nd.array(array, dtype=array.dtype)
        new = empty_like(like, array.shape)
        self.write(new, array)
        return new

    def write(self, tensor: Any, array: Array) -> None:
        if arrays.on_host(tensor):
            arrays.view(tensor)[...] = array
        else:
            tensor[:] = self.wrap(array, empty_like(tensor, array.shape, mx.cpu()))


class EngineAdapter(MXNetAdapter):
    """Adapter in an operation that MXNet's engine has started, on its own arrays: without waiting."""

    def array(self, tensor: Any) -> tuple[Array, bool]:
        return arrays.view_in_engine(tensor), True


def empty_like(like: Any, shape: tuple[int, ...] | None = None, context: Any = None) -> Any:
    """Make an NDArray of the type and kind (``mx.nd``, ``mx.np``) of ``like``; by default its shape and context."""
    make = mx.np.empty if isinstance(like, mx.np.ndarray) else mx.nd.empty
    return make(like.shape if shape is None else shape, dtype=like.dtype, ctx=context or like.context)
