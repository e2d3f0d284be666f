"""Gradient compression: tensors travel in a smaller floating-point type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras

from reigen.api.compression import CastCompression, CodecCompression, as_compressor, parse_compression
from reigen.errors import ArgumentError
from reigen.types import DTYPES

_NAMES = "Compression.none, .fp16 or .bf16"


@dataclass(frozen=True)
class Compressor(CastCompression):
    """Casts floating-point tensors of Keras's backend to ``wire`` and back; leaves all others as they are."""

    def compress(self, tensor: Any) -> tuple[Any, str | None]:
        """The tensor as it travels, and what :meth:`decompress` needs to know."""
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if self.wire is None or "float" not in dtype or dtype == self.wire.name:
            return tensor, None
        return keras.ops.cast(tensor, self.wire.name), dtype

    def decompress(self, tensor: Any, ctx: str | None) -> Any:
        """The tensor in the element type that it had before :meth:`compress`."""
        return tensor if ctx is None else keras.ops.cast(tensor, ctx)


class Compression:
    """The compressors there are: ``none``, ``fp16`` and ``bf16``."""

    none = Compressor()
    fp16 = Compressor(DTYPES["float16"])
    bf16 = Compressor(DTYPES["bfloat16"])


def choose_compressor(compression: Any) -> Any:
    """Return what compresses tensors of Keras's backend, of the argument of an optimizer.

    Args:
        compression: a compressor, of another framework's package too; an object with ``compress`` and ``decompress``;
            or a dict such as ``{"type": "fp16"}``.

    Raises:
        ArgumentError: it is something else, or codes of fewer bits, which the operations of a graph do not know.
    """
    if hasattr(compression, "compress") and not isinstance(compression, CastCompression):
        return as_compressor(compression, _NAMES)
    parsed = parse_compression(compression, _NAMES)
    if isinstance(parsed, CodecCompression):
        raise ArgumentError(f"compression must be {_NAMES} with Keras, got {compression!r}")
    return Compressor(parsed.wire)
