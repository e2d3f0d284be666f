"""Sum of several ranks' codes: decoded and added in rank order, block by block in cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.compression.base import Codec, block_ranges, check_array
from reigen.errors import WireError
from reigen.kernels import half_precision
from reigen.kernels.quantize import Bytes, QuantizeScratch


def add_up(codec: Codec, codes: Sequence[Bytes], out: NDArray[Any], factor: float = 1.0) -> None:
    """Compute ``factor`` times the sum of the decoded ``codes``, in their order for every element.

    float64 is added up in float64, all else in float32 and rounded once.

    Args:
        codec: of all codes.
        codes: one array for each rank, in rank order, at least one; (max_bytes(n),).
        out: (n,), flat and contiguous, floating-point; bfloat16 as uint16.
        factor: of the sum.

    Raises:
        WireError: some cannot be the codes of so many elements; ``out`` may have been changed in part.
        ArgumentError: ``out`` is no such array.
    """
    check_array(out)
    expected = codec.max_bytes(len(out))
    for part in codes:
        if len(part) != expected:
            raise WireError(f"{len(part)} bytes of {codec.name} codes for {len(out)} elements, which take {expected}")
    scratch = QuantizeScratch()
    with np.errstate(all="ignore"):
        for begin, end in block_ranges(len(out), codec.block_multiple):
            block = out[begin:end]
            total = block if out.itemsize > 2 else scratch.take("total", len(block), np.float32)
            for number, part in enumerate(codes):
                codec.decode(part[codec.max_bytes(begin) : codec.max_bytes(end)], total, accumulate=number > 0)
            if factor != 1.0:
                np.multiply(total, factor, out=total)
            if total is not block:
                _, narrow = half_precision.converters("bfloat16" if out.dtype == np.uint16 else "float16")
                narrow(total, block)
