"""Operations among the ranks of one host inside a backend of several hosts.

Two operations: each rank reduces a part of all ranks' data (`IntraHost.reduce`), and each rank reads parts of others'
data (`IntraHost.share`). Data go through the slots of a `ShmBackend`; where they are large, and the kernel allows it,
ranks exchange the addresses, and read straight from there. For a rank that is alone on its host both operations are at
most a copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reigen.backends.base import Array, MemoryRegion
from reigen.backends.buffer_list import BufferList, zip_pieces
from reigen.backends.null import NullBackend
from reigen.backends.shm.backend import SLOT_BYTES, ShmBackend
from reigen.backends.shm.cross_memory import BLOCK_BYTES, cut_ranges, own_ranges, pair_ranges
from reigen.net.process_memory import AddressRange

#: ``(one array of each rank, in rank order; array for their combination)``: a method of a `BlockReducer`.
Combine = Callable[[Sequence[Array], Array], None]

_LINE = 64
#: Address and length, as they are exchanged.
_RANGE_BYTES = 16

EMPTY_BUFFERS = BufferList([])


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Part of a rank's shared data, from element ``begin`` on, and its target."""

    begin: int
    into: BufferList


class IntraHost:
    """Operations among the ranks of this host, on their backend, whose listeners are the `HierarchicalBackend`'s."""

    def __init__(self, backend: ShmBackend | NullBackend) -> None:
        self.backend = backend
        self.rank, self.size = backend.rank, backend.size

    def copies(self, region: MemoryRegion, begin: int, nbytes: int, storage: np.dtype[np.generic]) -> list[Array]:
        """Return every rank's copy of a part of a region."""
        if isinstance(self.backend, ShmBackend):
            return self.backend.copies(region.offset + begin, nbytes, storage)
        return [region.array[begin : begin + nbytes].view(storage)]

    def reduce_copies(
        self, copies: Sequence[BufferList], out: BufferList, combine: Combine, storage: np.dtype[np.generic]
    ) -> None:
        """Combine a part of all ranks' registered memory, block by block; others do other parts at the same time."""
        block = BLOCK_BYTES // storage.itemsize
        for begin in range(0, out.size, block):
            for _, (*inputs, result) in zip_pieces([*copies, out], begin, min(out.size, begin + block)):
                combine(inputs, result)

    def reduce(
        self,
        parts: Sequence[BufferList],
        out: BufferList,
        combine: Combine,
        storage: np.dtype[np.generic],
        deadline: float,
        *,
        followed: bool = True,
    ) -> None:
        """Combine, on rank r, all ranks' ``parts[r]``, of equal size on all of them, into its ``out``.

        ``out`` may be this rank's own ``parts[rank]``. Where a `share` of anything follows, a rank that gets nothing
        here need not wait.
        """
        receivers = [rank for rank, part in enumerate(parts) if part.size]
        if not receivers:
            return
        if isinstance(self.backend, NullBackend):
            self.reduce_copies(parts, out, combine, storage)
            return
        nbytes, num_arrays = sum(part.size for part in parts) * storage.itemsize, sum(p.num_arrays for p in parts)
        if self.backend.uses_cross_memory(nbytes) and _RANGE_BYTES * num_arrays <= SLOT_BYTES // 2:
            self._reduce_directly(self.backend, parts, out, combine, storage, deadline)
            if not followed:
                self.backend.barrier(deadline)  # until now some rank may have been reading
            return
        capacity = SLOT_BYTES // len(receivers) // _LINE * _LINE // storage.itemsize
        places = {rank: index * capacity for index, rank in enumerate(receivers)}
        own, block = parts[self.rank], BLOCK_BYTES // storage.itemsize

        def fill(index: int, slot: NDArray[np.uint8]) -> None:
            for rank in receivers:
                begin, end = index * capacity, min(parts[rank].size, (index + 1) * capacity)
                if rank != self.rank and begin < end:
                    parts[rank].read(begin, end, _typed_view(slot, storage, places[rank], end - begin))

        def collect(index: int, slots: Sequence[NDArray[np.uint8]]) -> None:
            start, end = index * capacity, min(own.size, (index + 1) * capacity)
            for begin in range(start, end, block):
                for place, (contribution, result) in zip_pieces([own, out], begin, min(end, begin + block)):
                    where = places[self.rank] + place - start
                    inputs = [_typed_view(slot, storage, where, result.size) for slot in slots]
                    inputs[self.rank] = contribution
                    combine(inputs, result)
            self.ended("SHM_REDUCE")

        num_rounds = -(-max(part.size for part in parts) // capacity)
        self.backend.rounds(num_rounds, fill, collect, deadline, waits_last=own.size > 0 or not followed)

    def share(
        self,
        shared: BufferList,
        sizes: Sequence[int],
        requests: Sequence[ReadRequest | None],
        storage: np.dtype[np.generic],
        deadline: float,
    ) -> None:
        """Share ``shared``, and read the requested parts of rank r's (``sizes[r]`` elements)."""
        if not any(sizes):
            return
        if isinstance(self.backend, NullBackend):
            if (part := requests[0]) is not None:
                for _, (source, target) in zip_pieces(
                    [shared.cut(part.begin, shared.size), part.into], 0, part.into.size
                ):
                    target[:] = source
            return
        if self.backend.uses_cross_memory(sum(sizes) * storage.itemsize):
            self._share_directly(self.backend, shared, requests, storage, deadline)
            return
        capacity = SLOT_BYTES // storage.itemsize

        def fill(index: int, slot: NDArray[np.uint8]) -> None:
            begin, end = index * capacity, min(shared.size, (index + 1) * capacity)
            if begin < end:
                shared.read(begin, end, _typed_view(slot, storage, 0, end - begin))

        def collect(index: int, slots: Sequence[NDArray[np.uint8]]) -> None:
            for slot, part in zip(slots, requests, strict=True):
                if part is not None:
                    begin = max(part.begin, index * capacity)
                    end = min(part.begin + part.into.size, (index + 1) * capacity)
                    if begin < end:
                        part.into.write(
                            begin - part.begin, _typed_view(slot, storage, begin - index * capacity, end - begin)
                        )

        self.backend.rounds(-(-max(sizes) // capacity), fill, collect, deadline)

    def _reduce_directly(
        self,
        backend: ShmBackend,
        parts: Sequence[BufferList],
        out: BufferList,
        combine: Combine,
        storage: np.dtype[np.generic],
        deadline: float,
    ) -> None:
        address_tables = _exchange_addresses(backend, parts, deadline)
        own, itemsize = parts[self.rank], storage.itemsize
        block = BLOCK_BYTES // itemsize
        for begin in range(0, own.size, block):
            end = min(own.size, begin + block)
            buffers = [buffer[: (end - begin) * itemsize].view(storage) for buffer in backend.reader.scratch]
            for rank, tables in enumerate(address_tables):
                if rank != self.rank:
                    remote_ranges = cut_ranges(tables[self.rank], begin * itemsize, end * itemsize)
                    backend.reader.read(
                        rank, *pair_ranges(remote_ranges, [(buffers[rank].ctypes.data, buffers[rank].nbytes)])
                    )
            for place, (contribution, result) in zip_pieces([own, out], begin, end):
                inputs = [buffer[place - begin :][: result.size] for buffer in buffers]
                inputs[self.rank] = contribution
                combine(inputs, result)
        self.ended("SHM_REDUCE")

    def _share_directly(
        self,
        backend: ShmBackend,
        shared: BufferList,
        requests: Sequence[ReadRequest | None],
        storage: np.dtype[np.generic],
        deadline: float,
    ) -> None:
        if _RANGE_BYTES * shared.num_arrays > SLOT_BYTES // 2:
            shared = BufferList([shared.joined()])
        for rank, ([remote_ranges], part) in enumerate(
            zip(_exchange_addresses(backend, [shared], deadline), requests, strict=True)
        ):
            if part is not None and part.into.size:
                begin, end = part.begin * storage.itemsize, (part.begin + part.into.size) * storage.itemsize
                backend.reader.read(rank, *pair_ranges(cut_ranges(remote_ranges, begin, end), own_ranges(part.into)))
        self.ended("MEMCPY_OUT_FUSION_BUFFER")
        backend.barrier(deadline)

    def arrive(self, deadline: float, *, waits: bool) -> None:
        """Do the first half of a barrier: only a rank that ``waits`` knows that all came. A `barrier` must follow."""
        if isinstance(self.backend, ShmBackend):
            self.backend.rounds(1, lambda *_: None, lambda *_: None, deadline, waits_last=waits)

    def ended(self, phase: str) -> None:
        """Report the end of a part of a collective to the listener."""
        if self.backend.phase_ended is not None:
            self.backend.phase_ended(phase)


def _typed_view(slot: NDArray[np.uint8], storage: np.dtype[np.generic], begin: int, count: int) -> Array:
    """Return ``count`` elements of a slot, from element ``begin`` on."""
    return slot[begin * storage.itemsize :][: count * storage.itemsize].view(storage)


def _exchange_addresses(
    backend: ShmBackend, arrays: Sequence[BufferList], deadline: float
) -> list[list[list[AddressRange]]]:
    """Exchange addresses of arrays, as many on each rank."""
    tables = [own_ranges(array) for array in arrays]
    numbers_sent = [number for table in tables for number in (len(table), *itertools.chain.from_iterable(table))]
    addresses: list[list[list[AddressRange]]] = []

    def collect(_: int, slots: Sequence[NDArray[np.uint8]]) -> None:
        for slot in slots:
            addresses.append([])
            begin = 0
            for _array in arrays:
                count = int(slot[begin : begin + 8].view(np.uint64)[0])
                numbers = slot[begin + 8 : begin + 8 + _RANGE_BYTES * count].view(np.uint64).tolist()
                addresses[-1].append(list(zip(numbers[::2], numbers[1::2], strict=True)))
                begin += 8 + _RANGE_BYTES * count

    backend.exchange(np.array(numbers_sent, np.uint64).view(np.uint8), collect, deadline)
    return addresses
