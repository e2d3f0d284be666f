"""Keys of a store for MXNet, and their rows: between row_sparse NDArrays and `reigen.kv.RowSparse`."""

from __future__ import annotations

import functools
from typing import Any

import mxnet as mx
import numpy as np
from numpy.typing import NDArray

from reigen.errors import ArgumentError
from reigen.kv.values import Key, RowSparse
from reigen.mxnet.arrays import dtype_of, is_ndarray, known_view_in_engine


class KVStoreKey:
    """Shape, type and order of a key; ``like`` is the NDArray that it was initialised with.

    Attributes:
        is_sparse: it holds rows that can be pushed and pulled one by one.
        order: an NDArray that all operations of the key claim to write: so MXNet's engine runs one after the other.
    """

    def __init__(self, like: Any, is_sparse: bool) -> None:
        self.is_sparse = is_sparse
        self.order = mx.nd.empty((1,), ctx=mx.cpu())
        self._shape, self._given_dtype, self._dtype = tuple(like.shape), like.dtype, dtype_of(like)

    @functools.cached_property
    def host_buffer(self) -> Any:
        """Make an NDArray in host memory for values that are pulled to GPUs."""
        return mx.nd.empty(self._shape, ctx=mx.cpu(), dtype=self._given_dtype)

    def rows(self) -> RowSparse:
        """Return an object without rows, to receive some."""
        return RowSparse(np.empty(0, np.int64), np.empty((0, *self._shape[1:]), self._given_dtype), self._shape)

    def check(self, key: Key, array: Any) -> None:
        """Raise ArgumentError unless an NDArray is like the key's."""
        if not is_ndarray(array):
            raise ArgumentError(f"key {key!r}: an NDArray is needed, got {type(array).__name__}")
        if tuple(array.shape) != self._shape or dtype_of(array) is not self._dtype:
            got = f"{dtype_of(array).name} {tuple(array.shape)}"
            raise ArgumentError(
                f"key {key!r} holds {self._dtype.name} {self._shape}, got {got}: shape and dtype stay those of init()"
            )

    def view(self, array: Any) -> NDArray[Any]:
        """Return a checked NDArray's memory, in an engine operation; UnsupportedTypeError for a layout of oneDNN's."""
        return known_view_in_engine(array, self._shape, self._dtype)


def get_rows(array: Any) -> RowSparse:
    """Return the rows of an NDArray; it waits for them. All of a dense one."""
    if array.stype == "row_sparse":
        return RowSparse(array.indices.asnumpy(), array.data.asnumpy(), array.shape)
    rows = array.asnumpy()
    return RowSparse(np.arange(len(rows)), rows, array.shape)


def set_rows(rows: RowSparse, out: Any) -> None:
    """Have a row_sparse NDArray hold these rows alone."""
    if len(rows.indices):
        made = mx.nd.sparse.row_sparse_array((rows.values, rows.indices), shape=out.shape, dtype=out.dtype)
    else:
        made = mx.nd.sparse.zeros("row_sparse", out.shape, dtype=out.dtype)
    made.copyto(out)
