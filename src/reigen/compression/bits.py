"""Two bits and one bit an element. With error feedback they are MXNet's `2bit` and `1bit`, byte for byte."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reigen.compression.base import Codec, Params
from reigen.errors import ArgumentError
from reigen.kernels import quantize
from reigen.kernels.quantize import Bytes, Floats, Scratch

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Ternary(Codec):
    """What is at least ``threshold`` becomes that, at most ``-threshold`` that, all else zero: a 16th of float32.

    Attributes:
        threshold: above zero; rounded to float32.
    """

    threshold: float = 0.5
    grain = 16
    _table: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_number("2bit", self.threshold)
        if not np.float32(self.threshold) > 0:
            raise ArgumentError(f"the threshold of 2bit compression must be above zero, got {self.threshold!r}")
        object.__setattr__(self, "_table", quantize.ternary_table(np.float32(self.threshold)))

    @property
    def name(self) -> str:
        """See `Codec.name`."""
        return "2bit"

    def params(self) -> Params:
        """See `Codec.params`."""
        return {"type": self.name, "threshold": self.threshold, "ef": False}

    def max_bytes(self, num_elements: int) -> int:
        """See `Codec.max_bytes`."""
        return 4 * -(-num_elements // 16)

    def pack(self, values: Floats, out: Bytes, scratch: Scratch) -> None:
        """See `Codec.pack`."""
        quantize.pack_ternary(values, np.float32(self.threshold), out, scratch)

    def unpack(self, data: Bytes, out: Floats) -> None:
        """See `Codec.unpack`."""
        quantize.unpack(data, self._table, out)


@dataclass(frozen=True)
class Signs(Codec):
    """What is above ``threshold`` becomes 1, all else -1: a 32nd of float32.

    Attributes:
        threshold: where the cut is, not what is sent; rounded to float32.
    """

    threshold: float = 0.5
    grain = 32
    _table: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_number("1bit", self.threshold)
        object.__setattr__(self, "_table", quantize.sign_table())

    @property
    def name(self) -> str:
        """See `Codec.name`."""
        return "1bit"

    def params(self) -> Params:
        """See `Codec.params`."""
        return {"type": self.name, "threshold": self.threshold, "ef": False}

    def max_bytes(self, num_elements: int) -> int:
        """See `Codec.max_bytes`."""
        return 4 * -(-num_elements // 32)

    def pack(self, values: Floats, out: Bytes, scratch: Scratch) -> None:
        """See `Codec.pack`."""
        quantize.pack_signs(values, np.float32(self.threshold), out, scratch)

    def unpack(self, data: Bytes, out: Floats) -> None:
        """See `Codec.unpack`."""
        quantize.unpack(data, self._table, out)


def _check_number(what: str, threshold: Any) -> None:
    is_number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
    if not is_number or not -_LARGEST <= threshold <= _LARGEST:
        raise ArgumentError(f"the threshold of {what} compression must be a number float32 can hold: {threshold!r}")
