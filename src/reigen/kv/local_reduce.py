"""Sums of one worker's own tensors of a key: of its devices, and of a key that is there several times in a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from reigen.api.adapter import Array
from reigen.kernels.reduce import BlockReducer, Reduction
from reigen.kv.values import RowSparse, TensorSpec, flatten_tensor, sum_duplicate_rows
from reigen.types import DType, ReduceOp

#: Elements that are added up at a time, so that they stay in the core's cache.
_BLOCK = 1 << 16


def sum_tensors(tensors: Sequence[Any], spec: TensorSpec) -> tuple[Array, bool]:
    """Return the sum of dense tensors, in their order.

    Returns:
        The flat elements in the storage type, shape (number of elements,), and whether that is memory of the user's.
    """
    if len(tensors) == 1:
        return flatten_tensor(tensors[0])
    out = np.empty(spec.num_elements, spec.dtype.storage)
    sum_arrays([flatten_tensor(tensor)[0] for tensor in tensors], spec.dtype, out)
    return out, False


def sum_arrays(arrays: Sequence[Array], dtype: DType, out: Array) -> None:
    """``out`` = the sum of flat arrays of its length, in their order; rounded once where the type is a half."""
    reducer = BlockReducer(Reduction(dtype, ReduceOp.SUM, len(arrays)))
    for begin in range(0, len(out), _BLOCK):
        reducer.reduce([array[begin : begin + _BLOCK] for array in arrays], out[begin : begin + _BLOCK])


def sum_row_sparse(tensors: Sequence[Any], spec: TensorSpec) -> tuple[Array, Array]:
    """Return the sum of tensors of which at least one is row-sparse.

    Returns:
        Indices of rows, ascending, and these rows: (number of rows, elements of a row) in the storage type.
    """
    parts = [extract_rows(tensor, spec) for tensor in tensors]
    if len(parts) == 1:
        return sum_duplicate_rows(*parts[0], spec.dtype)
    indices = np.concatenate([part[0] for part in parts])
    return sum_duplicate_rows(indices, np.concatenate([part[1] for part in parts]), spec.dtype)


def extract_rows(tensor: Any, spec: TensorSpec) -> tuple[Array, Array]:
    """Return indices and rows of a tensor as it is; all rows of a dense one."""
    if isinstance(tensor, RowSparse):
        rows = flatten_tensor(tensor.values)[0].reshape(len(tensor.indices), spec.row_length)
        return tensor.checked_indices(), rows
    return np.arange(spec.shape[0]), flatten_tensor(tensor)[0].reshape(spec.shape[0], spec.row_length)
