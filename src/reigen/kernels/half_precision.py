"""Conversion of float16 and bfloat16 to float32 and back, in NumPy.

Widening is exact. Narrowing rounds once, to nearest even; NaN stays NaN, infinity stays infinity and greater numbers
become infinity. bfloat16 is the upper half of a float32 and is stored as uint16.

float16 is widened by NumPy's cast. Shifting the bits and scaling by a float32 product would be vectorised, but
numbers below 2**-14, which gradients are full of, are float32 subnormals on the way: they multiply 40 times slower.
It is not narrowed by it: for each of those numbers the cast raises the processor's underflow flag by a system
library's function, which takes 25 times as long as all the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Elements that are narrowed at a time, so that they and the scratch stay in the core's own cache.
_BLOCK = 1 << 16
#: So few are narrowed by NumPy's cast: even the slow numbers take no longer than fifteen calls.
_MAX_CAST_ELEMENTS = 256

#: ``(source, target)``: both flat and equally long.
Convert = Callable[[NDArray[Any], NDArray[Any]], None]


def widen_bfloat16(source: NDArray[np.uint16], target: NDArray[np.float32]) -> None:
    """Write the bfloat16 numbers ``source`` as float32 into ``target`` of the same length."""
    bits = target.view(np.uint32)
    np.copyto(bits, source)
    np.left_shift(bits, 16, out=bits)


def narrow_bfloat16(source: NDArray[np.float32], target: NDArray[np.uint16]) -> None:
    """Round ``source`` to bfloat16 into ``target`` of the same length. ``source`` is used up as scratch."""
    # The largest is NaN when any is; looking for them one by one would cost another pass.
    is_nan = np.isnan(source) if np.isnan(source.max(initial=0.0)) else None
    bits = source.view(np.uint32)
    # Adding 0x7fff, and one more where the last kept bit is odd, carries into that bit exactly when nearest-even rounds
    # up. A carry out of the mantissa raises the exponent, up to infinity; NaN alone could wrap: it is written apart.
    odd = np.right_shift(bits, 16)
    np.bitwise_and(odd, 1, out=odd)
    np.add(bits, odd, out=bits)
    np.add(bits, 0x7FFF, out=bits)
    np.right_shift(bits, 16, out=bits)
    np.copyto(target, bits, casting="same_kind")
    if is_nan is not None:
        np.copyto(target, np.uint16(0x7FC0), where=is_nan)


def widen_float16(source: NDArray[np.float16], target: NDArray[np.float32]) -> None:
    """Write ``source`` as float32 into ``target`` of the same length."""
    np.copyto(target, source)


def narrow_float16(source: NDArray[np.float32], target: NDArray[np.float16]) -> None:
    """Round ``source`` to float16 into ``target`` of the same length. ``source`` is left as it is."""
    if len(source) <= _MAX_CAST_ELEMENTS:
        np.copyto(target, source, casting="same_kind")
        return
    size = min(len(source), _BLOCK)
    magnitudes, powers = np.empty(size, np.float32), np.empty(size, np.float32)
    with np.errstate(invalid="ignore"):  # NaN
        for begin in range(0, len(source), size):
            end = min(begin + size, len(source))
            halves, num = target[begin:end].view(np.uint16), end - begin
            _narrow_block(source[begin:end], halves, magnitudes[:num], powers[:num])


def _narrow_block(
    source: NDArray[np.float32],
    target: NDArray[np.uint16],
    magnitudes: NDArray[np.float32],
    powers: NDArray[np.float32],
) -> None:
    """Narrow one block; ``magnitudes`` and ``powers`` are scratch."""
    is_nan = np.isnan(source) if np.isnan(source.max()) else None
    bits, shifted = magnitudes.view(np.uint32), powers.view(np.uint32)
    np.abs(source, out=magnitudes)
    np.minimum(magnitudes, np.float32(65536), out=magnitudes)  # from where on it is infinity
    # Numbers whose last place is worth as much as that of the result: 2**13 times the power of two that is not above
    # the magnitude, nor below 2**-14, where the exponents of float16 end. Adding them rounds to nearest even, and
    # leaves the result's significand, with its leading one, in the last bits of the sum.
    np.bitwise_and(bits, 0x7F800000, out=shifted)
    np.maximum(powers, np.float32(2**-14), out=powers)
    np.multiply(powers, np.float32(2**13), out=powers)
    np.add(magnitudes, powers, out=magnitudes)
    np.subtract(bits, shifted, out=bits)
    # The exponent, less one for the leading one that is added to it: 127 is float32's bias, 15 float16's.
    np.right_shift(shifted, 13, out=shifted)
    np.add(bits, shifted, out=bits)
    np.subtract(bits, (127 + 13 - 15 + 1) << 10, out=bits)
    np.right_shift(source.view(np.uint32), 16, out=shifted)
    np.bitwise_and(shifted, 0x8000, out=shifted)
    np.bitwise_or(bits, shifted, out=bits)
    np.copyto(target, bits, casting="same_kind")
    if is_nan is not None:
        np.copyto(target, np.uint16(0x7E00), where=is_nan)


def converters(name: str) -> tuple[Convert, Convert]:
    """Return ``(widen, narrow)`` for the half type ``name``: "float16" or "bfloat16"."""
    return (widen_bfloat16, narrow_bfloat16) if name == "bfloat16" else (widen_float16, narrow_float16)
