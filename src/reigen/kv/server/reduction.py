"""Sums of the contributions to a round: in rank order for every element, whatever form they came in. Pure.

A contribution is dense, encoded, or rows. Sums of half types are float32 until the end; integers wrap around. A factor
other than 1 makes up for workers that were lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.compression import Codec
from reigen.kernels import half_precision
from reigen.kernels.float_errors import ignore_float_errors
from reigen.kv.server.buffers import ReductionScratch
from reigen.types import DType, dtype_named

#: Elements that are worked on at a time, so that they stay in the core's cache.
BLOCK_ELEMENTS = 1 << 16
_FLOAT32 = dtype_named("float32")


@dataclass(slots=True, eq=False)  # frozen ones are slow to make
class PushData:
    """Contribution of one worker to a shard.

    Attributes:
        data: its elements in the storage type, flat, or codes as bytes.
        codec: of the codes; None: these are elements.
        rows: numbers of rows whose elements ``data`` are, ascending, each once; None: ``data`` is the whole shard.
    """

    data: NDArray[Any]
    codec: Codec | None = None
    rows: NDArray[np.int64] | None = None


def accumulation_dtype(dtype: DType) -> DType:
    """Return the type in which sums of ``dtype`` are given to optimizers, not rounded yet."""
    return _FLOAT32 if dtype.is_floating and dtype.itemsize == 2 else dtype


class ShardSum:
    """Adds up contributions to one shard, of ``length`` elements. Not for two threads at once.

    ``parts`` are in rank order, at least one, and none of rows; ``scale`` is a factor of the sum.
    """

    def __init__(
        self, dtype: DType, length: int, parts: Sequence[PushData], scale: float, scratch: ReductionScratch
    ) -> None:
        self._length, self._parts, self._scale, self._scratch = length, parts, scale, scratch
        self._dtype = dtype
        self._sum_type = accumulation_dtype(dtype)
        #: the whole sum where contributions are encoded
        self._whole = self._decoded() if any(part.codec is not None for part in parts) else None
        self._reducer = scratch.reducer(dtype, len(parts), scale)

    def into(self, out: NDArray[Any]) -> None:
        """Write the sum into ``out``, in the type of the shard, apart from all contributions."""
        if self._whole is not None:
            narrow(self._whole, out, self._dtype)
            return
        step = self._length if len(self._parts) <= 2 and self._sum_type is self._dtype else BLOCK_ELEMENTS
        for begin in range(0, self._length, max(step, 1)):
            end = begin + step
            self._reducer.reduce([part.data[begin:end] for part in self._parts], out[begin:end])

    def block(self, begin: int, end: int) -> NDArray[Any]:
        """At most `BLOCK_ELEMENTS` elements of the sum, in the `accumulation_dtype`, until the next call."""
        if self._whole is not None:
            return self._whole[begin:end]
        inputs = [part.data[begin:end] for part in self._parts]
        if self._sum_type is self._dtype and len(inputs) == 1 and self._scale == 1.0:
            return inputs[0]
        out = self._scratch.take("sum", end - begin, self._sum_type.storage)
        if self._sum_type is self._dtype:
            self._reducer.reduce(inputs, out)
        else:
            self._reducer.combine(inputs, out)
            if self._scale != 1.0:
                np.multiply(out, np.float32(self._scale), out=out)
        return out

    def _decoded(self) -> NDArray[Any]:
        total = self._scratch.take("decoded", self._length, self._sum_type.storage)
        with ignore_float_errors():
            for number, part in enumerate(self._parts):
                if part.codec is not None:
                    part.codec.decode(part.data, total, accumulate=number > 0)
                elif number:
                    total += widen(part.data, self._dtype)
                else:
                    total[:] = widen(part.data, self._dtype)
            if self._scale != 1.0:
                np.multiply(total, total.dtype.type(self._scale), out=total)
        return total


def sum_rows(
    dtype: DType, row_length: int, parts: Sequence[PushData], scale: float
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return the rows that any worker has given, ascending, and their sums in the `accumulation_dtype`.

    Their shapes are (rows,) and (rows, row_length).
    """
    numbers = [part.rows for part in parts if part.rows is not None]
    rows = np.unique(np.concatenate(numbers)) if numbers else np.empty(0, np.int64)
    total = np.zeros((len(rows), row_length), accumulation_dtype(dtype).storage)
    with ignore_float_errors():
        for part in parts:
            if part.rows is not None and len(part.rows):
                places = np.searchsorted(rows, part.rows)
                total[places] += widen(part.data, dtype).reshape(len(part.rows), row_length)
        if scale != 1.0:
            np.multiply(total, scale, out=total, casting="unsafe")
    return rows, total


def widen(data: NDArray[Any], dtype: DType) -> NDArray[Any]:
    """Elements in the `accumulation_dtype`."""
    if accumulation_dtype(dtype) is dtype:
        return data
    out = np.empty(len(data), np.float32)
    half_precision.converters(dtype.name)[0](data, out)
    return out


def narrow(total: NDArray[Any], out: NDArray[Any], dtype: DType) -> None:
    """Elements of the `accumulation_dtype` back into the type of the shard. ``total`` may be used up."""
    if accumulation_dtype(dtype) is dtype:
        np.copyto(out, total)
    else:
        with ignore_float_errors():
            half_precision.converters(dtype.name)[1](total, out)
