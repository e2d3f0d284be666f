"""Adasum over any backend, made of the backend's own alltoall, allreduce and allgather.

The arithmetic is `reigen.kernels.adasum`. For tensors of S bytes in all, each rank sends and receives 2 S (n-1)/n
bytes, whatever n is, and a few numbers a tensor:

a. Each tensor is cut into n equal slices; alltoall brings slice r of all ranks' tensors to rank r. It takes the place
   of the tensor: row i of ``target`` seen as (n, slice) is rank i's contribution to the slice of this rank.
b. The rest of a tensor, fewer than n elements, is gathered by every rank.
c. For each of the log2(n) levels: products of the level's pairs over this rank's slice, to which rank 0 adds those of
   the rest; one small allreduce in float64 sums them; factors follow. The results of a level are not kept: the next
   computes them anew from the rows, in a cache, which spares a copy of everything in float64.
d. The rows are combined to the slice of the result, which allgather brings to every rank.

Exchanges go in pieces, so that besides the targets no more is needed than twice `PIECE_BYTES`, `BLOCK_ELEMENTS` float64
three times, and for each tensor at most n^2 elements and 3n float64.

All ranks get the same bits: the factors follow from the same sums, and each element is computed by one rank, or by all
with the same operations. A tensor's bits do not depend on the tensors beside it: it is sliced and its products are
summed by itself, in blocks that depend on n alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from reigen.backends.base import Array, Backend, ReduceBuffer
from reigen.kernels.adasum import (
    MAX_COLUMNS,
    Vectors,
    check_adasum,
    combine_pairs,
    load_float64,
    pair_factors,
    pair_products,
    store_float64,
)
from reigen.kernels.reduce import BlockReducer, Reduction
from reigen.types import DTYPES, DType, ReduceOp

__all__ = ["adasum", "check_adasum"]

#: limit of one exchange, on each rank
PIECE_BYTES = 1 << 21
#: elements of all ranks' vectors that are computed on together
BLOCK_ELEMENTS = 1 << 16

_FLOAT64 = DTYPES["float64"]


@dataclass(frozen=True, slots=True)
class ColumnRange:
    """Columns ``begin`` to ``end`` of the rows of one tensor."""

    tensor: int
    begin: int
    end: int


def split_columns(widths: Sequence[int], limit: int) -> Iterator[list[ColumnRange]]:
    """Split tensors of ``widths`` columns, in order and without gaps, into pieces of at most ``limit`` columns."""
    piece: list[ColumnRange] = []
    remaining = limit
    for tensor, width in enumerate(widths):
        begin = 0
        while begin < width:
            end = min(width, begin + remaining)
            piece.append(ColumnRange(tensor, begin, end))
            remaining -= end - begin
            begin = end
            if not remaining:
                yield piece
                piece, remaining = [], limit
    if piece:
        yield piece


def adasum(
    backend: Backend,
    sources: Sequence[Array],
    targets: Sequence[Array],
    dtype: DType,
    prescale: float,
    postscale: float,
    deadline: float,
) -> None:
    """Combine each tensor of all ranks by Adasum; every rank gets the result.

    Args:
        backend: of a group of ranks whose number is a power of two.
        sources: this rank's contributions: flat arrays of the dtype's storage type. All zeros are neutral.
        targets: arrays for the results, of the same sizes; each may be its source.
        dtype: float16, bfloat16, float32 or float64.
        prescale: factor of each contribution.
        postscale: factor of the result.
        deadline: see `reigen.backends.base`, and there for the errors, too.

    Raises:
        UnsupportedTypeError, UnsupportedError: see `check_adasum`; nothing has been sent.
    """
    check_adasum(dtype, backend.size)
    if backend.size == 1:
        reducer = BlockReducer(Reduction(dtype, ReduceOp.SUM, 1, prescale, postscale))
        for source, target in zip(sources, targets, strict=True):
            reducer.reduce([source], target)
        return
    if not any(target.size for target in targets):
        return
    work = _AdasumCall(backend, dtype, targets, deadline)
    with np.errstate(all="ignore"):  # infinity and NaN are data like any other
        work.exchange(sources, prescale)
        while len(work.levels) < backend.size.bit_length() - 1:
            work.combine_level()
        work.spread(postscale)


class _AdasumCall:
    """Call of `adasum`, with its state."""

    def __init__(self, backend: Backend, dtype: DType, targets: Sequence[Array], deadline: float) -> None:
        self._backend, self._dtype, self._targets, self._deadline = backend, dtype, targets, deadline
        self._block = max(1, min(MAX_COLUMNS, BLOCK_ELEMENTS // backend.size))
        self._widths = [target.size // backend.size for target in targets]
        self._rows = [self._matrix(target) for target in targets]
        #: every rank's elements beyond the last whole slice of each tensor: (n, fewer than n)
        self._remainders: list[Array] = []
        #: for each level that has been computed, the factors: (tensors, pairs, 2)
        self.levels: list[Vectors] = []

    def exchange(self, sources: Sequence[Array], prescale: float) -> None:
        """Do steps a and b."""
        size = self._backend.size
        scaler = BlockReducer(Reduction(self._dtype, ReduceOp.SUM, 1, prescale))
        rows = [self._matrix(source) for source in sources]
        beyond = [source[size * width :] for source, width in zip(sources, self._widths, strict=True)]
        for piece in self._pieces():
            sent = np.concatenate([rows[s.tensor][:, s.begin : s.end] for s in piece], axis=1)
            width = sent.shape[1]
            flat = sent.reshape(-1)
            if prescale != 1.0:
                scaler.reduce([flat], flat)
            received = np.empty_like(sent)
            self._backend.alltoall(flat, [[width] * size] * size, received.reshape(-1), self._deadline)
            self._put(piece, received)
        own = np.concatenate(beyond)
        if prescale != 1.0:
            scaler.reduce([own], own)
        gathered = np.empty((size, own.size), own.dtype)
        if own.size:
            self._backend.allgather(own, [own.size] * size, gathered.reshape(-1), self._deadline)
        ends = np.cumsum([part.size for part in beyond])
        self._remainders = np.split(gathered, ends[:-1], axis=1)

    def combine_level(self) -> None:
        """Do step c for one level."""
        pairs = self._backend.size >> (len(self.levels) + 1)
        sums = np.zeros((len(self._rows), pairs, 3))
        for tensor, rows in enumerate(self._rows):
            for begin in range(0, rows.shape[1], self._block):
                sums[tensor] += pair_products(self._combined(tensor, rows[:, begin : begin + self._block]))
            if self._backend.rank == 0 and self._remainders[tensor].size:
                sums[tensor] += pair_products(self._combined(tensor, self._remainders[tensor]))
        flat = sums.reshape(-1)
        reduction = Reduction(_FLOAT64, ReduceOp.SUM, self._backend.size)
        self._backend.allreduce([ReduceBuffer(flat, flat)], reduction, self._deadline)
        self.levels.append(pair_factors(sums))

    def spread(self, postscale: float) -> None:
        """Do step d."""
        size = self._backend.size
        for piece in self._pieces():
            results = []
            for span in piece:
                rows = self._rows[span.tensor]
                for begin in range(span.begin, span.end, self._block):
                    block = rows[:, begin : min(span.end, begin + self._block)]
                    results.append(self._result(span.tensor, block, postscale))
            slice_ = np.concatenate(results)
            gathered = np.empty((size, slice_.size), slice_.dtype)
            self._backend.allgather(slice_, [slice_.size] * size, gathered.reshape(-1), self._deadline)
            self._put(piece, gathered)
        for tensor, (target, rest) in enumerate(zip(self._targets, self._remainders, strict=True)):
            if rest.size:
                target[target.size - rest.shape[1] :] = self._result(tensor, rest, postscale)

    def _matrix(self, array: Array) -> Array:
        """Return all full slices of an array, one in a row."""
        size = self._backend.size
        return array[: array.size // size * size].reshape(size, -1)

    def _pieces(self) -> Iterator[list[ColumnRange]]:
        return split_columns(self._widths, max(1, PIECE_BYTES // self._dtype.itemsize // self._backend.size))

    def _put(self, piece: Sequence[ColumnRange], data: Array) -> None:
        """Write the columns of ``data`` (n, width) to their places."""
        place = 0
        for span in piece:
            end = place + span.end - span.begin
            self._rows[span.tensor][:, span.begin : span.end] = data[:, place:end]
            place = end

    def _combined(self, tensor: int, block: Array) -> Vectors:
        return combine_pairs(load_float64(block, self._dtype), [level[tensor] for level in self.levels])

    def _result(self, tensor: int, block: Array, postscale: float) -> Array:
        values = self._combined(tensor, block)[0]
        if postscale != 1.0:
            values *= postscale
        return store_float64(values, self._dtype)
