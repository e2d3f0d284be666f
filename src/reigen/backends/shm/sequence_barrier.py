"""Counters through which the ranks of one host wait for each other.

A turnstile has one word per rank, each in its own cache line, written by that rank alone. `post` adds one to the own
word; `wait` returns when every other word has come as far as the given number. A barrier is a post and a wait for it.

Waiting looks a few times, for the case that the others are just about to come, and then sleeps in the kernel on the
word of a rank that has not come. With more ranks than cores looking again is a waste of the very core that the others
need, so then it sleeps at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from reigen.cluster.local_peers import LocalGroup
from reigen.errors import DeadlineError, format_ranks
from reigen.net.futex import FutexWord, SpinLimit, has_reached, memory_fences

#: How long a sleep may last before deaths and the deadline are looked at again: a death is seen this much later at
#: most.
SLICE_SECONDS = 0.1
#: The same while there is something else to do now and then.
IDLE_SLICE_SECONDS = 0.002
#: The bit that says so of the difference of two counters: `has_reached`, spelled out where it is asked again and again.
_BEHIND = 0x80000000


def _ignore_missing(_: Sequence[int]) -> None:
    """Ignore ranks that are missing."""


def _no_progress() -> bool:
    return False


class SequenceBarrier:
    """Barrier of the ranks of a host: one counter per rank, which that rank alone increments.

    Args:
        words: the counters in rank order, zero at first.
        sleeping: a word of each rank, in which it says whether it sleeps on another's counter; zero at first.
        neighbours: who is asked whether the others still live.
        looks: how often to look before sleeping.
        ranks_missing: called about ten times a second with the ranks that have not come, while there are any.
        idle: called before and, if it says that there may be something to do, often during a sleep.
    """

    def __init__(
        self,
        words: Sequence[FutexWord],
        sleeping: Sequence[FutexWord],
        neighbours: LocalGroup,
        looks: int,
        ranks_missing: Callable[[Sequence[int]], None] = _ignore_missing,
        idle: Callable[[], bool] = _no_progress,
    ) -> None:
        self._own = words[neighbours.rank]
        self._others = [(rank, word) for rank, word in enumerate(words) if rank != neighbours.rank]
        self._local_peers = neighbours
        self._spin = SpinLimit(looks)
        self._ranks_missing, self._idle = ranks_missing, idle
        self._sleeps = sleeping[neighbours.rank].cell
        self._others_sleep = [word.cell for rank, word in enumerate(sleeping) if rank != neighbours.rank]
        self._publish, self._fence = memory_fences()
        #: how often this rank has posted
        self.count = 0

    def post(self) -> int:
        """Say that this rank has come one step further; returns the number of the step.

        It costs a system call only where a rank sleeps: one that is about to has said so before the kernel compares the
        counter (*Sleep* in `reigen.net.futex`).
        """
        self.count += 1
        self._publish()
        self._own.cell[0] = self.count & 0xFFFFFFFF
        with self._fence:
            pass
        for cell in self._others_sleep:
            if cell[0]:
                self._own.wake()
                break
        return self.count

    def wait(self, step: int, deadline: float) -> None:
        """Return when every rank has posted ``step``.

        Raises:
            PeerLostError, DeadlineError, CollectiveError: as told in `reigen.backends.base`.
        """
        for _, word in self._others:
            cell, looks = word.cell, self._spin.looks
            while (cell[0] - step) & _BEHIND:
                if looks:
                    looks -= 1
                    continue
                self._sleep(word, step, deadline)

    def close(self) -> None:
        """Report no longer: the owner of this is called by its own methods, and would keep itself alive."""
        self._ranks_missing, self._idle = _ignore_missing, _no_progress

    def _sleep(self, word: FutexWord, step: int, deadline: float) -> None:
        until = min(deadline, time.monotonic() + SLICE_SECONDS)
        self._sleeps[0] = 1
        try:
            while not has_reached(value := word.load(), step) and (left := until - time.monotonic()) > 0:
                word.wait(value, min(left, IDLE_SLICE_SECONDS) if self._idle() else left)
        finally:
            self._sleeps[0] = 0
        self._spin.slept()
        if has_reached(value, step):
            return
        missing = self._missing(step)
        if missing:
            self._ranks_missing(missing)
            missing = self._missing(step)
        while missing and (error := self._local_peers.failure(missing)) is not None:
            still = self._missing(step)
            if still == missing:
                raise error
            missing = still  # a rank that is gone may have come just before: look again at the others
        if missing and time.monotonic() >= deadline:
            late = [self._local_peers.ranks[index] for index in missing]
            raise DeadlineError(
                f"rank(s) {format_ranks(late)} did not take their part in time (REIGEN_DEADLINE)", ranks=late
            )

    def _missing(self, step: int) -> list[int]:
        return [rank for rank, word in self._others if not has_reached(word.load(), step)]
