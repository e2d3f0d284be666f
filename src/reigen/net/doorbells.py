"""Doorbells: how the ranks of one host wake each other's threads. The protocol stands in `reigen.net.shm_ring`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import IntFlag

from reigen.net.futex import FutexWord, memory_fences

#: Bits of a waiter: integers need not wake it; what is submitted or answered eagerly need not even ring.
SLEEPS_ON, PARKED = 4, 8
#: What the word of an engine's thread is with both.
ENGINE_SLEEPS_ON = 13


class WaitingThread(IntFlag):
    """Thread that sleeps on a rank's doorbell; the bits of its futex. PARKED: the engine's, which awaits nothing."""

    NONE = 0
    ENGINE = 1
    CALLER = 2
    ANY = 3
    PARKED = ENGINE | PARKED


class Doorbells:
    """The doorbells that one rank rings: its readers', and its own.

    Args:
        rank: whose end this is.
        words: for every rank of the host, its doorbell and the word that says which thread sleeps on it.
        readers: the ranks that it rings.

    Attributes:
        waiters: the threads that sleep on each reader's.
    """

    def __init__(self, rank: int, words: Sequence[tuple[FutexWord, FutexWord]], readers: Sequence[int]) -> None:
        self._publish, self._fence = memory_fences()
        self._rank, self._num_ranks = rank, len(words)
        self._own = words[rank][0]
        self._readers = [(words[r][0], words[r][1].cell) for r in readers]
        self.waiters = [waiter for _, waiter in self._readers]
        #: numbers of this rank's rings; next() is atomic, since any of its threads may ring
        self._rings = itertools.count(1)

    def ring(self, not_woken: int) -> None:
        """Ring the readers; wake none whose waiter has a bit of ``not_woken``."""
        self._publish()
        value = (next(self._rings) * self._num_ranks + self._rank + 1) & 0xFFFFFFFF  # as in `_next_value`
        for doorbell, _ in self._readers:
            doorbell.cell[0] = value
        with self._fence:
            pass
        for doorbell, waiter in self._readers:
            thread = waiter[0]
            if thread and not thread & not_woken:
                doorbell.wake(thread)

    def ring_engine(self, reader: int) -> None:
        """Ring one of the readers, by its place, and wake its engine's thread, whatever it says."""
        doorbell, _ = self._readers[reader]
        doorbell.cell[0] = self._next_value()
        doorbell.wake(WaitingThread.ENGINE)

    def ring_own(self, thread: WaitingThread) -> None:
        """Ring this rank's own, and wake a thread that sleeps as ``thread``. Any thread may call this."""
        self._own.cell[0] = self._next_value()
        self._own.wake(thread)

    def _next_value(self) -> int:
        """A value that no doorbell ever had."""
        return (next(self._rings) * self._num_ranks + self._rank + 1) & 0xFFFFFFFF
