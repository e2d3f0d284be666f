"""Which element type travels: the part of compression that no framework needs to know."""

from __future__ import annotations

from dataclasses import dataclass

from reigen.types import DType


@dataclass(frozen=True)
class Cast:
    """Floating-point tensors travel as ``wire``; None sends them as they are."""

    wire: DType | None = None

    def wire_dtype(self, dtype: DType) -> DType:
        """The element type in which a tensor of ``dtype`` travels; integers and bool are never cast."""
        return self.wire if self.wire is not None and dtype.is_floating else dtype
