"""Error feedback: the loss of a codec is added to the next array, so that nothing is lost for good.

Seide et al., "1-Bit Stochastic Gradient Descent", 2014, and Karimireddy et al., "Error Feedback Fixes SignSGD", 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.compression.base import Codec, Params, Residual, check_floating
from reigen.errors import ArgumentError
from reigen.kernels.quantize import Bytes, Floats
from reigen.kernels.reduce import ScratchArrays
from reigen.types import DType


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """``r += g``, send r coded by ``codec``, a codec without error feedback, ``r -= decoded``; r is the residual.

    Only finite numbers are remembered: NaN and infinity are sent as ``codec`` sends them, and their residual is 0.
    """

    codec: Codec

    def __post_init__(self) -> None:
        if isinstance(self.codec, ErrorFeedback):
            raise ArgumentError("there is error feedback around this codec already")

    @property
    def block_multiple(self) -> int | None:  # type: ignore[override]
        """Multiple of ``codec``."""
        return self.codec.block_multiple

    @property
    def name(self) -> str:
        """Name of ``codec``."""
        return self.codec.name

    def params(self) -> Params:
        """Return those of ``codec``, with ``ef``."""
        return {**self.codec.params(), "ef": True}

    def max_bytes(self, num_elements: int) -> int:
        return self.codec.max_bytes(num_elements)

    def pack(self, values: Floats, out: Bytes, scratch: ScratchArrays) -> None:
        self.codec.pack(values, out, scratch)

    def unpack(self, data: Bytes, out: Floats) -> None:
        self.codec.unpack(data, out)

    def check(self, data: Bytes, num_elements: int) -> None:
        self.codec.check(data, num_elements)

    def for_sums(self, num_arrays: int) -> ErrorFeedback:
        """Return error feedback around that of ``codec``."""
        return ErrorFeedback(self.codec.for_sums(num_arrays))

    def combine(self, data: Bytes, target: Floats, ufunc: np.ufunc, scratch: ScratchArrays) -> None:
        self.codec.combine(data, target, ufunc, scratch)

    def begin(self, num_elements: int, dtype: DType, saved: Residual = None) -> Residual:
        """Return zeros, or a copy of ``saved``."""
        check_floating(dtype, self)
        if saved is None:
            return np.zeros(num_elements, np.float32)
        if saved.dtype != np.float32 or saved.shape != (num_elements,):
            raise ArgumentError(
                f"the saved residual is {saved.dtype} of shape {saved.shape}, it should be float32 of ({num_elements},)"
            )
        return saved.copy()

    def _check_residual(self, array: NDArray[Any], state: Residual) -> None:
        if state is None or state.shape != array.shape:
            have = "none" if state is None else f"one of {len(state)}"
            raise ArgumentError(f"an array of {len(array)} elements needs a residual of as many, there is {have}")
