"""Reference results of reductions, apart from Reigen's kernels: in float64, or in integers modulo 2**64.

The rules are those of docs/design.md: elements are combined in rank order; float32 and float64 in their own precision;
float16 and bfloat16 in float32, rounded once; integers wrap around; an average or a factor of integers is computed in
float64 and truncated toward zero.

That float64 is exact enough for a float32 step: the sum, product or quotient of two float32 numbers, rounded to float64
and then to float32, is the same as rounded to float32 at once, because 53 >= 2 * 24 + 2 (Figueroa, "When is double
rounding innocuous?", 1995).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.types import DType, ReduceOp

Array = NDArray[Any]
_Step = Callable[[Array, Array], Array]

_STEPS: dict[ReduceOp, _Step] = {
    ReduceOp.AVERAGE: lambda a, b: a + b,
    ReduceOp.SUM: lambda a, b: a + b,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: lambda a, b: a * b,
}


def expected_reduction(
    inputs: Sequence[Array], dtype: DType, op: ReduceOp, *, prescale: float = 1.0, postscale: float = 1.0
) -> Array:
    """Compute ``postscale * op(prescale * x)`` of one flat array per rank.

    Args:
        inputs: in rank order, of one length, in the dtype's storage type (bfloat16 as uint16).
        dtype: the element type.
        op: combines elements of the same index.
        prescale: factor of every input.
        postscale: factor of the result.

    Returns:
        A flat array in the storage type.
    """
    with np.errstate(all="ignore"):
        if dtype.is_floating:
            return _reduced_floats(inputs, dtype, op, prescale, postscale)
        if dtype.name == "bool":
            combine = np.any if op in (ReduceOp.SUM, ReduceOp.MAX) else np.all
            return np.asarray(combine(np.stack(inputs), axis=0))
        return _reduced_integers(inputs, dtype, op, prescale, postscale)


def expected_adasum(vectors: Sequence[Array]) -> Array:
    """Compute Adasum of 2^k flat float64 arrays (n,) as one (n,), by its definition: a tree of adjacent pairs."""
    if len(vectors) == 1:
        return vectors[0]
    middle = len(vectors) // 2
    a, b = expected_adasum(vectors[:middle]), expected_adasum(vectors[middle:])
    dot, aa, bb = np.dot(a, b), np.dot(a, a), np.dot(b, b)
    combined: Array = (1.0 - dot / (2.0 * aa) if aa else 1.0) * a + (1.0 - dot / (2.0 * bb) if bb else 1.0) * b
    return combined


def _reduced_floats(inputs: Sequence[Array], dtype: DType, op: ReduceOp, prescale: float, postscale: float) -> Array:
    working = np.float64 if dtype.name == "float64" else np.float32

    def rounded(values: Array) -> Array:
        return values.astype(working).astype(np.float64)

    values = [to_float64(array, dtype) for array in inputs]
    if prescale != 1.0:
        values = [to_float64(from_float64(rounded(value * float(working(prescale))), dtype), dtype) for value in values]
    total = values[0]
    for value in values[1:]:
        total = rounded(_STEPS[op](total, value))
    if op is ReduceOp.AVERAGE:
        total = rounded(total / len(inputs))
    if postscale != 1.0:
        total = rounded(total * float(working(postscale)))
    return from_float64(total, dtype)


def _reduced_integers(inputs: Sequence[Array], dtype: DType, op: ReduceOp, prescale: float, postscale: float) -> Array:
    values = list(inputs)
    if prescale != 1.0:
        values = [np.trunc(value.astype(np.float64) * prescale).astype(dtype.storage) for value in values]
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        total = values[0]
        for value in values[1:]:
            total = _STEPS[op](total, value)
    else:  # arithmetic modulo 2**64 is arithmetic modulo any smaller power of two as well
        modular = [value.astype(np.int64).view(np.uint64) for value in values]
        summed = modular[0]
        for value in modular[1:]:
            summed = _STEPS[op](summed, value)
        total = summed.astype(dtype.storage)
    if op is ReduceOp.AVERAGE or postscale != 1.0:
        divisor = len(inputs) if op is ReduceOp.AVERAGE else 1
        total = np.trunc(total.astype(np.float64) / divisor * postscale).astype(dtype.storage)
    return total


def to_float64(array: Array, dtype: DType) -> Array:
    """Convert floating-point elements to float64, exactly, in the same shape."""
    numbers = array
    if dtype.name == "bfloat16":
        numbers = np.left_shift(array, 16, dtype=np.uint32).view(np.float32)
    exact: Array = numbers.astype(np.float64)
    return exact


def from_float64(values: Array, dtype: DType) -> Array:
    """Round float64 (n,) to a floating-point type, ties to even; for bfloat16 normal numbers only."""
    if dtype.name != "bfloat16":
        native: Array = values.astype(dtype.storage)
        return native
    mantissa, exponent = np.frexp(values)
    nearest = np.ldexp(np.rint(np.ldexp(mantissa, 8)), exponent - 8)  # 8 bits of precision; rint: ties to even
    upper_half: Array = nearest.astype(np.float32).view(np.uint16).reshape(-1, 2)[:, int(sys.byteorder == "little")]
    return np.ascontiguousarray(upper_half)


def random_array(dtype: DType, count: int, seed: Sequence[int], *, small: bool = False) -> Array:
    """Make random elements, (count,), in the storage type of ``dtype``; the same for the same seed.

    Floating-point values are normally distributed, integers cover all of their type, or, if ``small``, are so small
    that sums over 13 ranks and factors up to 1.5 fit any type. ``seed`` is any integers >= 0.
    """
    random = np.random.default_rng(list(seed))
    if dtype.is_floating:
        numbers = random.standard_normal(count, np.float64 if dtype.name == "float64" else np.float32)
        if dtype.name == "bfloat16":  # the upper half of a float32
            return numbers.view(np.uint16)[int(sys.byteorder == "little") :: 2].copy()
        return numbers.astype(dtype.storage)
    if dtype.name == "bool":
        return random.integers(0, 2, count).astype(np.bool_)
    limits = np.iinfo(dtype.name)
    low, high = (max(limits.min, -4), 4) if small else (limits.min, limits.max)
    return random.integers(low, high, count, dtype=limits.dtype, endpoint=True)
