"""NumPy arrays as tensors, and the adapter of whatever tensor somebody passes."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import numpy as np

from reigen.errors import ArgumentError, UnsupportedTypeError
from reigen.frontends.adapter import Array, TensorAdapter
from reigen.types import DTYPES, DType


class NumpyAdapter:
    """A :class:`~reigen.frontends.adapter.TensorAdapter` for NumPy arrays, seen as themselves."""

    lender = None

    def given(self, value: Any, *, writable: bool = False) -> Array:
        """See `TensorAdapter.given`."""
        if not writable:
            return np.asarray(value)
        if not isinstance(value, np.ndarray):
            raise UnsupportedTypeError(f"an in-place collective needs a NumPy array, got {type(value).__name__}")
        if not value.flags.writeable:
            raise ArgumentError("an in-place collective needs an array that may be written, and this one is read-only")
        return value

    def dtype(self, tensor: Array) -> DType:
        """See `TensorAdapter.dtype`."""
        found = _DTYPE_OF.get(tensor.dtype)
        if found is None:
            supported = ", ".join(sorted(each.name for each in _DTYPE_OF.values()))
            raise UnsupportedTypeError(f"Tensor type {tensor.dtype} is not supported. Supported: {supported}.")
        return found

    def device(self, tensor: Array) -> str:
        """See `TensorAdapter.device`."""
        return "cpu"

    def array(self, tensor: Array) -> tuple[Array, bool]:
        """See `TensorAdapter.array`."""
        contiguous = np.ascontiguousarray(tensor).reshape(tensor.shape)
        return contiguous, np.may_share_memory(contiguous, tensor)

    def wrap(self, array: Array, like: Array) -> Array:
        """See `TensorAdapter.wrap`."""
        return array

    def write(self, tensor: Array, array: Array) -> None:
        """See `TensorAdapter.write`."""
        tensor[...] = array

    def modified(self, tensor: Array) -> None:
        """See `TensorAdapter.modified`."""


def adapter_of(value: object) -> TensorAdapter[Any]:
    """The adapter of the framework that ``value`` is a tensor of; NumPy's for what is none's.

    No framework is imported for it: whoever has a tensor of one has imported that.
    """
    kind: Any = type(value)  # a type checker takes it for something without a hash
    return _torch_adapter() if _is_torchs(kind) else _NUMPY


_NUMPY = NumpyAdapter()
#: NumPy has no bfloat16, and no other byte order than the machine's can be communicated.
_DTYPE_OF: dict[np.dtype[Any], DType] = {
    dtype.storage: dtype for name, dtype in DTYPES.items() if dtype.storage.name == name
}


@functools.lru_cache(maxsize=64)
def _is_torchs(kind: Any) -> bool:
    return any(each.__module__.partition(".")[0] == "torch" for each in kind.__mro__)


@functools.cache
def _torch_adapter() -> TensorAdapter[Any]:
    # by name: torch's room lies above this one, and is there exactly if somebody has a tensor of torch
    adapter: TensorAdapter[Any] = import_module("reigen.torch.adapter").TorchAdapter()
    return adapter
