"""Lists of arrays that are cut among ranks and chunks without copying."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np

from reigen.backends.base import Array
from reigen.net.process_memory import AddressRange

_LINE = 64


def rank_slice(count: int, rank: int, size: int, itemsize: int) -> tuple[int, int]:
    """Return a rank's slice of ``count`` elements: equal ones, from cache line to cache line; the last may be short."""
    step = -(-count // size)
    line = max(1, _LINE // itemsize)
    step = -(-step // line) * line
    return min(count, rank * step), min(count, (rank + 1) * step)


def split_array(array: Array, counts: Sequence[int]) -> list[Array]:
    """Split an array into views of ``counts`` elements, one behind the other."""
    return [array[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]


class BufferList:
    """Flat arrays as one, without copying."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = arrays
        self.num_arrays = len(arrays)
        self._starts = (
            [0, arrays[0].size] if self.num_arrays == 1 else [*accumulate((a.size for a in arrays), initial=0)]
        )
        self.size = self._starts[-1]

    def pieces(self, begin: int, end: int) -> list[tuple[int, Array]]:
        """Return ``(position in [0, end-begin), part of an array)`` for elements ``begin`` to ``end``."""
        found: list[tuple[int, Array]] = []
        i = bisect.bisect_right(self._starts, begin) - 1
        while begin < end:
            start, stop = self._starts[i], min(end, self._starts[i + 1])
            found.append((begin, self._arrays[i][begin - start : stop - start]))
            begin = stop
            i += 1
        return found

    def cut(self, begin: int, end: int) -> BufferList:
        """Return elements ``begin`` to ``end``."""
        return BufferList([piece for _, piece in self.pieces(begin, end)])

    def whole(self, begin: int, end: int) -> Array | None:
        """Return elements ``begin`` to ``end`` if they lie in one array, without copying; else None."""
        if self.num_arrays == 1:
            return self._arrays[0][begin:end]
        i = bisect.bisect_right(self._starts, begin) - 1
        start = self._starts[i]
        return self._arrays[i][begin - start : end - start] if end <= self._starts[i + 1] else None

    def read(self, begin: int, end: int, into: Array) -> None:
        """Copy elements ``begin`` to ``end`` into an array of that length."""
        for place, piece in self.pieces(begin, end):
            into[place - begin : place - begin + piece.size] = piece

    def joined(self) -> Array:
        """Return all elements in one array: in place if they lie in one. There is at least one array."""
        filled = [array for array in self._arrays if array.size] or self._arrays[:1]
        return filled[0] if len(filled) == 1 else np.concatenate(filled)

    def write(self, begin: int, data: Array) -> None:
        """Copy an array to the elements from ``begin`` on."""
        for place, piece in self.pieces(begin, begin + data.size):
            piece[:] = data[place - begin : place - begin + piece.size]

    def addresses(self) -> list[int]:
        """Return the address of each array in this process."""
        return [array.__array_interface__["data"][0] for array in self._arrays]

    def ranges(self, begin: int, end: int, addresses: Sequence[int]) -> list[AddressRange]:
        """Return elements ``begin`` to ``end`` as (address, bytes) where the same arrays lie at other addresses."""
        found: list[AddressRange] = []
        i = bisect.bisect_right(self._starts, begin) - 1
        while begin < end:
            start, stop = self._starts[i], min(end, self._starts[i + 1])
            if begin < stop:
                itemsize = self._arrays[i].itemsize
                found.append((addresses[i] + (begin - start) * itemsize, (stop - begin) * itemsize))
            begin = stop
            i += 1
        return found


def zip_pieces(lists: Sequence[BufferList], begin: int, end: int) -> Iterator[tuple[int, list[Array]]]:
    """Yield ``(position in [0, end-begin), the same elements of each)`` for elements ``begin`` to ``end``."""
    cuts = {place for one in lists for place, _ in one.pieces(begin, end)}
    for low, high in pairwise(sorted({begin, end, *cuts})):
        yield low, [one.pieces(low, high)[0][1] for one in lists]
