"""Allreduce of ordinary arrays by reading the other ranks' memory, which takes one copy where staging takes two.

1. The ranks show each other the addresses of their arrays.
2. Rank r reads slice r of the others' sources block by block, reduces it in rank order, and writes the result into its
   own target. Sources and targets may be the same arrays: of this rank's arrays no other rank needs slice r so far.
3. All wait until all have reduced (the first barrier after the addresses).
4. All ranks read the other slices of the result from the targets of their owners.
5. All wait once more: until then the arrays must stay as they are, since another rank may still read them.

Nothing is written to another process, so a rank that has given up, and uses its arrays for something else, harms only
results that raise an error anyway.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from reigen.backends.buffer_list import BufferList, rank_slice
from reigen.cluster.local_peers import LocalGroup
from reigen.errors import CollectiveError
from reigen.kernels.reduce import BlockReducer
from reigen.net import process_memory

#: A slice is reduced in blocks of so many bytes: a few of them fit the L2 cache of a core.
BLOCK_BYTES = 3 << 17
#: A process whose memory is gone is about to be seen dead.
_EXIT_GRACE_SECONDS = 1.0


def encode_addresses(source: BufferList, target: BufferList) -> NDArray[np.uint8]:
    """Return the addresses of a rank's sources, then of its targets, as bytes, for the others."""
    return np.array([source.addresses(), target.addresses()], np.uint64).view(np.uint8).reshape(-1)


def own_ranges(array: BufferList) -> list[process_memory.AddressRange]:
    """Return the addresses of the pieces of an array in this process."""
    return [(piece.__array_interface__["data"][0], piece.nbytes) for _, piece in array.pieces(0, array.size)]


def cut_ranges(
    ranges: Sequence[process_memory.AddressRange], begin: int, end: int
) -> list[process_memory.AddressRange]:
    """Bytes ``begin`` to ``end`` of what lies in ``ranges``."""
    found: list[process_memory.AddressRange] = []
    for address, nbytes in ranges:
        low, high = max(begin, 0), min(end, nbytes)
        if low < high:
            found.append((address + low, high - low))
        begin, end = begin - nbytes, end - nbytes
    return found


def pair_ranges(
    one: Sequence[process_memory.AddressRange], other: Sequence[process_memory.AddressRange]
) -> tuple[list[process_memory.AddressRange], list[process_memory.AddressRange]]:
    """The same bytes, as many on both sides, in pieces that are contiguous on both."""
    found: tuple[list[process_memory.AddressRange], list[process_memory.AddressRange]] = [], []
    ends = [itertools.accumulate((nbytes for _, nbytes in ranges), initial=0) for ranges in (one, other)]
    cuts = itertools.pairwise(sorted({*ends[0], *ends[1]}))
    rest = [iter(one), iter(other)]
    at = [(0, 0), (0, 0)]
    for low, high in cuts:
        for side in (0, 1):
            address, left = at[side]
            while not left:
                address, left = next(rest[side])
            found[side].append((address, high - low))
            at[side] = address + high - low, left - (high - low)
    return found


class CrossMemoryReader:
    """Reads from the processes of the other ranks; has room for a block of each."""

    def __init__(self, neighbours: LocalGroup) -> None:
        self._local_peers = neighbours
        self.rank, self.size = neighbours.rank, neighbours.size
        self._scratch: list[NDArray[np.uint8]] = []

    @property
    def scratch(self) -> list[NDArray[np.uint8]]:
        """For each other rank, `BLOCK_BYTES` bytes; for this rank none."""
        if not self._scratch:
            self._scratch = [np.empty(BLOCK_BYTES if r != self.rank else 0, np.uint8) for r in range(self.size)]
        return self._scratch

    def read(
        self, rank: int, ranges: Sequence[process_memory.AddressRange], into: Sequence[process_memory.AddressRange]
    ) -> None:
        """`crossmemory.read` from a rank.

        Raises:
            PeerLostError: it has died.
            CollectiveError: it cannot be read for another reason.
        """
        try:
            process_memory.read_process_memory(self._local_peers.pids[rank], ranges, into)
        except OSError as error:
            self._local_peers.wait_for_death(_EXIT_GRACE_SECONDS)
            raise self._local_peers.failure([rank]) or CollectiveError(
                str(error), ranks=(self._local_peers.ranks[rank],)
            ) from error


class CrossMemoryAllreduce:
    """One allreduce through cross-memory reads, a method for each of its steps.

    Args:
        reader: for the other ranks' memory.
        source: this rank's arrays.
        target: where the result goes, of the same sizes.
        address_tables: for each rank, what its `encode_addresses` gave.
        itemsize: bytes per element.
    """

    def __init__(
        self,
        reader: CrossMemoryReader,
        source: BufferList,
        target: BufferList,
        address_tables: Sequence[NDArray[np.uint8]],
        itemsize: int,
    ) -> None:
        self._reader, self._source, self._target, self._itemsize = reader, source, target, itemsize
        tables = [addresses.view(np.uint64).reshape(2, -1).tolist() for addresses in address_tables]
        self._sources: list[list[int]] = [table[0] for table in tables]
        self._targets: list[list[int]] = [table[1] for table in tables]
        self._slices = [rank_slice(source.size, rank, reader.size, itemsize) for rank in range(reader.size)]

    def reduce_own_slice(self, reducer: BlockReducer) -> None:
        """Reduce the slice of this rank: step 2 above."""
        low, high = self._slices[self._reader.rank]
        block = BLOCK_BYTES // self._itemsize
        for begin in range(low, high, block):
            self._reduce_block(begin, min(high, begin + block), reducer)

    def collect(self) -> None:
        """Read the other slices of the result: step 4 above."""
        own = self._targets[self._reader.rank]
        for rank, (begin, end) in enumerate(self._slices):
            if rank != self._reader.rank:
                remote = self._target.ranges(begin, end, self._targets[rank])
                self._reader.read(rank, remote, self._target.ranges(begin, end, own))

    def _reduce_block(self, begin: int, end: int, reducer: BlockReducer) -> None:
        scratch = self._reader.scratch
        for rank, buffer in enumerate(scratch):
            if rank != self._reader.rank:
                remote = self._source.ranges(begin, end, self._sources[rank])
                places = itertools.accumulate((nbytes for _, nbytes in remote), initial=buffer.ctypes.data)
                local = [(place, nbytes) for place, (_, nbytes) in zip(places, remote, strict=False)]
                self._reader.read(rank, remote, local)
        for (place, contribution), (_, result) in zip(
            self._source.pieces(begin, end), self._target.pieces(begin, end), strict=True
        ):
            first = (place - begin) * self._itemsize
            inputs = [buffer[first : first + result.nbytes].view(result.dtype) for buffer in scratch]
            inputs[self._reader.rank] = contribution
            reducer.reduce(inputs, result)
