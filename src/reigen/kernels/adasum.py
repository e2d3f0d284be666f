"""Adasum's arithmetic on one block: vectors of 2^k ranks, combined in adjacent pairs, level by level.

A pair (a, b) becomes ``(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b``: the sum where the two are orthogonal, the mean
where they are parallel; in between, their common part is not counted twice. Source: Maleki et al. 2021, "Scaling
Distributed Training with Adaptive Summation", arXiv 2006.02924.

Everything is float64, whatever the tensor's type: products of float32 can neither overflow nor vanish there, nor can
a factor, which is about |b| / |a|. Only the result is rounded to the tensor's type. Callers turn NumPy's warnings about
infinity and NaN off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.errors import UnsupportedError, UnsupportedTypeError
from reigen.kernels import half_precision
from reigen.types import DType

Vectors = NDArray[np.float64]

#: Limit of elements in a dot product: from 10,000 on OpenBLAS uses as many threads as it finds, and bits differ.
MAX_COLUMNS = 1 << 13

_TINY = float(np.finfo(np.float64).tiny)


def check_adasum(dtype: DType, size: int) -> None:
    """Check that Adasum is defined for an element type and ``size`` ranks.

    Raises:
        UnsupportedTypeError: not a floating-point type.
        UnsupportedError: the number of ranks is not a power of two.
    """
    if not dtype.is_floating:
        raise UnsupportedTypeError(
            f"Tensor type {dtype.name} is not supported by op=Adasum; use float16, bfloat16, float32 or float64"
        )
    if size < 1 or size & (size - 1):
        raise UnsupportedError(
            f"op=Adasum combines ranks in pairs of pairs and needs 2, 4, 8, ... of them, not {size}; "
            "start another number of ranks or use op=Average"
        )


def pair_products(vectors: Vectors) -> Vectors:
    """Return ``(a.b, |a|^2, |b|^2)`` of adjacent pairs, (m, 3), of vectors (2m, k), with k at most `MAX_COLUMNS`."""
    result = np.empty((len(vectors) // 2, 3))
    for row, a, b in zip(result, vectors[0::2], vectors[1::2], strict=True):
        row[:] = np.dot(a, b), np.dot(a, a), np.dot(b, b)
    return result


def pair_factors(summed: Vectors) -> Vectors:
    """Return the factors of a and b of each pair, (..., 2).

    A vector without length, or with so little that its square is lost in float64, counts as orthogonal to all others:
    a rank without data is neutral. Infinity and NaN in a tensor make all of it NaN, and so do float64 elements beyond
    1e154, whose squares are infinite. ``summed``, (..., 3), are the `pair_products` over all of the tensor.
    """
    dots, norms = summed[..., :1], summed[..., 1:]
    has_length = ~(norms < _TINY)  # true for NaN
    shares = np.divide(dots, 2.0 * norms, out=np.zeros_like(norms), where=has_length)
    result: Vectors = 1.0 - shares
    return result


def combine_pairs(vectors: Vectors, levels: Sequence[Vectors]) -> Vectors:
    """Combine vectors (n, k), used up, by the levels whose `pair_factors` are known: (n/2, 2), (n/4, 2), ...

    Returns (n / 2^len(levels), k), a view of ``vectors``. An element's bits depend on its own column alone.
    """
    for level in levels:
        a, b = vectors[0::2], vectors[1::2]
        np.multiply(a, level[:, :1], out=a)
        np.multiply(b, level[:, 1:], out=b)
        np.add(a, b, out=a)
        vectors = a
    return vectors


def load_float64(block: NDArray[Any], dtype: DType) -> Vectors:
    """Copy ``block`` (any shape, storage type of ``dtype``) as float64 of the same shape, exactly."""
    numbers = block
    if dtype.name == "bfloat16":
        numbers = np.empty(block.shape, np.float32)
        half_precision.widen_bfloat16(block, numbers)
    return numbers.astype(np.float64, order="C")


def store_float64(values: Vectors, dtype: DType) -> NDArray[Any]:
    """Convert ``values`` to the storage type of ``dtype``, in their shape. Halves are rounded to float32 first."""
    if dtype.itemsize > 2:
        return values.astype(dtype.storage)
    out = np.empty(values.shape, dtype.storage)
    _, narrow = half_precision.converters(dtype.name)
    narrow(values.astype(np.float32), out)
    return out
