"""Largest elements alone, with their positions (Aji and Heafield, "Sparse Communication", 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reigen.compression.base import Codec, Params
from reigen.compression.casts import Cast, Int8
from reigen.errors import ArgumentError, WireError
from reigen.kernels import quantize
from reigen.kernels.quantize import Bytes, Floats, QuantizeScratch

#: Codecs of the values.
UNCHANGED = Cast("fp32")


@dataclass(frozen=True)
class TopK(Codec):
    """Top-k code: elements of largest magnitude, at least one, of equal ones the first; all others arrive as zero.

    On the wire: their positions in ascending order, four bytes each, then their values.

    Attributes:
        ratio: their part of all; above 0, at most 1.
        k: their number, instead of ``ratio``.
        values: codec of the values: `Cast` or `Int8`.
    """

    ratio: float | None = None
    k: int | None = None
    values: Codec = UNCHANGED
    block_multiple = None

    def __post_init__(self) -> None:
        if (self.ratio is None) == (self.k is None):
            raise ArgumentError('topk compression needs one of "ratio" and "k"')
        if self.ratio is not None and not (_is_number(self.ratio) and 0 < self.ratio <= 1):
            raise ArgumentError(f"the ratio of topk compression must be above 0 and at most 1, got {self.ratio!r}")
        if self.k is not None and not (isinstance(self.k, int) and not isinstance(self.k, bool) and self.k > 0):
            raise ArgumentError(f"the k of topk compression must be a whole number above 0, got {self.k!r}")
        if not isinstance(self.values, Cast | Int8):
            raise ArgumentError("the values of topk compression travel as fp32, fp16, bf16 or int8")

    @property
    def name(self) -> str:
        return "topk"

    def params(self) -> Params:
        """Return ``type``, ``ratio`` or ``k``, and ``values``."""
        params: Params = {"type": self.name, "values": self.values.name, "ef": False}
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

    def pack(self, values: Floats, out: Bytes, scratch: QuantizeScratch) -> None:
        if len(values) >= 1 << 32:
            raise ArgumentError(f"topk compression is for arrays of less than 2**32 elements, got {len(values)}")
        chosen = quantize.top_k_indices(values, self.count(len(values)))
        out[: 4 * len(chosen)].view("<u4")[:] = chosen
        self.values.pack(values[chosen], out[4 * len(chosen) :], scratch)

    def unpack(self, data: Bytes, out: Floats) -> None:
        positions, values = self._read(data, len(out))
        out[:] = 0.0
        out[positions] = values

    def combine(self, data: Bytes, target: Floats, how: np.ufunc, scratch: QuantizeScratch) -> None:
        """Touch only the elements that were sent."""
        positions, values = self._read(data, len(target))
        target[positions] = how(target[positions], values)

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
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
