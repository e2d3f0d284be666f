"""Smaller element types: half precision, and int8 with a scale for each few hundred elements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reigen.compression.base import Codec, Params
from reigen.errors import ArgumentError
from reigen.kernels import half_precision, quantize
from reigen.kernels.quantize import Bytes, Floats, QuantizeScratch

_STORAGES = {"fp32": "<f4", "fp16": "<f2", "bf16": "<u2"}


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

    def params(self) -> Params:
        return {"type": self.to, "ef": False}

    def max_bytes(self, num_elements: int) -> int:
        return num_elements * np.dtype(_STORAGES[self.to]).itemsize

    def pack(self, values: Floats, out: Bytes, scratch: QuantizeScratch) -> None:
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


@dataclass(frozen=True)
class Int8(Codec):
    """Quantizer to whole 127ths of the largest magnitude among an element's 256: a quarter of float32 and 1.6 %.

    A group of 256 with NaN or infinity in it arrives as NaN, so that a check for overflow finds it.
    """

    block_multiple = quantize.INT8_GROUP

    @property
    def name(self) -> str:
        return "int8"

    def params(self) -> Params:
        return {"type": self.name, "ef": False}

    def max_bytes(self, num_elements: int) -> int:
        return quantize.int8_bytes(num_elements)

    def pack(self, values: Floats, out: Bytes, scratch: QuantizeScratch) -> None:
        quantize.pack_int8(values, out, scratch)

    def unpack(self, data: Bytes, out: Floats) -> None:
        quantize.unpack_int8(data, out)
