"""The backend of the ranks of one host: shared memory.

Registered memory (a `MemoryRegion`) is reduced where it lies. Rank r owns slice r of every buffer: block by block,
small enough for its cache, it adds that slice of all copies in rank order and writes the sum into all copies. Each rank
reads S and writes S bytes for a buffer of S bytes, whatever the number of ranks. One barrier at the end: that
every rank's data is there is known before the call (engine: it was announced because all ranks had submitted it).

In elastic jobs a `reigen.backends.shm.reduction_journal` does that, by which others can finish what a dead rank began.

Ordinary arrays are staged: every rank has four slots in its segment, used in turn. Chunk by chunk the ranks put what
others will reduce into a slot, reduce their own slice (their own contribution to it stays where it is), and collect
the slices of the others. Small messages, and all between two ranks, are not cut into slices: every rank puts all of it
into a slot and adds all of it, in rank order too, so that one barrier a chunk is enough.

Between more than two ranks, large ordinary arrays are not staged where the kernel lets the ranks read each other's
memory: see `backends.shm.cross_memory`. For two, finding every page of the other process takes the kernel longer than
the second copy takes them.

Why four slots: slot k % 4 is filled again for chunk k + 4. With `_filled` and `_reduced` as the two turnstiles:

a. A rank posts filled(k) after filling k, and fills k + 1 before it waits for filled(k), if that is of the same
   operation (so copying overlaps with waiting). So when it has waited for filled(k), all have collected k - 2.
b. It fills k + 2 after that wait: the chunk that used this slot before, k - 2, is collected. Who does not wait for an
   operation's last chunk (`rounds`) is ahead likewise, and therefore fills nothing ahead in the next operation.
c. What a rank has reduced goes to the slice of the slot that it had not filled, since it is its own: no rank reads that
   but to collect it, after waiting for reduced(k) of all ranks.

Every element's sum is taken in rank order wherever it is cut, so results have the same bits for all sizes of chunk and
fusion.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from reigen.backends.base import (
    Array,
    BackendCapabilities,
    MemoryRegion,
    MissingRanksCallback,
    PhaseCallback,
    ProgressHook,
    ReduceBuffer,
)
from reigen.backends.buffer_list import BufferList, rank_slice
from reigen.backends.null import NullBackend
from reigen.backends.shm.cross_memory import BLOCK_BYTES, CrossMemoryAllreduce, CrossMemoryReader, encode_addresses
from reigen.backends.shm.region_cache import RegionCache
from reigen.backends.shm.sequence_barrier import SequenceBarrier
from reigen.cluster.local_peers import LocalGroup, MappedRange
from reigen.errors import CollectiveError, SharedMemoryError
from reigen.kernels.reduce import BlockReducer, Reduction
from reigen.net import process_memory
from reigen.net.futex import FutexWord
from reigen.net.shm_segment import round_up
from reigen.resources import memory
from reigen.resources.limits import explain_limit
from reigen.types import DType

_LINE = 64
#: Where, in the line of a counter, its rank says that it sleeps.
_SLEEPING = 32
_WORDS_BYTES = 4096
_NUM_SLOTS = 4
_SECRET_BYTES = 16
#: Where phases are not reported: does nothing, and that in C.
_ignore_phase = cast("PhaseCallback", bool)
#: What a rank tells that cannot know how much memory is left.
_UNKNOWN = 1 << 62
SLOT_BYTES = 1 << 20
#: Up to here every rank reduces the whole message, in one go: more barriers would cost more than the extra reading.
SMALL_BYTES = 1 << 15
#: Between two ranks, the size of a chunk, which lies in both caches, and up to where there is only one.
PAIR_CHUNK_BYTES, PAIR_SMALL_BYTES = 1 << 19, 1 << 16
#: So many views of slots are kept.
_MAX_SMALL_VIEWS = 256
#: From here on ranks read each other's arrays, where they may; below, staging takes fewer barriers.
CROSS_MEMORY_BYTES = 1 << 23


def shm_backend_bytes() -> int:
    """Size of one rank's part of the segment: counters, then slots."""
    return _WORDS_BYTES + _NUM_SLOTS * SLOT_BYTES


def typed_view(slot: NDArray[np.uint8], storage: np.dtype[np.generic], count: int) -> Array:
    """The first ``count`` elements of a slot."""
    return slot[: count * storage.itemsize].view(storage)


def _best_fit(nbytes: int, free: Mapping[int, int]) -> int | None:
    """Of free ranges, by offset and with their sizes, the smallest that holds ``nbytes`` without waste."""
    fitting = [(size, offset) for offset, size in free.items() if nbytes <= size <= 2 * nbytes]
    return min(fitting)[1] if fitting else None


class ShmBackend:
    """`reigen.backends.base.Backend` over the segments of this host's ranks.

    Args:
        neighbours: the ranks.
        part: `shm_backend_bytes` of every rank's segment.
        looks: how often to look for the others before sleeping; 0 with more ranks than cores.
        direct_bytes: from which size on ordinary arrays are read directly, after `try_cross_memory`.
    """

    name = "shm"
    capabilities = BackendCapabilities(registered_memory=True, ordered_sums=True, abortable=True)

    def __init__(
        self, neighbours: LocalGroup, part: MappedRange, looks: int, direct_bytes: int = CROSS_MEMORY_BYTES
    ) -> None:
        self.rank, self.size = neighbours.rank, neighbours.size
        self.phase_ended: PhaseCallback | None = None
        self.ranks_missing: MissingRanksCallback | None = None
        self.progress_hook: ProgressHook | None = None
        self._local_peers = neighbours
        self._looks = looks
        self._filled, self._reduced = (
            SequenceBarrier(
                [FutexWord(array, line * _LINE) for array in part.arrays],
                [FutexWord(array, line * _LINE + _SLEEPING) for array in part.arrays],
                neighbours,
                looks,
                self._report_missing,
                self._idle,
            )
            for line in range(2)
        )
        self._slots = [
            [array[_WORDS_BYTES + k * SLOT_BYTES :][:SLOT_BYTES] for array in part.arrays] for k in range(_NUM_SLOTS)
        ]
        #: registered memory in use and, after free(), waiting to be used again; by offset
        self._regions: dict[int, MappedRange] = {}
        self._free: dict[int, MappedRange] = {}
        #: the same of shared memory, which only rank 0's segment has: every rank's view of it
        self._shared: dict[int, NDArray[np.uint8]] = {}
        self._free_shared: dict[int, NDArray[np.uint8]] = {}
        self._next_offset = 0
        #: the size of this rank's segment before the last allocation; -1 where it took what had been freed
        self._grown_from = -1
        #: where backends that were split off, and closed, had their parts in this rank's segment
        self._free_parts: list[int] = []
        #: called by close()
        self._give_back: Callable[[], None] = lambda: None
        #: of the last allreduce: the next one is often the same
        self._reducer: BlockReducer | None = None
        #: of small allreduces: the beginnings of a slot, by its number, the bytes and the type
        self._small_views: dict[tuple[int, int, str], list[Array]] = {}
        self._small_bytes = PAIR_SMALL_BYTES if self.size == 2 else SMALL_BYTES
        self._reads_directly = False
        self._direct_bytes = direct_bytes
        #: in an elastic job, of regions that outlive this backend
        self.region_cache: RegionCache | None = None
        #: reads the other ranks' memory, if `try_cross_memory` has found that it may
        self.reader = CrossMemoryReader(neighbours)

    def try_cross_memory(self, deadline: float) -> bool:
        """Find out whether all ranks may read each other's memory, and do so from now on if they may. Collective."""
        secret = np.frombuffer(os.urandom(_SECRET_BYTES), np.uint8)
        address = np.array([secret.ctypes.data], np.uint64).view(np.uint8)
        answers: list[bool] = []

        def ask(_: int, slots: Sequence[NDArray[np.uint8]]) -> None:
            for pid, slot in zip(self._local_peers.pids, slots, strict=True):
                remote_address = int(slot[:8].view(np.uint64)[0])
                answers.append(
                    process_memory.can_read_process_memory(pid, remote_address, slot[8 : 8 + _SECRET_BYTES].tobytes())
                )

        self.exchange(np.concatenate([address, secret]), ask, deadline)
        readable: list[bool] = []
        own = np.array([all(answers)], np.uint8)
        self.exchange(own, lambda _, slots: readable.extend(bool(slot[0]) for slot in slots), deadline)
        self._reads_directly = all(readable)
        return self._reads_directly

    def uses_cross_memory(self, nbytes: int) -> bool:
        """Return whether ordinary arrays of so many bytes are read where they are."""
        return self._reads_directly and nbytes >= self._direct_bytes

    # -- allreduce ----------------------------------------------------------------------------------------------------

    def allreduce(self, buffers: Sequence[ReduceBuffer], reduction: Reduction, deadline: float) -> None:
        """Implement `Backend.allreduce`."""
        reducer = self._reducer
        if reducer is None or reducer.reduction is not reduction:
            reducer = self._reducer = BlockReducer(reduction)
        if buffers and buffers[0].offset >= 0:
            for buffer in buffers:
                self._reduce_in_place(buffer, reducer, reduction)
            self._ended("SHM_ALLREDUCE")
            self._wait_reduced(deadline)
            return
        nbytes = 0
        for buffer in buffers:
            nbytes += buffer.source.nbytes
        if nbytes > self._small_bytes:
            self._reduce_large(buffers, nbytes, reducer, deadline)
            return
        # One round of `rounds`, spelled out: of a small message most of the time would be the calls.
        filled, ended = self._filled, self.phase_ended or _ignore_phase
        slot = filled.count % _NUM_SLOTS
        views = self._small_views.get((slot, nbytes, reduction.dtype.name))
        if views is None:
            views = self._view_small(slot, nbytes, reduction.dtype)
        own, end = views[self.rank], 0
        if len(buffers) == 1:
            total = buffers[0].target
            own[:] = buffers[0].source
        else:
            total = np.empty(own.size, own.dtype)
            for buffer in buffers:
                begin, end = end, end + buffer.source.size
                own[begin:end] = buffer.source
        ended("MEMCPY_IN_FUSION_BUFFER")
        filled.wait(filled.post(), deadline)
        ended("WAIT_FOR_OTHER_RANKS")
        reducer.reduce(views, total)
        ended("SHM_ALLREDUCE")
        if end:
            BufferList([b.target for b in buffers]).write(0, total)
        ended("MEMCPY_OUT_FUSION_BUFFER")

    def _reduce_large(
        self, buffers: Sequence[ReduceBuffer], nbytes: int, reducer: BlockReducer, deadline: float
    ) -> None:
        source, target = BufferList([b.source for b in buffers]), BufferList([b.target for b in buffers])
        if self.size == 2:
            self._reduce_pair(source, target, reducer, deadline)
        elif self.uses_cross_memory(nbytes) and 16 * len(buffers) <= SLOT_BYTES:
            self._reduce_directly(source, target, reducer, deadline)
        else:
            self._reduce_staged(source, target, reducer, deadline)

    def _view_small(self, slot: int, nbytes: int, dtype: DType) -> list[Array]:
        """The beginning of every rank's slot as elements; kept, until there are too many of them."""
        if len(self._small_views) >= _MAX_SMALL_VIEWS:
            self._small_views.clear()
        views = self._small_views[slot, nbytes, dtype.name] = [
            s[:nbytes].view(dtype.storage) for s in self._slots[slot]
        ]
        return views

    def _reduce_in_place(self, buffer: ReduceBuffer, reducer: BlockReducer, reduction: Reduction) -> None:
        if buffer.journal is not None:
            buffer.journal.reduce(reducer)
            return
        storage = reduction.dtype.storage
        copies = self.copies(buffer.offset, buffer.target.nbytes, storage)
        low, high = rank_slice(buffer.target.size, self.rank, self.size, storage.itemsize)
        own = copies[self.rank]
        others = [copy for rank, copy in enumerate(copies) if rank != self.rank]
        block = BLOCK_BYTES // storage.itemsize
        for begin in range(low, high, block):
            end = min(high, begin + block)
            total = own[begin:end]
            reducer.reduce([copy[begin:end] for copy in copies], total)
            for other in others:
                other[begin:end] = total

    def reduce_to_owners(
        self, buffer: ReduceBuffer, counts: Sequence[int], reduction: Reduction, deadline: float
    ) -> None:
        """Implement `Backend.reduce_to_owners`. Each rank reads a part of every copy, and writes it in its own."""
        reducer, storage = BlockReducer(reduction), reduction.dtype.storage
        copies = self.copies(buffer.offset, buffer.target.nbytes, storage)
        low, high = sum(counts[: self.rank]), sum(counts[: self.rank + 1])
        block = BLOCK_BYTES // storage.itemsize
        for begin in range(low, high, block):
            end = min(high, begin + block)
            reducer.reduce([copy[begin:end] for copy in copies], copies[self.rank][begin:end])
        self._ended("SHM_REDUCE")
        self._wait_reduced(deadline)

    def copies(self, offset: int, nbytes: int, storage: np.dtype[np.generic]) -> list[Array]:
        """A part of registered memory, every rank's copy of it."""
        for start, mapped in self._regions.items():
            if start <= offset and offset + nbytes <= start + mapped.arrays[0].size:
                begin = offset - start
                return [array[begin : begin + nbytes].view(storage) for array in mapped.arrays]
        raise AssertionError(f"no registered memory at offset {offset}, {nbytes} bytes")

    def _reduce_staged(self, source: BufferList, target: BufferList, reducer: BlockReducer, deadline: float) -> None:
        storage = reducer.reduction.dtype.storage
        chunk = SLOT_BYTES // storage.itemsize
        bounds = [(b, min(source.size, b + chunk)) for b in range(0, source.size, chunk)]
        steps: list[tuple[int, list[Array]]] = []

        def fill(index: int) -> None:
            begin, end = bounds[index]
            slots = self._slots[self._filled.count % _NUM_SLOTS]
            views = [typed_view(slot, storage, end - begin) for slot in slots]
            low, high = rank_slice(end - begin, self.rank, self.size, storage.itemsize)
            source.read(begin, begin + low, views[self.rank][:low])
            source.read(begin + high, end, views[self.rank][high:])
            steps.append((self._filled.post(), views))
            self._ended("MEMCPY_IN_FUSION_BUFFER")

        fill(0)
        for index, (begin, end) in enumerate(bounds):
            if index + 1 < len(bounds):
                fill(index + 1)
            step, views = steps[index]
            self._filled.wait(step, deadline)
            self._ended("WAIT_FOR_OTHER_RANKS")
            slices = [rank_slice(end - begin, rank, self.size, storage.itemsize) for rank in range(self.size)]
            self._reduce_slice(source, target, views, begin, slices[self.rank], reducer)
            self._ended("SHM_ALLREDUCE")
            self._wait_reduced(deadline)
            for rank, (low, high) in enumerate(slices):
                if rank != self.rank:
                    target.write(begin + low, views[rank][low:high])
            self._ended("MEMCPY_OUT_FUSION_BUFFER")

    def _reduce_pair(self, source: BufferList, target: BufferList, reducer: BlockReducer, deadline: float) -> None:
        """Reduce between two ranks: each adds everything.

        It takes its own contribution from its slot, as the other does: both get the same bits, whatever becomes of the
        source meanwhile.
        """
        storage = reducer.reduction.dtype.storage
        chunk = PAIR_CHUNK_BYTES // storage.itemsize
        filled = self._filled

        def fill(begin: int) -> tuple[int, list[Array]]:
            end = min(source.size, begin + chunk)
            views = [typed_view(slot, storage, end - begin) for slot in self._slots[filled.count % _NUM_SLOTS]]
            source.read(begin, end, views[self.rank])
            self._ended("MEMCPY_IN_FUSION_BUFFER")
            return filled.post(), views

        following = fill(0)
        for begin in range(0, source.size, chunk):
            step, views = following
            end = begin + views[0].size
            if end < source.size:
                following = fill(end)
            filled.wait(step, deadline)
            self._ended("WAIT_FOR_OTHER_RANKS")
            for place, result in target.pieces(begin, end):
                here = slice(place - begin, place - begin + result.size)
                reducer.reduce([view[here] for view in views], result)
            self._ended("SHM_ALLREDUCE")

    def _reduce_slice(
        self,
        source: BufferList,
        target: BufferList,
        views: Sequence[Array],
        begin: int,
        own: tuple[int, int],
        reducer: BlockReducer,
    ) -> None:
        """Reduce this rank's slice of a chunk, taking its own contribution from where it is, into target and slot."""
        block = BLOCK_BYTES // views[0].itemsize
        low, high = begin + own[0], begin + own[1]
        pairs = zip(source.pieces(low, high), target.pieces(low, high), strict=True)
        for (place, contribution), (_, result) in pairs:
            for first in range(0, result.size, block):
                in_result = slice(first, min(result.size, first + block))
                in_slot = slice(place - begin + in_result.start, place - begin + in_result.stop)
                inputs = [view[in_slot] for view in views]
                inputs[self.rank] = contribution[in_result]
                reducer.reduce(inputs, result[in_result])
                views[self.rank][in_slot] = result[in_result]

    def _reduce_directly(self, source: BufferList, target: BufferList, reducer: BlockReducer, deadline: float) -> None:
        own = encode_addresses(source, target)
        address_tables: list[NDArray[np.uint8]] = []
        self.exchange(own, lambda _, slots: address_tables.extend(slot[: own.size].copy() for slot in slots), deadline)
        work = CrossMemoryAllreduce(self.reader, source, target, address_tables, reducer.reduction.dtype.itemsize)
        work.reduce_own_slice(reducer)
        self._ended("SHM_ALLREDUCE")
        self._wait_reduced(deadline)
        work.collect()
        self._ended("MEMCPY_OUT_FUSION_BUFFER")
        self._wait_reduced(deadline)

    # -- collectives that are one exchange per chunk ------------------------------------------------------------------

    def reduce_scatter(
        self, source: Array, counts: Sequence[int], target: Array, reduction: Reduction, deadline: float
    ) -> None:
        """Implement `Backend.reduce_scatter`."""
        reducer, storage = BlockReducer(reduction), reduction.dtype.storage
        part = max(1, SLOT_BYTES // storage.itemsize // self.size)
        starts = list(itertools.accumulate(counts, initial=0))

        def fill(index: int, slot: NDArray[np.uint8]) -> None:
            places = slot.view(storage)
            for rank, count in enumerate(counts):
                piece = source[starts[rank] :][:count][index * part : (index + 1) * part]
                places[rank * part : rank * part + piece.size] = piece

        def collect(index: int, slots: Sequence[NDArray[np.uint8]]) -> None:
            out = target[index * part : (index + 1) * part]
            begin = self.rank * part
            reducer.reduce([slot.view(storage)[begin : begin + out.size] for slot in slots], out)
            self._ended("SHM_REDUCESCATTER")

        self.rounds(-(-max(counts, default=0) // part), fill, collect, deadline)

    def allgather(self, source: Array, counts: Sequence[int], target: Array, deadline: float) -> None:
        """Implement `Backend.allgather`."""
        chunk = SLOT_BYTES // target.itemsize
        starts = list(itertools.accumulate(counts, initial=0))

        def fill(index: int, slot: NDArray[np.uint8]) -> None:
            piece = source[index * chunk : (index + 1) * chunk]
            typed_view(slot, target.dtype, piece.size)[:] = piece

        def collect(index: int, slots: Sequence[NDArray[np.uint8]]) -> None:
            for rank, slot in enumerate(slots):
                out = target[starts[rank] :][: counts[rank]][index * chunk : (index + 1) * chunk]
                out[:] = typed_view(slot, target.dtype, out.size)

        self.rounds(-(-max(counts, default=0) // chunk), fill, collect, deadline)

    def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
        """Implement `Backend.broadcast`."""
        chunk = SLOT_BYTES // target.itemsize

        def fill(index: int, slot: NDArray[np.uint8]) -> None:
            if source is not None:
                piece = source[index * chunk : (index + 1) * chunk]
                typed_view(slot, target.dtype, piece.size)[:] = piece

        def collect(index: int, slots: Sequence[NDArray[np.uint8]]) -> None:
            out = target[index * chunk : (index + 1) * chunk]
            if source is None:
                out[:] = typed_view(slots[root], target.dtype, out.size)
            elif target is not source:
                out[:] = source[index * chunk : (index + 1) * chunk]

        self.rounds(-(-target.size // chunk), fill, collect, deadline)

    def alltoall(self, source: Array, counts: Sequence[Sequence[int]], target: Array, deadline: float) -> None:
        """Implement `Backend.alltoall`."""
        part = max(1, SLOT_BYTES // target.itemsize // self.size)
        sent = list(itertools.accumulate(counts[self.rank], initial=0))
        received = [row[self.rank] for row in counts]
        starts = list(itertools.accumulate(received, initial=0))

        def fill(index: int, slot: NDArray[np.uint8]) -> None:
            places = slot.view(target.dtype)
            for rank, count in enumerate(counts[self.rank]):
                piece = source[sent[rank] :][:count][index * part : (index + 1) * part]
                places[rank * part : rank * part + piece.size] = piece

        def collect(index: int, slots: Sequence[NDArray[np.uint8]]) -> None:
            begin = self.rank * part
            for rank, slot in enumerate(slots):
                out = target[starts[rank] :][: received[rank]][index * part : (index + 1) * part]
                out[:] = slot.view(target.dtype)[begin : begin + out.size]

        self.rounds(-(-max(map(max, counts), default=0) // part), fill, collect, deadline)

    def barrier(self, deadline: float) -> None:
        """Implement `Backend.barrier`."""
        self.rounds(1, lambda *_: None, lambda *_: None, deadline)

    def exchange(
        self, data: NDArray[np.uint8], collect: Callable[[int, Sequence[NDArray[np.uint8]]], None], deadline: float
    ) -> None:
        """Show ``data``, at most a slot, to all ranks; ``collect(0, the slots of all)``."""

        def fill(_: int, slot: NDArray[np.uint8]) -> None:
            slot[: data.size] = data

        self.rounds(1, fill, collect, deadline)

    def rounds(
        self,
        count: int,
        fill: Callable[[int, NDArray[np.uint8]], None],
        collect: Callable[[int, Sequence[NDArray[np.uint8]]], None],
        deadline: float,
        *,
        waits_last: bool = True,
    ) -> None:
        """Repeat ``count`` times: ``fill(i, own slot)``, wait for all, ``collect(i, the slots of all)``.

        A rank to which the others' slots are nothing need not wait in the last round (``waits_last``), if the next
        operation is rounds in which it does: it is one slot ahead then, as by (a).
        """
        for index in range(count):
            slots = self._slots[self._filled.count % _NUM_SLOTS]
            fill(index, slots[self.rank])
            self._ended("MEMCPY_IN_FUSION_BUFFER")
            step = self._filled.post()
            if index == count - 1 and not waits_last:
                return
            self._filled.wait(step, deadline)
            self._ended("WAIT_FOR_OTHER_RANKS")
            collect(index, slots)
            self._ended("MEMCPY_OUT_FUSION_BUFFER")

    def _wait_reduced(self, deadline: float) -> None:
        self._reduced.wait(self._reduced.post(), deadline)
        self._ended("WAIT_FOR_OTHER_RANKS")

    def _report_missing(self, members: Sequence[int]) -> None:
        if self.ranks_missing is not None:
            self.ranks_missing(members)

    def _idle(self) -> bool:
        """Run the caller's progress callback; return whether there is one."""
        if self.progress_hook is None:
            return False
        self.progress_hook.work_if_readable()
        return True

    def _ended(self, phase: str) -> None:
        if self.phase_ended is not None:
            self.phase_ended(phase)

    # -- registered memory --------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, deadline: float) -> MemoryRegion:
        """Implement `Backend.allocate`. A freed range of up to twice the size is used before the segments grow."""
        offset = _best_fit(nbytes, {offset: mapped.arrays[0].size for offset, mapped in self._free.items()})
        if offset is not None:
            mapped = self._free.pop(offset)
            self._grown_from = -1
        elif self.region_cache is not None:
            self._grown_from = -1
            mapped = self._map_regions(self.region_cache, nbytes, deadline)
            offset = self._new_offset(mapped.arrays[0].size)
        else:
            self._grown_from = self._local_peers.reserved_bytes
            mapped = self._grow(nbytes, deadline)
            offset = self._new_offset(mapped.arrays[0].size)
        self._regions[offset] = mapped
        return MemoryRegion(offset, nbytes, mapped.arrays[self.rank][:nbytes], tuple(a[:nbytes] for a in mapped.arrays))

    def allocate_shared(self, nbytes: int, deadline: float) -> MemoryRegion:
        """Implement `Backend.allocate_shared`: in rank 0's segment; rank 0 clears it when it is used again."""
        offset = _best_fit(nbytes, {offset: array.size for offset, array in self._free_shared.items()})
        if offset is not None:
            array = self._free_shared.pop(offset)
            self._grown_from = -1
            if self.rank == 0:
                array[:] = 0
            self.barrier(deadline)
        else:
            self._grown_from = self._local_peers.reserved_bytes
            begin = self._reserve(nbytes if self.rank == 0 else 0, "shared memory (parameters)", deadline)[0]
            array = self._local_peers.map_one(0, begin, round_up(nbytes))
            offset = self._new_offset(array.size)
        self._shared[offset] = array
        return MemoryRegion(offset, nbytes, array[:nbytes], (array[:nbytes],) * self.size)

    def _new_offset(self, nbytes: int) -> int:
        offset = self._next_offset
        self._next_offset += nbytes
        return offset

    def _grow(self, nbytes: int, deadline: float) -> MappedRange:
        begin = self._local_peers.reserved_bytes
        offsets = self._reserve(nbytes, "registered memory (gradient buckets)", deadline)
        return self._local_peers.map(offsets, self._local_peers.reserved_bytes - begin)

    def _map_regions(self, cache: RegionCache, nbytes: int, deadline: float) -> MappedRange:
        """Map a region of each rank: one that it has had in an earlier view, or a new one; see `region_cache`."""
        what, pids = "registered memory (gradient buckets)", self._local_peers.pids
        own = cache.find(nbytes, pids)
        failure: Exception | None = None
        self._check_free_memory(nbytes if own is None else 0, what, deadline)
        try:
            own = cache.create(nbytes, what) if own is None else own
        except (SharedMemoryError, OSError) as error:
            failure = error
        place = [-1, 0] if own is None else [own.segment.fd, own.segment.inode]
        places = self._allgather_integers(place, deadline)
        short = [member for member, (fd, _) in enumerate(places) if fd < 0]
        if own is None or short:
            raise failure or self._short(short, nbytes, what)
        size = round_up(nbytes)
        arrays: list[NDArray[np.uint8]] = []
        for member, (pid, (fd, inode)) in enumerate(zip(pids, places, strict=True)):
            if member == self.rank:
                arrays.append(cache.map_own(own, size, pids))
                continue
            try:
                arrays.append(cache.map_other(pid, fd, inode, size))
            except OSError as error:
                text, ranks = str(explain_limit(error)), (self._local_peers.ranks[member],)
                raise self._local_peers.failure([member]) or CollectiveError(text, ranks=ranks) from error
        cache.drop_unused()
        return MappedRange(tuple(arrays))

    def _reserve(self, nbytes: int, what: str, deadline: float) -> list[int]:
        """Let every segment grow (none for 0 bytes); where each of them did.

        Raises:
            SharedMemoryError: on every rank, when one has not enough; nothing has grown then.
        """
        begin = self._local_peers.reserved_bytes
        self._check_free_memory(nbytes, what, deadline)
        failure: SharedMemoryError | None = None
        try:
            if nbytes:
                self._local_peers.reserve(nbytes, what)
        except SharedMemoryError as error:
            failure = error
        offsets = [offset for (offset,) in self._allgather_integers([-1 if failure is not None else begin], deadline)]
        if -1 in offsets:
            self._local_peers.shrink(begin)
            raise failure or self._short([member for member, offset in enumerate(offsets) if offset < 0], nbytes, what)
        return offsets

    def _check_free_memory(self, nbytes: int, what: str, deadline: float) -> None:
        """Check, before any is taken, that there is room for the needs of all members together; some may be 0.

        Raises:
            SharedMemoryError: on every rank, when one sees too little.
        """
        available = memory.available_memory()
        left = _UNKNOWN if available.num_bytes is None else available.num_bytes
        replies = self._allgather_integers([round_up(nbytes), left], deadline)
        total = sum(needed for needed, _ in replies)
        short = [m for m, (needed, left) in enumerate(replies) if needed and left < total + memory.KEEP_FREE_BYTES]
        if self.rank in short:
            num = sum(needed > 0 for needed, _ in replies)
            what = f"{what} ({num} rank(s) of this host)"
            raise SharedMemoryError.for_request(
                total,
                available.num_bytes,
                what,
                available.limit,
                keep_free_bytes=memory.KEEP_FREE_BYTES,
                where="on this rank" if num == 1 else "on this host",
            )
        if short:
            raise self._short(short, nbytes, what)

    def _short(self, members: Sequence[int], nbytes: int, what: str) -> SharedMemoryError:
        ranks = [self._local_peers.ranks[member] for member in members]
        error = SharedMemoryError.for_request(nbytes, None, f"{what} on rank(s) {ranks}")
        error.ranks = tuple(ranks)
        return error

    def _allgather_integers(self, numbers: Sequence[int], deadline: float) -> list[list[int]]:
        """Every rank's numbers."""
        replies: list[list[int]] = []
        own = np.array(numbers, np.int64).view(np.uint8)
        self.exchange(
            own, lambda _, slots: replies.extend(s[: own.size].view(np.int64).tolist() for s in slots), deadline
        )
        return replies

    def free(self, offset: int) -> None:
        """Implement `Backend.free`."""
        if offset in self._shared:
            self._free_shared[offset] = self._shared.pop(offset)
        else:
            self._free[offset] = self._regions.pop(offset)

    def undo(self, region: MemoryRegion) -> None:
        """Take back the last allocation, which is unused. Every rank calls it: nothing else came in between."""
        if self._grown_from < 0:
            self.free(region.offset)
            return
        self._next_offset = region.offset
        if self._shared.pop(region.offset, None) is None:
            del self._regions[region.offset]
        self._local_peers.shrink(self._grown_from)

    # -- some of the ranks --------------------------------------------------------------------------------------------

    def split(self, ranks: Sequence[int], deadline: float) -> ShmBackend | NullBackend | None:
        """Implement `Backend.split`. The members' counters and slots lie behind each other in their segments."""
        if len(ranks) == 1:
            return NullBackend() if self.rank in ranks else None
        member = self.rank in ranks
        free_part = self._free_parts.pop() if member and self._free_parts else -1
        needed = shm_backend_bytes() if member and free_part < 0 else 0
        try:
            grown = self._reserve(needed, "staging of a process set", deadline)
        except SharedMemoryError:
            if free_part >= 0:
                self._free_parts.append(free_part)
            raise
        own = free_part if free_part >= 0 else grown[self.rank]
        offsets = [offset for (offset,) in self._allgather_integers([own], deadline)]
        backend = None
        if member:
            members = self._local_peers.subset(ranks)
            part = members.map([offsets[rank] for rank in ranks], shm_backend_bytes())
            part.arrays[members.rank][:_WORDS_BYTES] = 0  # by now all have done with what was there before
            backend = ShmBackend(members, part, self._looks, self._direct_bytes)
            backend._reads_directly = self._reads_directly  # what all may do, some may
            backend._give_back = lambda: self._free_parts.append(own)
        self.barrier(deadline)  # no rank counts before all have cleared their counters
        return backend

    # -- ends ---------------------------------------------------------------------------------------------------------

    def abort(self, error: CollectiveError) -> None:
        """Implement `Backend.abort`."""
        self._local_peers.abort(error)

    def close(self) -> None:
        """Implement `Backend.close`."""
        for regions in (self._regions, self._free, self._shared, self._free_shared):
            regions.clear()
        self._slots.clear()
        self._small_views.clear()
        self._filled.close()
        self._reduced.close()
        self._give_back()
