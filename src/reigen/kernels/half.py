"""float16 and bfloat16 to float32 and back, in NumPy.

Widening is exact. Narrowing rounds once, to nearest even; NaN stays NaN, infinity stays infinity and what is too large
becomes infinity. bfloat16 is the upper half of a float32 and is stored as uint16.

float16 is left to NumPy's own casts. Shifting the bits and scaling by a float32 product would be vectorised, but
numbers below 2**-14, which gradients are full of, are float32 subnormals on the way: they multiply 40 times slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    """Round ``source`` to float16 into ``target`` of the same length. ``source`` may be used up as scratch."""
    np.copyto(target, source, casting="same_kind")


def converters(name: str) -> tuple[Convert, Convert]:
    """``(widen, narrow)`` for the half type ``name``: "float16" or "bfloat16"."""
    return (widen_bfloat16, narrow_bfloat16) if name == "bfloat16" else (widen_float16, narrow_float16)
