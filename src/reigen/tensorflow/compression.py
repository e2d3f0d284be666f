"""Gradient compression: tensors travel in a smaller floating-point type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from reigen.api.compression import CastCompression
from reigen.types import DTYPES

#: The casts there are, for messages.
COMPRESSION_NAMES = "Compression.none, .fp16 or .bf16"


@dataclass(frozen=True)
class Compressor(CastCompression):
    """Casts floating-point tensors to ``wire`` and back; leaves all others as they are."""

    def compress(self, tensor: Any) -> tuple[Any, tf.DType | None]:
        """The tensor as it travels, and what :meth:`decompress` needs to know."""
        if self.wire is None:
            return tensor, None
        tensor = tf.convert_to_tensor(tensor)
        if not tensor.dtype.is_floating:
            return tensor, None
        return tf.cast(tensor, self.wire.name), tensor.dtype

    def decompress(self, tensor: Any, ctx: tf.DType | None) -> Any:
        """The tensor in the element type that it had before :meth:`compress`."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class Compression:
    """The compressors there are: ``none``, ``fp16`` and ``bf16``."""

    none = Compressor()
    fp16 = Compressor(DTYPES["float16"])
    bf16 = Compressor(DTYPES["bfloat16"])
