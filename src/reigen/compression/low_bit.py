"""Two bits and one bit an element. With error feedback they are MXNet's `2bit` and `1bit`, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reigen.compression.base import Codec, Params
from reigen.errors import ArgumentError
from reigen.kernels import quantize
from reigen.kernels.quantize import Bytes, Floats, QuantizeScratch

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Ternary(Codec):
    """Ternary code: at least ``threshold``, which is above zero, becomes that, at most minus it that, all else zero.

    A 16th of float32.
    """

    threshold: float = 0.5
    block_multiple = 16
    _table: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_number("2bit", "threshold", self.threshold, positive=True)
        object.__setattr__(self, "_table", quantize.ternary_table(np.float32(self.threshold)))

    @property
    def name(self) -> str:
        return "2bit"

    def params(self) -> Params:
        return {"type": self.name, "threshold": self.threshold, "ef": False}

    def for_sums(self, num_arrays: int) -> Ternary:
        """Return one with so many times the threshold."""
        return Ternary(self.threshold * num_arrays)

    def max_bytes(self, num_elements: int) -> int:
        return 4 * -(-num_elements // 16)

    def pack(self, values: Floats, out: Bytes, scratch: QuantizeScratch) -> None:
        quantize.pack_ternary(values, np.float32(self.threshold), out, scratch)

    def unpack(self, data: Bytes, out: Floats) -> None:
        quantize.unpack_codes(data, self._table, out)


@dataclass(frozen=True)
class Signs(Codec):
    """Sign code: above ``threshold`` becomes ``scale``, which is above zero, all else ``-scale``: a 32nd of float32.

    Both are rounded to float32. MXNet's scale is 1.
    """

    threshold: float = 0.5
    scale: float = 1.0
    block_multiple = 32
    _table: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_number("1bit", "threshold", self.threshold)
        _check_number("1bit", "scale", self.scale, positive=True)
        object.__setattr__(self, "_table", quantize.sign_table(np.float32(self.scale)))

    @property
    def name(self) -> str:
        return "1bit"

    def params(self) -> Params:
        return {"type": self.name, "threshold": self.threshold, "scale": self.scale, "ef": False}

    def for_sums(self, num_arrays: int) -> Signs:
        """Return one with so many times the scale."""
        return Signs(self.threshold * num_arrays, self.scale * num_arrays)

    def max_bytes(self, num_elements: int) -> int:
        return 4 * -(-num_elements // 32)

    def pack(self, values: Floats, out: Bytes, scratch: QuantizeScratch) -> None:
        quantize.pack_signs(values, np.float32(self.threshold), out, scratch)

    def unpack(self, data: Bytes, out: Floats) -> None:
        quantize.unpack_codes(data, self._table, out)


def _check_number(codec: str, what: str, value: Any, positive: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -_LARGEST <= value <= _LARGEST:
        raise ArgumentError(f"the {what} of {codec} compression must be a number float32 can hold: {value!r}")
    if positive and not np.float32(value) > 0:
        raise ArgumentError(f"the {what} of {codec} compression must be above zero, got {value!r}")
