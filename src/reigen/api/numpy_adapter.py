"""NumPy arrays as tensors, and the adapter of any framework's tensor."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

import numpy as np

from reigen.api.adapter import Array, TensorAdapter
from reigen.api.frameworks import FRAMEWORKS
from reigen.errors import ArgumentError, UnsupportedTypeError
from reigen.types import DTYPES, DType


class NumpyAdapter(TensorAdapter[Array]):
    """A :class:`~reigen.api.adapter.TensorAdapter` for NumPy arrays, seen as themselves."""

    def as_tensor(self, value: Any, *, writable: bool = False) -> Array:
        if not writable:
            return np.asarray(value)
        if not isinstance(value, np.ndarray):
            raise UnsupportedTypeError(f"writing in place needs a NumPy array, got {type(value).__name__}")
        if not value.flags.writeable:
            raise ArgumentError("the array to write to is read-only: give one that may be written, such as its copy()")
        return value

    def dtype(self, tensor: Array) -> DType:
        found = _DTYPE_BY_STORAGE.get(tensor.dtype)
        if found is None:
            supported = ", ".join(sorted(each.name for each in _DTYPE_BY_STORAGE.values()))
            raise UnsupportedTypeError(f"Tensor type {tensor.dtype} is not supported. Supported: {supported}.")
        return found

    def array(self, tensor: Array) -> tuple[Array, bool]:
        if tensor.flags.c_contiguous:
            return tensor, True
        contiguous = np.ascontiguousarray(tensor).reshape(tensor.shape)
        return contiguous, False

    def wrap(self, array: Array, like: Array | None) -> Array:
        return array

    def write(self, tensor: Array, array: Array) -> None:
        tensor[...] = array


def get_adapter(value: object) -> TensorAdapter[Any]:
    """Return the adapter of the framework that ``value`` is a tensor of; NumPy's for everything else.

    No framework is imported for it: a caller with a tensor of one has imported that.
    """
    kind: Any = type(value)  # a type checker takes it for something without a hash
    framework = _find_framework(kind)
    return _NUMPY if framework is None else _load_adapter(framework)


_NUMPY = NumpyAdapter()
#: NumPy has no bfloat16, and no other byte order than the host's can be communicated.
_DTYPE_BY_STORAGE: dict[np.dtype[Any], DType] = {
    dtype.storage: dtype for name, dtype in DTYPES.items() if dtype.storage.name == name
}


@functools.lru_cache(maxsize=64)
def _find_framework(kind: Any) -> str | None:
    packages = {each.__module__.partition(".")[0].removesuffix("lib") for each in kind.__mro__}  # jaxlib is JAX's
    return next((name for name in FRAMEWORKS if name in packages), None)


@functools.cache
def _load_adapter(framework: str) -> TensorAdapter[Any]:
    # by name: its package lies above this one, and is there exactly if a caller has a tensor of the framework
    adapter: TensorAdapter[Any] = getattr(import_module(f"reigen.{framework}.adapter"), FRAMEWORKS[framework])()
    return adapter
