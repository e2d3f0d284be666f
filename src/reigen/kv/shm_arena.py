"""Shared memory between a worker and a server of one host: payloads lie here, only headers go through the socket.

Each process has one arena for each of its stores: a growing segment (`reigen.net.shm_segment`) in which it alone
allocates and writes. The other end maps it and only reads. Who may read what until when is said in
`reigen.kv.protocol`; the header's way through the kernel orders the writes to a body before the reads of a process that
has received it.

The file grows by slabs, and no block lies in two of them. So a process that maps all that is new whenever a block lies
beyond what it has mapped, maps whole slabs, and finds every block within one mapping.
"""

from __future__ import annotations

import bisect
import logging
import os
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from reigen.errors import SharedMemoryError, WireError
from reigen.kv.protocol import INLINE_BYTES, KVHello
from reigen.net.shm_segment import PAGE_BYTES, ShmSegment, round_up
from reigen.resources.limits import explain_limit

#: No two blocks share one, so that neither do the processors that work on them.
_CACHE_LINE_BYTES = 64
_SMALLEST_SLAB_BYTES, _LARGEST_SLAB_BYTES = 1 << 22, 1 << 26

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class ArenaBlock:
    """Part of the own arena: its bytes, as many as were asked for, and where it begins in the segment."""

    offset: int
    array: NDArray[np.uint8]


class ShmArena:
    """Shared memory of this process that one other end, or several, may read. Any thread may use it.

    Args:
        name: for /proc/PID/maps.
        max_bytes: the arena never becomes larger.

    Attributes:
        segment: what the others open.
        num_used_bytes: that are allocated now.
    """

    def __init__(self, name: str, max_bytes: int = 1 << 46) -> None:
        self.segment = ShmSegment.create(name, only_grows=True)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        #: slabs by their offsets, ascending
        self._starts: list[int] = []
        self._slabs: list[NDArray[np.uint8]] = []
        #: freed blocks by their length: the next block is most likely as long as one before
        self._free_by_length: dict[int, list[int]] = {}
        #: free ranges (offset, length), ascending, with no two that touch within a slab
        self._free: list[tuple[int, int]] = []
        self.num_used_bytes = 0
        self._has_warned = False

    def allocate(self, nbytes: int) -> ArenaBlock:
        """Return a block of ``nbytes`` bytes, at least 1, with undefined content.

        Raises:
            SharedMemoryError: the host, or ``max_bytes``, does not allow for it; nothing was changed.
        """
        length = round_up(nbytes, _CACHE_LINE_BYTES)
        with self._lock:
            same = self._free_by_length.get(length)
            offset = same.pop() if same else self._find(length)
            self.num_used_bytes += length
            index = bisect.bisect_right(self._starts, offset) - 1
            begin = offset - self._starts[index]
            return ArenaBlock(offset, self._slabs[index][begin : begin + nbytes])

    def take(self, nbytes: int) -> tuple[NDArray[np.uint8], ArenaBlock | None]:
        """Return memory with undefined content, and its block; None, with a warning, where the arena cannot grow."""
        try:
            block = self.allocate(nbytes)
        except SharedMemoryError as error:
            level = logging.DEBUG if self._has_warned else logging.WARNING
            self._has_warned = True
            _log.log(level, "%s. What finds no room travels through sockets", str(error))
            return np.empty(nbytes, np.uint8), None
        return block.array, block

    def copy(self, *parts: NDArray[Any]) -> tuple[NDArray[np.uint8] | bytes, ArenaBlock | None]:
        """Return the bytes of flat arrays, one behind the other, and the block that they lie in; small ones do not."""
        nbytes = sum(part.nbytes for part in parts)
        if nbytes < INLINE_BYTES:
            return b"".join(part.tobytes() for part in parts), None
        body, block = self.take(nbytes)
        np.concatenate([part.view(np.uint8) for part in parts], out=body)
        return body, block

    def free(self, block: ArenaBlock) -> None:
        """Take a block back, which is of no use from now on."""
        length = round_up(block.array.nbytes, _CACHE_LINE_BYTES)
        with self._lock:
            self._free_by_length.setdefault(length, []).append(block.offset)
            self.num_used_bytes -= length

    def announced(self, hello: KVHello, host_id: str) -> KVHello:
        """Return a hello with the address of this arena and the host it is on."""
        return structs.replace(hello, host_id=host_id, pid=os.getpid(), fd=self.segment.fd, inode=self.segment.inode)

    def close(self) -> None:
        """Give up the segment; mapped memory lives on until the last view of it is gone."""
        with self._lock:
            self.segment.close()
            self._starts.clear()
            self._slabs.clear()
            self._free_by_length.clear()
            self._free.clear()

    def _find(self, length: int) -> int:
        """Return the offset of ``length`` free bytes: of a range, of freed blocks that touch, or of a new slab."""
        offset = self._take(length)
        if offset is None and self._free_by_length:
            self._coalesce()
            offset = self._take(length)
        if offset is None:
            self._grow(length)
            offset = self._take(length)
        assert offset is not None, "a slab is at least as long as the block that it was made for"
        return offset

    def _take(self, length: int) -> int | None:
        """Cut a block off the smallest free range that is long enough."""
        fitting = [(size, place) for place, (_, size) in enumerate(self._free) if size >= length]
        if not fitting:
            return None
        size, place = min(fitting)
        offset = self._free[place][0]
        if size == length:
            del self._free[place]
        else:
            self._free[place] = (offset + length, size - length)
        return offset

    def _coalesce(self) -> None:
        """Make ranges of all blocks that were freed."""
        ranges = sorted(
            self._free + [(offset, length) for length, some in self._free_by_length.items() for offset in some]
        )
        self._free_by_length.clear()
        self._free = []
        starts = set(self._starts)
        for offset, length in ranges:
            if self._free and sum(self._free[-1]) == offset and offset not in starts:
                self._free[-1] = (self._free[-1][0], self._free[-1][1] + length)
            else:
                self._free.append((offset, length))

    def _grow(self, length: int) -> None:
        usual = min(max(self.segment.size, _SMALLEST_SLAB_BYTES), _LARGEST_SLAB_BYTES)
        nbytes = round_up(max(length, usual))
        if self.segment.size + nbytes > self._max_bytes:
            left = self._max_bytes - self.segment.size
            raise SharedMemoryError.for_request(nbytes, left, "the arena of a parameter server")
        offset = self.segment.size
        try:  # before it has memory, which could not be given back
            slab = self.segment.map(offset, nbytes)
        except OSError as error:
            raise SharedMemoryError(f"{error.strerror}. {_advice('this process')}") from None
        self.segment.grow(nbytes, "the arena of a parameter server")
        self._slabs.append(slab)
        self._starts.append(offset)
        self._free.append((offset, nbytes))


def explain_mapping_failure(who: str) -> str:
    """Return the consequence where shared memory cannot be mapped, and what to do about it."""
    return f"Values go through sockets instead, which is slower. {_advice(who)}"


def _advice(who: str) -> str:
    return (
        f"Give {who} more memory (ulimit -v, its control group) or more mappings (vm.max_map_count); "
        "REIGEN_KV_SHARED_MEMORY=0 does without"
    )


class PeerShmArena:
    """Arena of the other end, to read. One thread at a time may use it.

    Attributes:
        problem: why it could not be mapped; empty where it could.
    """

    def __init__(self, segment: ShmSegment) -> None:
        self._segment = segment
        self.problem = ""
        #: what is mapped, in order and without gaps, by offset
        self._starts: list[int] = []
        self._mapped: list[NDArray[np.uint8]] = []
        self._num_mapped_bytes = 0

    @classmethod
    def open(cls, hello: KVHello, host_id: str) -> tuple[PeerShmArena | None, str]:
        """Open the arena of the other end, which says ``hello``; return it, or None, and the reason.

        Raises:
            SharedMemoryError: the other end could make its memory smaller while it is read here, which would end this
                process.
        """
        if not hello.host_id or hello.fd < 0:
            return None, "the other end does not share memory"
        if hello.host_id != host_id:
            return None, f"{hello.host} is another host"
        try:
            segment = ShmSegment.open(hello.pid, hello.fd)
        except OSError as error:
            return None, f"the memory of process {hello.pid} cannot be opened: {explain_limit(error).strerror}"
        if segment.inode != hello.inode:
            segment.close()
            return None, f"process {hello.pid} is not the other end"
        if not segment.only_grows:
            segment.close()
            raise SharedMemoryError(
                f"the shared memory of process {hello.pid} on host {hello.host} is not sealed against becoming smaller "
                "(F_SEAL_SHRINK), so it is not read here. Reigen seals it: does that process run the same version? "
                "REIGEN_KV_SHARED_MEMORY=0 does without shared memory"
            )
        return cls(segment), "on this host"

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return bytes of the other end's arena, not to be written; WireError beyond its end, OSError if unmappable."""
        if not nbytes:
            return np.empty(0, np.uint8)
        end = offset + nbytes
        if end > self._num_mapped_bytes:
            self._map_more(end)
        index = bisect.bisect_right(self._starts, offset) - 1
        begin = offset - self._starts[index]
        mapped = self._mapped[index]
        if begin + nbytes > len(mapped):
            raise WireError(f"{nbytes} bytes at {offset} of the other end's memory are not one block")
        return mapped[begin : begin + nbytes]

    def close(self) -> None:
        """Give up the segment; views stay valid. May be called twice."""
        self._segment.close()
        self._mapped.clear()
        self._starts.clear()
        self._num_mapped_bytes = 0

    def _map_more(self, end: int) -> None:
        size = os.fstat(self._segment.fd).st_size // PAGE_BYTES * PAGE_BYTES
        if end > size:
            raise WireError(f"the other end tells of memory up to {end}, its arena has {size} bytes")
        try:
            new = self._segment.map(self._num_mapped_bytes, size - self._num_mapped_bytes)
        except OSError as error:
            self.problem = error.strerror or str(error)
            raise
        new.flags.writeable = False
        self._starts.append(self._num_mapped_bytes)
        self._mapped.append(new)
        self._num_mapped_bytes = size
