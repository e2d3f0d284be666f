"""Words in shared memory that processes can wait on: futex(2), and the fences that lock-free flags need.

Memory ordering
---------------
All flags here are aligned 32-bit words. Python reads and writes them with one load or store each (a ``memoryview`` of
format ``I`` copies exactly four aligned bytes). Three things are relied on:

1. *Publish*: data is written before the flag that announces it, and read after that flag was seen. On x86-64 stores
   become visible in program order and loads are performed in program order (TSO), so ``publish()`` does nothing there.
   Elsewhere (aarch64) the publisher calls membarrier(2), GLOBAL_EXPEDITED: every thread of every registered process
   passes a full barrier between the data and the flag, so a reader that sees the flag cannot have read the data before
   that point. The readers need no barrier of their own.
2. *Sleep*: a waiter stores "I sleep" and then checks the flag; a waker stores the flag and then reads "does anybody
   sleep?". Each may overtake its own store even on x86-64, so the waker enters ``fence`` in between (a locked
   instruction: a lock that is taken; membarrier elsewhere). The waiter's check is made by the kernel, inside
   futex_wait, behind a full barrier.
3. *Causality*: what rank A wrote before telling rank B is visible to rank C once B has told C. Both x86-64 and ARMv8
   are multi-copy atomic, so this follows from 1.

Every wait is bounded, so even a lost wake-up would cost time and not progress.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import resource
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import cast

import numpy as np
from numpy.typing import NDArray

_MASK = 0xFFFFFFFF
_SYSCALLS = {"x86_64": (202, 324), "aarch64": (98, 283)}  # futex, membarrier
_WAIT_BITSET, _WAKE_BITSET = 9, 10
_MEMBARRIER_GLOBAL_EXPEDITED, _MEMBARRIER_REGISTER_GLOBAL_EXPEDITED = 2, 4
ALL_WAITERS = _MASK


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@functools.cache
def _futex() -> tuple[Callable[..., int], int]:
    """libc's syscall() with the argument types of futex, and futex's number."""
    machine = platform.machine()
    if machine not in _SYSCALLS:
        raise OSError(f"shared memory between ranks needs Linux on {' or '.join(_SYSCALLS)}, not {machine}")
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    syscall.argtypes = (
        ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_uint32,
    )  # fmt: skip
    return syscall, _SYSCALLS[machine][0]


@functools.cache
def _membarrier() -> Callable[[], None]:
    number = _SYSCALLS[platform.machine()][1]
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    if syscall(number, _MEMBARRIER_REGISTER_GLOBAL_EXPEDITED, 0, 0):
        raise OSError("shared memory between ranks needs membarrier(2) on this processor, and this kernel refuses it")
    return lambda: syscall(number, _MEMBARRIER_GLOBAL_EXPEDITED, 0, 0) and None


class _MembarrierFence:
    """A full barrier on entering, for processors without the locked instruction."""

    def __init__(self, membarrier: Callable[[], None]) -> None:
        self._membarrier = membarrier

    def __enter__(self) -> None:
        self._membarrier()

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


#: Does nothing, and that in C.
_no_fence = cast("Callable[[], None]", bool)


def memory_fences() -> tuple[Callable[[], None], AbstractContextManager[object]]:
    """Return ``(publish, fence)`` for this processor; see the module's text. On x86-64 neither is a Python call."""
    if platform.machine() == "x86_64":
        return _no_fence, threading.Lock()
    return _membarrier(), _MembarrierFence(_membarrier())


class FutexWord:
    """One aligned 32-bit word of shared memory.

    Attributes:
        cell: the word as ``cell[0]``, for loops in which a call of `load` or `store` would cost more than it does.
    """

    __slots__ = ("_address", "_number", "_syscall", "cell")

    def __init__(self, memory: NDArray[np.uint8], offset: int) -> None:
        if offset % 4:
            raise AssertionError(f"offset {offset} is not aligned")
        cell = memory[offset : offset + 4]
        self.cell = cell.data.cast("I")
        self._address = cell.ctypes.data
        self._syscall, self._number = _futex()

    def load(self) -> int:
        """The value, unsigned."""
        return self.cell[0]

    def store(self, value: int) -> None:
        """Write ``value`` modulo 2**32."""
        self.cell[0] = value & _MASK

    def wait(self, expected: int, timeout_seconds: float, bits: int = ALL_WAITERS) -> None:
        """Sleep while the word is ``expected``: until a wake with a common bit, or for so long; may return early."""
        until = time.monotonic() + timeout_seconds
        seconds = int(until)
        timeout = _Timespec(seconds, int((until - seconds) * 1e9))
        self._syscall(self._number, self._address, _WAIT_BITSET, expected, ctypes.addressof(timeout), None, bits)

    def wake(self, bits: int = ALL_WAITERS) -> None:
        """Wake all threads that wait on the word with a common bit."""
        self._syscall(self._number, self._address, _WAKE_BITSET, 0x7FFFFFFF, None, None, bits)


class SpinLimit:
    """Number of looks before a sleep: many as long as no other process wants this rank's core.

    While others want it, looking uses up the time that the kernel gives this rank, and sleeping saves it. The kernel
    tells by preempting the process: then it sleeps at once, and looks a little more often after every sleep that goes
    by without that.

    Args:
        most: how often at the most; 0 for never.
    """

    __slots__ = ("_most", "_num_preempted", "looks")

    def __init__(self, most: int) -> None:
        self._most = self.looks = most
        self._num_preempted = -1

    def slept(self) -> None:
        """A sleep is over."""
        before, self._num_preempted = self._num_preempted, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        self.looks = min(self._most, self.looks + self._most // 64) if before in {-1, self._num_preempted} else 0


def has_reached(value: int, target: int) -> bool:
    """Return whether a counter that wraps at 2**32 has come to ``target``."""
    return (value - target) & _MASK < 0x80000000
