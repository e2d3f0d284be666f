"""Gradient compression: arrays travel in a smaller floating-point type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reigen.api.compression import CastCompression
from reigen.mxnet.arrays import dtype_of
from reigen.types import DTYPES


@dataclass(frozen=True)
class Compressor(CastCompression):
    """Compressor that casts floating-point NDArrays to ``wire`` and back; it leaves all others as they are."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Return the array as it travels, and the context for :meth:`decompress`."""
        if self.wire is None or not dtype_of(tensor).is_floating:
            return tensor, None
        return tensor.astype(self.wire.name, copy=False), tensor.dtype

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Return the array in the element type that it had before :meth:`compress`."""
        return tensor if ctx is None else tensor.astype(ctx, copy=False)


class Compression:
    """Compressors: ``none`` and ``fp16``."""

    none = Compressor()
    fp16 = Compressor(DTYPES["float16"])
