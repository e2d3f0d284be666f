"""What the ranks of one machine do for each other inside a plane of several machines.

Two operations: everybody reduces a part of what all have (`Local.reduce`), and everybody takes what it wants of what
others show (`Local.share`). Data go through the slots of a `ShmPlane`; where they are large, and the kernel allows it,
ranks show each other where they lie, and read them there. For a rank that is alone on its machine both operations are
at most a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reigen.planes.base import Array, Region
from reigen.planes.direct import BLOCK_BYTES, cut_ranges, own_ranges, pairs
from reigen.planes.null import NullPlane
from reigen.planes.shm import SLOT_BYTES, ShmPlane
from reigen.planes.strung import Strung, together
from reigen.wire.crossmemory import Range

#: ``(one array of each rank, in rank order; where their combination goes)``: a method of a `Reducer`.
Combine = Callable[[Sequence[Array], Array], None]

_LINE = 64
#: An address and a length, as they are told.
_RANGE_BYTES = 16

NOTHING = Strung([])


@dataclass(frozen=True, slots=True)
class Wanted:
    """A part of what a rank shows, from element ``begin`` on, and where it goes."""

    begin: int
    into: Strung


class Local:
    """The ranks of this machine.

    Args:
        plane: of these ranks; its ``lacking`` and ``phase_ended`` are somebody else's.
    """

    def __init__(self, plane: ShmPlane | NullPlane) -> None:
        self.plane = plane
        self.rank, self.size = plane.rank, plane.size

    def copies(self, region: Region, begin: int, nbytes: int, storage: np.dtype[np.generic]) -> list[Array]:
        """A part of a region, every rank's copy of it."""
        if isinstance(self.plane, ShmPlane):
            return self.plane.copies(region.offset + begin, nbytes, storage)
        return [region.array[begin : begin + nbytes].view(storage)]

    def reduce_copies(
        self, copies: Sequence[Strung], out: Strung, combine: Combine, storage: np.dtype[np.generic]
    ) -> None:
        """Combine what is in everybody's registered memory, block by block; others do other parts meanwhile."""
        block = BLOCK_BYTES // storage.itemsize
        for begin in range(0, out.size, block):
            for _, (*inputs, result) in together([*copies, out], begin, min(out.size, begin + block)):
                combine(inputs, result)

    def reduce(
        self,
        parts: Sequence[Strung],
        out: Strung,
        combine: Combine,
        storage: np.dtype[np.generic],
        deadline: float,
        *,
        followed: bool = True,
    ) -> None:
        """Rank r combines what all ranks have as ``parts[r]``, of equal size on all of them, into its ``out``.

        ``out`` may be this rank's own ``parts[rank]``. Where a `share` of anything follows, whoever gets nothing here
        need not wait.
        """
        receivers = [rank for rank, part in enumerate(parts) if part.size]
        if not receivers:
            return
        if isinstance(self.plane, NullPlane):
            self.reduce_copies(parts, out, combine, storage)
            return
        nbytes, num_arrays = sum(part.size for part in parts) * storage.itemsize, sum(p.num_arrays for p in parts)
        if self.plane.is_read_directly(nbytes) and _RANGE_BYTES * num_arrays <= SLOT_BYTES // 2:
            self._reduce_directly(self.plane, parts, out, combine, storage, deadline)
            if not followed:
                self.plane.barrier(deadline)  # until now somebody may have been reading
            return
        room = SLOT_BYTES // len(receivers) // _LINE * _LINE // storage.itemsize
        places = {rank: index * room for index, rank in enumerate(receivers)}
        own, block = parts[self.rank], BLOCK_BYTES // storage.itemsize

        def fill(index: int, slot: NDArray[np.uint8]) -> None:
            for rank in receivers:
                begin, end = index * room, min(parts[rank].size, (index + 1) * room)
                if rank != self.rank and begin < end:
                    parts[rank].read(begin, end, _typed(slot, storage, places[rank], end - begin))

        def collect(index: int, slots: Sequence[NDArray[np.uint8]]) -> None:
            start, end = index * room, min(own.size, (index + 1) * room)
            for begin in range(start, end, block):
                for place, (contribution, result) in together([own, out], begin, min(end, begin + block)):
                    where = places[self.rank] + place - start
                    inputs = [_typed(slot, storage, where, result.size) for slot in slots]
                    inputs[self.rank] = contribution
                    combine(inputs, result)
            self.ended("SHM_REDUCE")

        num_rounds = -(-max(part.size for part in parts) // room)
        self.plane.rounds(num_rounds, fill, collect, deadline, waits_last=own.size > 0 or not followed)

    def share(
        self,
        shown: Strung,
        sizes: Sequence[int],
        wanted: Sequence[Wanted | None],
        storage: np.dtype[np.generic],
        deadline: float,
    ) -> None:
        """Everybody shows ``shown``, and takes what it wants of what rank r shows (``sizes[r]`` elements)."""
        if not any(sizes):
            return
        if isinstance(self.plane, NullPlane):
            if (part := wanted[0]) is not None:
                for _, (source, target) in together([shown.cut(part.begin, shown.size), part.into], 0, part.into.size):
                    target[:] = source
            return
        if self.plane.is_read_directly(sum(sizes) * storage.itemsize):
            self._share_directly(self.plane, shown, wanted, storage, deadline)
            return
        room = SLOT_BYTES // storage.itemsize

        def fill(index: int, slot: NDArray[np.uint8]) -> None:
            begin, end = index * room, min(shown.size, (index + 1) * room)
            if begin < end:
                shown.read(begin, end, _typed(slot, storage, 0, end - begin))

        def collect(index: int, slots: Sequence[NDArray[np.uint8]]) -> None:
            for slot, part in zip(slots, wanted, strict=True):
                if part is not None:
                    begin = max(part.begin, index * room)
                    end = min(part.begin + part.into.size, (index + 1) * room)
                    if begin < end:
                        part.into.write(begin - part.begin, _typed(slot, storage, begin - index * room, end - begin))

        self.plane.rounds(-(-max(sizes) // room), fill, collect, deadline)

    def _reduce_directly(
        self,
        plane: ShmPlane,
        parts: Sequence[Strung],
        out: Strung,
        combine: Combine,
        storage: np.dtype[np.generic],
        deadline: float,
    ) -> None:
        shown = _tell(plane, parts, deadline)
        own, itemsize = parts[self.rank], storage.itemsize
        block = BLOCK_BYTES // itemsize
        for begin in range(0, own.size, block):
            end = min(own.size, begin + block)
            rooms = [room[: (end - begin) * itemsize].view(storage) for room in plane.reader.scratch]
            for rank, tables in enumerate(shown):
                if rank != self.rank:
                    there = cut_ranges(tables[self.rank], begin * itemsize, end * itemsize)
                    plane.reader.read(rank, *pairs(there, [(rooms[rank].ctypes.data, rooms[rank].nbytes)]))
            for place, (contribution, result) in together([own, out], begin, end):
                inputs = [room[place - begin :][: result.size] for room in rooms]
                inputs[self.rank] = contribution
                combine(inputs, result)
        self.ended("SHM_REDUCE")

    def _share_directly(
        self,
        plane: ShmPlane,
        shown: Strung,
        wanted: Sequence[Wanted | None],
        storage: np.dtype[np.generic],
        deadline: float,
    ) -> None:
        if _RANGE_BYTES * shown.num_arrays > SLOT_BYTES // 2:
            shown = Strung([shown.joined()])
        for rank, ([there], part) in enumerate(zip(_tell(plane, [shown], deadline), wanted, strict=True)):
            if part is not None and part.into.size:
                begin, end = part.begin * storage.itemsize, (part.begin + part.into.size) * storage.itemsize
                plane.reader.read(rank, *pairs(cut_ranges(there, begin, end), own_ranges(part.into)))
        self.ended("MEMCPY_OUT_FUSION_BUFFER")
        plane.barrier(deadline)

    def arrive(self, deadline: float, *, waits: bool) -> None:
        """The first half of a barrier: only who ``waits`` knows that all have come. A `barrier` must follow."""
        if isinstance(self.plane, ShmPlane):
            self.plane.rounds(1, lambda *_: None, lambda *_: None, deadline, waits_last=waits)

    def ended(self, phase: str) -> None:
        """Tell whoever listens that a part of a collective is over."""
        if self.plane.phase_ended is not None:
            self.plane.phase_ended(phase)


def _typed(slot: NDArray[np.uint8], storage: np.dtype[np.generic], begin: int, count: int) -> Array:
    """``count`` elements of a slot, from element ``begin`` on."""
    return slot[begin * storage.itemsize :][: count * storage.itemsize].view(storage)


def _tell(plane: ShmPlane, arrays: Sequence[Strung], deadline: float) -> list[list[list[Range]]]:
    """Every rank tells where its arrays lie, as many on each."""
    tables = [own_ranges(array) for array in arrays]
    words = [word for table in tables for word in (len(table), *itertools.chain.from_iterable(table))]
    told: list[list[list[Range]]] = []

    def collect(_: int, slots: Sequence[NDArray[np.uint8]]) -> None:
        for slot in slots:
            told.append([])
            begin = 0
            for _array in arrays:
                count = int(slot[begin : begin + 8].view(np.uint64)[0])
                numbers = slot[begin + 8 : begin + 8 + _RANGE_BYTES * count].view(np.uint64).tolist()
                told[-1].append(list(zip(numbers[::2], numbers[1::2], strict=True)))
                begin += 8 + _RANGE_BYTES * count

    plane.exchange(np.array(words, np.uint64).view(np.uint8), collect, deadline)
    return told
