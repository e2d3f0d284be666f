"""Gradient compression: arrays travel in a smaller floating-point type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from reigen.api.compression import CastCompression
from reigen.types import DTYPES

#: The casts there are, for messages.
COMPRESSION_NAMES = "Compression.none, .fp16 or .bf16"


@dataclass(frozen=True)
class Compressor(CastCompression):
    """Casts floating-point arrays to ``wire`` and back; leaves all others as they are."""

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """The array as it travels, and what :meth:`decompress` needs to know."""
        if self.wire is None or not jnp.issubdtype(tensor.dtype, jnp.floating):
            return tensor, None
        return tensor.astype(self.wire.name), tensor.dtype

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """The array in the element type that it had before :meth:`compress`."""
        return tensor if ctx is None else tensor.astype(ctx)


class Compression:
    """The compressors there are: ``none``, ``fp16`` and ``bf16``."""

    none = Compressor()
    fp16 = Compressor(DTYPES["float16"])
    bf16 = Compressor(DTYPES["bfloat16"])
