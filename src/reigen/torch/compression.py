"""Gradient compression: tensors travel in a smaller floating-point type."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reigen.api.compression import CastCompression
from reigen.types import DTYPES

#: The casts there are, for messages.
COMPRESSION_NAMES = "Compression.none, .fp16 or .bf16"


@dataclass(frozen=True)
class Compressor(CastCompression):
    """Casts floating-point tensors to ``wire`` and back; leaves all others as they are."""

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """The tensor as it travels, and what :meth:`decompress` needs to know."""
        if self.wire is None or not tensor.is_floating_point():
            return tensor, None
        return tensor.to(getattr(torch, self.wire.name)), tensor.dtype

    def decompress(self, tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """The tensor in the element type that it had before :meth:`compress`."""
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The compressors there are: ``none``, ``fp16`` and ``bf16``. DistributedOptimizer takes fewer bits, too."""

    none = Compressor()
    fp16 = Compressor(DTYPES["float16"])
    bf16 = Compressor(DTYPES["bfloat16"])
