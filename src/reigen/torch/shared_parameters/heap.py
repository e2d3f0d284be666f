"""Heap of the C library, after a model's tensors have moved to other memory: their pages go back to the host.

glibc keeps the room of freed blocks below its threshold for mmap, which adapts itself and reaches 32 MiB. Of equal
rooms it gives out the one that was left longest ago. So activations wander through all that the tensors of a deep model
have left, and after some steps most pages of it are in use again, in every rank. Rooms that stay reserved, without
memory behind them, keep activations together.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


def trim_heap() -> None:
    """Give back to the system whatever is free: glibc keeps it where it is small."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def reserve_blocks(sizes: Iterable[int]) -> list[NDArray[np.uint8]]:
    """Reserve blocks of so many bytes, freed just now, in the heap; never written, they take no memory.

    What has no page to itself is left out.
    """
    blocks = [np.empty(nbytes, np.uint8) for nbytes in sizes if nbytes >= 2 * mmap.PAGESIZE]
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for block in blocks:
        begin = -(-block.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (block.ctypes.data + block.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(begin, end - begin, mmap.MADV_DONTNEED)  # in vain where memory is locked
    return blocks
