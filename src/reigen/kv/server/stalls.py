"""Report of workers that wait long for each other. Decides; asks no clock.

A server looks about once a second at the requests that it has not answered. Those that have waited for
REIGEN_STALL_CHECK_TIME_SECONDS are reported, and again after two, four, eight times as long; then, that it is over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

_MOST_LINES = 8


class WaitingWorker(NamedTuple):
    """Worker that waits.

    Attributes:
        what: for what: ``key 'weight'``.
        missing: the workers that have not done their part.
        since: in seconds on some steady clock.
    """

    what: str
    worker: int
    missing: tuple[int, ...]
    since: float


class StallReporter:
    """Decides when to report; ``seconds`` is how long a worker may wait before; infinite: never."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._next = seconds

    def report(self, waiting: Sequence[WaitingWorker], now: float) -> str | None:
        """Return the text to be logged now, if any; ``waiting`` are at least those that have waited for ``seconds``."""
        late = [one for one in waiting if one.missing and now - one.since >= self.seconds]
        if not late:
            was_reported, self._next = self._next > self.seconds, self.seconds
            return "Stall over: no worker waits for others any more" if was_reported else None
        longest = now - min(one.since for one in late)
        if longest < self._next:
            return None
        self._next = self.seconds * 2 ** (1 + math.floor(math.log2(longest / self.seconds)))
        return "\n".join(["Stall: workers wait for others that do not come.", *_format_report(late, now)])


def _format_report(late: Sequence[WaitingWorker], now: float) -> list[str]:
    by_what: dict[str, list[WaitingWorker]] = {}
    for one in late:
        by_what.setdefault(one.what, []).append(one)
    lines = []
    for what, several in by_what.items():
        seconds = now - min(one.since for one in several)
        missing = {number for one in several for number in one.missing}
        waiting = _name_workers({one.worker for one in several})
        lines.append(f"  {what} for {seconds:.0f} s: waiting: {waiting}; missing: {_name_workers(missing)}")
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"  and {len(lines) - _MOST_LINES} more"]
    return [*lines, "  All workers must push and initialise the same keys equally often, or leave()."]


def _name_workers(workers: set[int]) -> str:
    return f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, sorted(workers)))}"
