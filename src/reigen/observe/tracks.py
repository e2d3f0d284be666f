"""Rows of a rank's part of the trace, allocated so that nothing overlaps in a row.

A tensor that comes again has a row of its own from then on, which carries its name, as long as there are not too many.
The others share rows that are free. A thread that waits or marks steps has one, too.

Rows are a trace's "threads". Their numbers begin at 1000, because Perfetto takes thread 0 for none, and the thread that
has its process's number for the main one.
"""

from __future__ import annotations

import heapq

CYCLES = 1000
_FIRST_THREAD = 1001
FIRST_TENSOR = 1100
#: Rows that are named after a tensor.
MAX_NAMED = 200
FIRST_SHARED = FIRST_TENSOR + MAX_NAMED
_MAX_REMEMBERED = 4096


class TrackAllocator:
    """Rows of one rank."""

    def __init__(self) -> None:
        #: rows that have not been announced: number and title
        self.new: list[tuple[int, str]] = []
        self._threads: dict[int, int] = {}
        self._named: dict[str, int] = {}
        #: tensors that have come once
        self._seen: set[str] = set()
        self._busy: set[int] = set()
        #: shared rows that are free, and how many there are in all
        self._free: list[int] = []
        self._num_shared = 0

    def thread_track(self, thread: int) -> int:
        """Return the row of a thread."""
        row = self._threads.get(thread)
        if row is None:
            row = self._threads[thread] = min(_FIRST_THREAD + len(self._threads), FIRST_TENSOR - 1)
            number = len(self._threads)
            self.new.append((row, "steps and waits" if number == 1 else f"steps and waits, thread {number}"))
        return row

    def take(self, name: str) -> int:
        """Take a free row for a tensor, until it is given back."""
        row = self._named.get(name)
        if row is None and name in self._seen and len(self._named) < MAX_NAMED:
            row = self._named[name] = FIRST_TENSOR + len(self._named)
            self._seen.discard(name)
            self.new.append((row, name))
        elif row is None:
            if len(self._seen) >= _MAX_REMEMBERED:
                self._seen.clear()
            self._seen.add(name)
        if row is None or row in self._busy:
            row = self._shared()
        self._busy.add(row)
        return row

    def give_back(self, row: int) -> None:
        """Free the row."""
        self._busy.discard(row)
        if row >= FIRST_SHARED:
            heapq.heappush(self._free, row)

    def _shared(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        row = FIRST_SHARED + self._num_shared
        self._num_shared += 1
        self.new.append((row, f"other tensors {self._num_shared}"))
        return row
