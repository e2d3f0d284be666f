"""What the ranks of one machine do for each other inside a plane of several machines.

Two operations on the slots of a `ShmPlane`: everybody reduces a part of what all have (`Local.reduce`), and everybody
takes what it wants of what others show (`Local.share`). For a rank that is alone on its machine both are at most a
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reigen.planes.base import Array, Region
from reigen.planes.direct import BLOCK_BYTES
from reigen.planes.null import NullPlane
from reigen.planes.shm import SLOT_BYTES, ShmPlane
from reigen.planes.strung import Strung, together

#: ``(one array of each rank, in rank order; where their combination goes)``: a method of a `Reducer`.
Combine = Callable[[Sequence[Array], Array], None]

_LINE = 64

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
