"""Codecs: smaller element types, few bits an element, and the largest elements alone.

`Ternary` and `Signs` with error feedback are MXNet's `2bit` and `1bit`, byte for byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.compression.base import Codec, Params
from reigen.errors import ArgumentError, WireError
from reigen.kernels import half_precision, quantize
from reigen.kernels.quantize import Bytes, Floats
from reigen.kernels.reduce import ScratchArrays

_STORAGES = {"fp32": "<f4", "fp16": "<f2", "bf16": "<u2"}
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Cast(Codec):
    """Cast of each element, rounded to nearest even; too large ones become infinity.

    ``to`` is ``fp16``, ``bf16``, or ``fp32``, which changes nothing.
    """

    to: str

    def __post_init__(self) -> None:
        if self.to not in _STORAGES:
            raise ArgumentError(f"numbers can be cast to {', '.join(_STORAGES)}, not to {self.to!r}")

    @property
    def name(self) -> str:
        return self.to

    def max_bytes(self, num_elements: int) -> int:
        return num_elements * np.dtype(_STORAGES[self.to]).itemsize

    def pack(self, values: Floats, out: Bytes, scratch: ScratchArrays) -> None:
        target = out.view(_STORAGES[self.to])
        if self.to == "bf16":
            copy = scratch.take("to narrow", len(values), np.float32)  # narrowing uses it up
            np.copyto(copy, values)
            half_precision.narrow_bfloat16(copy, target)
        elif self.to == "fp16":
            half_precision.narrow_float16(values, target)
        else:
            np.copyto(target, values, casting="same_kind")

    def unpack(self, data: Bytes, out: Floats) -> None:
        source = data.view(_STORAGES[self.to])
        if self.to == "bf16":
            half_precision.widen_bfloat16(source, out)
        else:
            np.copyto(out, source)


#: Codec of numbers that travel as they are.
UNCHANGED = Cast("fp32")


@dataclass(frozen=True)
class Int8(Codec):
    """Quantizer to whole 127ths of the largest magnitude among an element's 256: a quarter of float32 and 1.6 %.

    A group of 256 with NaN or infinity in it arrives as NaN, so that a check for overflow finds it.
    """

    name = "int8"
    block_multiple = quantize.INT8_GROUP

    def max_bytes(self, num_elements: int) -> int:
        return quantize.int8_bytes(num_elements)

    def pack(self, values: Floats, out: Bytes, scratch: ScratchArrays) -> None:
        quantize.pack_int8(values, out, scratch)

    def unpack(self, data: Bytes, out: Floats) -> None:
        quantize.unpack_int8(data, out)


@dataclass(frozen=True)
class Ternary(Codec):
    """Ternary code: at least ``threshold``, which is above zero, becomes that, at most minus it that, all else zero.

    A 16th of float32.
    """

    threshold: float = 0.5
    name = "2bit"
    block_multiple = 16
    _table: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_number(self.name, "threshold", self.threshold, positive=True)
        object.__setattr__(self, "_table", quantize.ternary_table(np.float32(self.threshold)))

    def params(self) -> Params:
        return {**super().params(), "threshold": self.threshold}

    def for_sums(self, num_arrays: int) -> Ternary:
        """Return one with so many times the threshold."""
        return Ternary(self.threshold * num_arrays)

    def max_bytes(self, num_elements: int) -> int:
        return 4 * -(-num_elements // 16)

    def pack(self, values: Floats, out: Bytes, scratch: ScratchArrays) -> None:
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
    name = "1bit"
    block_multiple = 32
    _table: Floats = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_number(self.name, "threshold", self.threshold)
        _check_number(self.name, "scale", self.scale, positive=True)
        object.__setattr__(self, "_table", quantize.sign_table(np.float32(self.scale)))

    def params(self) -> Params:
        return {**super().params(), "threshold": self.threshold, "scale": self.scale}

    def for_sums(self, num_arrays: int) -> Signs:
        """Return one with so many times the scale."""
        return Signs(self.threshold * num_arrays, self.scale * num_arrays)

    def max_bytes(self, num_elements: int) -> int:
        return 4 * -(-num_elements // 32)

    def pack(self, values: Floats, out: Bytes, scratch: ScratchArrays) -> None:
        quantize.pack_signs(values, np.float32(self.threshold), out, scratch)

    def unpack(self, data: Bytes, out: Floats) -> None:
        quantize.unpack_codes(data, self._table, out)


@dataclass(frozen=True)
class TopK(Codec):
    """Top-k code: elements of largest magnitude, at least one, of equal ones the first; all others arrive as zero.

    On the wire: their positions in ascending order, four bytes each, then their values (Aji and Heafield, "Sparse
    Communication", 2017).

    Attributes:
        ratio: their part of all; above 0, at most 1.
        k: their number, instead of ``ratio``.
        values: codec of the values: `Cast` or `Int8`.
    """

    ratio: float | None = None
    k: int | None = None
    values: Codec = UNCHANGED
    name = "topk"
    block_multiple = None

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.k is None):
            raise ArgumentError('topk compression needs one of "ratio" and "k"')
        if self.ratio is not None and not (
            _is_number(self.ratio) and math.isfinite(self.ratio) and 0 < self.ratio <= 1
        ):
            raise ArgumentError(f"the ratio of topk compression must be above 0 and at most 1, got {self.ratio!r}")
        if self.k is not None and not (_is_number(self.k) and isinstance(self.k, int) and self.k > 0):
            raise ArgumentError(f"the k of topk compression must be a whole number above 0, got {self.k!r}")
        if not isinstance(self.values, Cast | Int8):
            raise ArgumentError("the values of topk compression travel as fp32, fp16, bf16 or int8")

    def params(self) -> Params:
        """Return ``type``, ``ratio`` or ``k``, and ``values``."""
        params: Params = {**super().params(), "values": self.values.name}
        if self.ratio is not None:
            params["ratio"] = self.ratio
        if self.k is not None:
            params["k"] = self.k
        return params

    def count(self, num_elements: int) -> int:
        """Return the number of elements that are sent, of so many."""
        count = self.k if self.k is not None else round((self.ratio or 0) * num_elements)
        return min(num_elements, max(1, count))

    def max_bytes(self, num_elements: int) -> int:
        count = self.count(num_elements)
        return 4 * count + self.values.max_bytes(count)

    def check(self, data: Bytes, num_elements: int) -> None:
        super().check(data, num_elements)
        self._positions(data, num_elements)

    def pack(self, values: Floats, out: Bytes, scratch: ScratchArrays) -> None:
        if len(values) >= 1 << 32:
            raise ArgumentError(f"topk compression is for arrays of less than 2**32 elements, got {len(values)}")
        chosen = quantize.top_k_indices(values, self.count(len(values)))
        out[: 4 * len(chosen)].view("<u4")[:] = chosen
        self.values.pack(values[chosen], out[4 * len(chosen) :], scratch)

    def unpack(self, data: Bytes, out: Floats) -> None:
        positions, values = self._read(data, len(out))
        out[:] = 0.0
        out[positions] = values

    def combine(self, data: Bytes, target: Floats, ufunc: np.ufunc, scratch: ScratchArrays) -> None:
        """Touch only the elements that were sent."""
        positions, values = self._read(data, len(target))
        target[positions] = ufunc(target[positions], values)

    def _read(self, data: Bytes, length: int) -> tuple[NDArray[np.intp], Floats]:
        positions = self._positions(data, length)
        values = np.empty(len(positions), np.float32)
        self.values.unpack(data[4 * len(positions) :], values)
        return positions, values

    def _positions(self, data: Bytes, length: int) -> NDArray[np.intp]:
        count = self.count(length)
        positions = data[: 4 * count].view("<u4").astype(np.intp)
        if count and not (positions[-1] < length and (np.diff(positions) > 0).all()):
            raise WireError(f"topk codes with positions that are not ascending, or not below {length}")
        return positions


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_number(codec: str, name: str, value: Any, positive: bool = False) -> None:
    if not _is_number(value) or not -_LARGEST <= value <= _LARGEST:
        raise ArgumentError(f"the {name} of {codec} compression must be a number float32 can hold: {value!r}")
    if positive and not np.float32(value) > 0:
        raise ArgumentError(f"the {name} of {codec} compression must be above zero, got {value!r}")
