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

from reigen.cluster.neighbours import Members
from reigen.cluster.told import listed
from reigen.errors import DeadlineError
from reigen.wire.futex import Word, fences, reached

#: How long a sleep may last before deaths and the deadline are looked at again: a death is seen this much later at
#: most.
SLICE_SECONDS = 0.1
#: The same while there is something else to do now and then.
IDLE_SLICE_SECONDS = 0.002


class Turnstile:
    """One counter per rank.

    Args:
        words: the counters in rank order, zero at first.
        neighbours: who is asked whether the others still live.
        looks: how often to look before sleeping.
        lacking: told who has not come, about ten times a second while somebody has not.
        idle: called before and, if it says that there may be something to do, often during a sleep.
    """

    def __init__(
        self,
        words: Sequence[Word],
        neighbours: Members,
        looks: int,
        lacking: Callable[[Sequence[int]], None] = lambda _: None,
        idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self._own = words[neighbours.rank]
        self._others = [(rank, word) for rank, word in enumerate(words) if rank != neighbours.rank]
        self._neighbours = neighbours
        self._looks = looks
        self._lacking, self._idle = lacking, idle
        self._publish, _ = fences()
        #: how often this rank has posted
        self.count = 0

    def post(self) -> int:
        """Say that this rank has come one step further; returns the number of the step."""
        self.count += 1
        self._publish()
        self._own.store(self.count)
        self._own.wake()
        return self.count

    def wait(self, step: int, deadline: float) -> None:
        """Return when every rank has posted ``step``.

        Raises:
            PeerLostError, DeadlineError, CollectiveError: as told in `reigen.planes.base`.
        """
        for _, word in self._others:
            looks = self._looks
            while not reached(word.load(), step):
                if looks:
                    looks -= 1
                    continue
                self._sleep(word, step, deadline)

    def _sleep(self, word: Word, step: int, deadline: float) -> None:
        until = min(deadline, time.monotonic() + SLICE_SECONDS)
        while not reached(value := word.load(), step) and (left := until - time.monotonic()) > 0:
            word.wait(value, min(left, IDLE_SLICE_SECONDS) if self._idle() else left)
        if reached(value, step):
            return
        missing = self._missing(step)
        if missing:
            self._lacking(missing)
            missing = self._missing(step)
        while missing and (error := self._neighbours.failure(missing)) is not None:
            still = self._missing(step)
            if still == missing:
                raise error
            missing = still  # a rank that is gone may have come just before: look again at the others
        if missing and time.monotonic() >= deadline:
            late = [self._neighbours.ranks[index] for index in missing]
            raise DeadlineError(f"rank(s) {listed(late)} did not take their part in time (REIGEN_DEADLINE)", ranks=late)

    def _missing(self, step: int) -> list[int]:
        return [rank for rank, word in self._others if not reached(word.load(), step)]
