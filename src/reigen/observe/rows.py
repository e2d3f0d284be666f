"""In which row of a rank's part of the picture something is shown, so that nothing overlaps in a row.

A tensor has a row of its own, which carries its name, as long as there are not too many; the others, and tensors whose
names were made up and do not come again, share rows that are free. A thread that waits or marks steps has one, too.
"""

from __future__ import annotations

import heapq

CYCLES = 0
_FIRST_THREAD = 1
_FIRST_TENSOR = 100
#: Rows that are named after a tensor.
MAX_NAMED = 200
_FIRST_SHARED = _FIRST_TENSOR + MAX_NAMED


class Rows:
    """The rows of one rank."""

    def __init__(self) -> None:
        #: rows that nobody has been told of: number and title
        self.new: list[tuple[int, str]] = []
        self._threads: dict[int, int] = {}
        self._named: dict[str, int] = {}
        self._busy: set[int] = set()
        #: shared rows that are free, and how many there are in all
        self._free: list[int] = []
        self._num_shared = 0

    def of_thread(self, thread: int) -> int:
        """The row of a thread."""
        row = self._threads.get(thread)
        if row is None:
            row = self._threads[thread] = min(_FIRST_THREAD + len(self._threads), _FIRST_TENSOR - 1)
            number = len(self._threads)
            self.new.append((row, "steps and waits" if number == 1 else f"steps and waits, thread {number}"))
        return row

    def take(self, name: str, is_unnamed: bool) -> int:
        """A free row for a tensor; it is taken until it is given back."""
        row = self._named.get(name)
        if row is None and not is_unnamed and len(self._named) < MAX_NAMED:
            row = self._named[name] = _FIRST_TENSOR + len(self._named)
            self.new.append((row, name))
        if row is None or row in self._busy:
            row = self._shared()
        self._busy.add(row)
        return row

    def give_back(self, row: int) -> None:
        """The row is free again."""
        self._busy.discard(row)
        if row >= _FIRST_SHARED:
            heapq.heappush(self._free, row)

    def _shared(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        row = _FIRST_SHARED + self._num_shared
        self._num_shared += 1
        self.new.append((row, f"other tensors {self._num_shared}"))
        return row
