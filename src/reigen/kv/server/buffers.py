"""Memory of a server: values that others may still be reading, and places for received bodies.

A value that has been sent is *leased* until its reader has copied it, or the kernel has it. While it is, it must not
change: an update goes to other memory (`ValueAllocator.target`), and the old one is given back with its last lease.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.kernels.reduce import BlockReducer, Reduction
from reigen.kv.shm_arena import ArenaBlock, ShmArena
from reigen.types import DType, ReduceOp

#: Received bodies whose memory is kept for the next ones, and how much that may be in all.
_MOST_KEPT_BYTES = 1 << 28


@dataclass(slots=True, eq=False)
class ValueBuffer:
    """Memory of a value.

    Attributes:
        block: where it is in the arena; None: it is in no arena.
        num_leases: how many readers there are.
        is_retired: the value has moved elsewhere.
    """

    array: NDArray[np.uint8]
    block: ArenaBlock | None = None
    num_leases: int = 0
    is_retired: bool = False


class ValueAllocator:
    """Allocator of values, in an arena that workers of this host share, if any. One thread at a time may use it."""

    def __init__(self, arena: ShmArena | None) -> None:
        self.arena = arena

    def new(self, nbytes: int) -> ValueBuffer:
        """Return memory of ``nbytes`` bytes with undefined content."""
        if self.arena is None or not nbytes:
            return ValueBuffer(np.empty(nbytes, np.uint8))
        return ValueBuffer(*self.arena.take(nbytes))

    def target(self, value: ValueBuffer) -> ValueBuffer:
        """Return memory for the next content of ``value``: its own, if it has no readers."""
        return self.new(value.array.nbytes) if value.num_leases else value

    def lease(self, value: ValueBuffer) -> None:
        """Count one more reader."""
        value.num_leases += 1

    def release(self, value: ValueBuffer) -> None:
        """Count one reader less."""
        value.num_leases -= 1
        if value.is_retired and not value.num_leases:
            self._free(value)

    def retire(self, value: ValueBuffer) -> None:
        """Give back the memory of a value that is elsewhere now, after its last reader."""
        value.is_retired = True
        if not value.num_leases:
            self._free(value)

    def _free(self, value: ValueBuffer) -> None:
        if value.block is not None and self.arena is not None:
            self.arena.free(value.block)
            value.block = None


class BufferPool:
    """Pool of memory for received bodies, since new memory costs more than all that is done with it."""

    def __init__(self) -> None:
        self._kept: dict[int, deque[NDArray[np.uint8]]] = {}
        self._num_kept_bytes = 0

    def take(self, nbytes: int) -> NDArray[np.uint8]:
        """Return exactly ``nbytes`` bytes, with undefined content."""
        same = self._kept.get(nbytes)
        if same:
            self._num_kept_bytes -= nbytes
            return same.pop()
        return np.empty(nbytes, np.uint8)

    def give(self, buffer: NDArray[np.uint8]) -> None:
        """Take back memory that is not in use any more."""
        if self._num_kept_bytes + buffer.nbytes <= _MOST_KEPT_BYTES:
            self._kept.setdefault(buffer.nbytes, deque()).append(buffer)
            self._num_kept_bytes += buffer.nbytes


class ReductionScratch:
    """Arrays and reducers of one thread, used again."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}
        #: by element type and number of inputs
        self._reducers: dict[tuple[str, int], BlockReducer] = {}

    def take(self, slot: str, length: int, dtype: Any) -> NDArray[Any]:
        """Return ``length`` elements with undefined content; a slot is overwritten by its next use."""
        array = self._arrays.get(slot)
        if array is None or len(array) < length or array.dtype != dtype:
            array = self._arrays[slot] = np.empty(length, dtype)
        return array[:length]

    def reducer(self, dtype: DType, num_inputs: int, scale: float) -> BlockReducer:
        """Return what adds up so many arrays of a type, and multiplies with a factor."""
        if scale != 1.0:
            return BlockReducer(Reduction(dtype, ReduceOp.SUM, num_inputs, postscale=scale))
        known = self._reducers.get((dtype.name, num_inputs))
        if known is None:
            known = self._reducers[dtype.name, num_inputs] = BlockReducer(Reduction(dtype, ReduceOp.SUM, num_inputs))
        return known
