"""NDArrays as NumPy arrays over the same memory.

MXNet runs everything later, on threads of its own: the content of an NDArray is complete when its pending writes are
done. :func:`view` waits for them; :func:`view_in_engine` is for an operation in MXNet's engine, which is not started
before.

oneDNN (MKL-DNN) keeps outputs of convolutions, and the weights it predicted with, in layouts of its own, which have no
such memory. :func:`view` has them brought into the ordinary one, as MXNet does when they are read.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, check_call
from numpy.typing import NDArray

from reigen.errors import UnsupportedTypeError
from reigen.types import DTYPES, DType

_HOST_CONTEXTS = {"cpu", "cpu_pinned", "cpu_shared"}


class _ArrayMemory:
    """Memory of an NDArray, which lives as long as this does."""

    def __init__(self, owner: Any, address: int, shape: tuple[int, ...], dtype: DType) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": dtype.storage.str,
            "version": 3,
        }


def is_ndarray(value: object) -> bool:
    """Return whether it is an NDArray of ``mx.nd`` or an array of ``mx.np``; also a sparse one."""
    return isinstance(value, mx.nd.NDArray)


def is_sparse(array: Any) -> bool:
    """Return whether an NDArray is sparse: row_sparse or csr."""
    return bool(array.stype != "default")


def on_host(array: Any) -> bool:
    """Return whether an NDArray lies in memory that the processor can reach."""
    return array.context.device_type in _HOST_CONTEXTS


def dtype_of(array: Any) -> DType:
    """Return the element type of an NDArray without waiting; raises UnsupportedTypeError."""
    return _dtype_by_name(array.dtype)


@functools.cache
def _dtype_by_name(given: Any) -> DType:
    dtype = np.dtype(given)
    name = dtype.names[0] if dtype.names else dtype.name  # MXNet's bfloat16 is a record with one field of that name
    if name not in DTYPES:
        raise UnsupportedTypeError(f"Tensor type {name} is not supported. Supported: {', '.join(sorted(DTYPES))}.")
    return DTYPES[name]


def view(array: Any) -> NDArray[Any]:
    """Return a NumPy array over the memory of a dense NDArray in host memory, after its pending writes.

    Args:
        array: of any shape, of an element type of :data:`reigen.types.DTYPES`; bfloat16 is seen as uint16.

    Returns:
        C-contiguous and writable, of the same shape. It keeps the memory alive. MXNet does not know of its use: the
        caller must have waited for the NDArray's readers before he writes.

    Raises:
        UnsupportedTypeError: the element type cannot be communicated, or it is sparse or not in host memory.
        MXNetError: an operation that was to write it has failed.
    """
    _check_viewable(array)
    array.wait_to_read()
    pointer = ctypes.c_void_p()
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return _array_at(array, pointer.value, array.shape, dtype_of(array))


def view_in_engine(array: Any) -> NDArray[Any]:
    """Return a `view` without waiting: for an operation that MXNet's engine has started, on one of its arrays.

    Raises:
        UnsupportedTypeError: as there; or it is in a layout of oneDNN: see :func:`reorder`.
    """
    _check_viewable(array)
    return known_view_in_engine(array, array.shape, dtype_of(array))


def known_view_in_engine(array: Any, shape: tuple[int, ...], dtype: DType) -> NDArray[Any]:
    """Return the `view_in_engine` of a dense NDArray in host memory of known shape and type, without asking."""
    return _array_at(array, address_in_engine(array), shape, dtype)


def address_in_engine(array: Any) -> int | None:
    """Return the address of the memory of `view_in_engine`."""
    pointer = ctypes.c_void_p()
    # the one question about the layout that does not change it, which would wait for the operation itself
    if _LIB.MXNDArrayToDLPack(array.handle, ctypes.byref(pointer)) == 0:
        address = ctypes.c_void_p.from_address(pointer.value or 0).value  # the first field of DLManagedTensor
        check_call(_LIB.MXNDArrayCallDLPackDeleter(pointer))
        return address
    if b"MKLDNN" in (ctypes.c_char_p(_LIB.MXGetLastError()).value or b""):
        raise UnsupportedTypeError("the array is in a layout of oneDNN's own; give its copy()")
    check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    return pointer.value


def reorder(array: Any) -> None:
    """Have MXNet's engine bring an NDArray into the ordinary layout, after its pending writes; does not wait."""
    if on_host(array) and not is_sparse(array):
        _LIB._ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv(array.handle)  # NDArray::Reorder2DefaultAsync() const


def reorder_in_engine(array: Any) -> None:
    """Bring a dense NDArray in host memory into the ordinary layout at once: for an operation that writes it."""
    # NDArray::Chunk::Reorder2Default(); an MXNet without oneDNN has none, and no such layouts
    now = getattr(_LIB, "_ZN5mxnet7NDArray5Chunk15Reorder2DefaultEv", None)
    if now is not None:
        now(ctypes.c_void_p.from_address(array.handle.value))  # the first field of an NDArray


def _array_at(array: Any, address: int | None, shape: tuple[int, ...], dtype: DType) -> NDArray[Any]:
    if not address or 0 in shape:
        return np.empty(shape, dtype.storage)
    return np.asarray(_ArrayMemory(array, address, shape, dtype))


def _check_viewable(array: Any) -> None:
    if is_sparse(array):
        raise UnsupportedTypeError(f"an NDArray of storage type {array.stype} is not supported; use tostype('default')")
    if not on_host(array):
        raise UnsupportedTypeError(f"an NDArray on {array.context} has no memory here; copy it to mx.cpu()")
