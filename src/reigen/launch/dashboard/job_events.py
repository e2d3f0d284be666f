"""Events of a job for its dashboard. Pure: rows of the live table in, events out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from reigen.errors import format_ranks
from reigen.launch.metrics.job_metrics import ProcessStatus
from reigen.launch.metrics.live_table import SilenceTracker

#: A job whose ranks wait for a collective and make no step for so long has stalled.
STALL_SECONDS = 10.0

EventKind = Literal["note", "trouble", "better", "end"]


class DashboardEvent(msgspec.Struct, frozen=True):
    """Event of a job.

    Attributes:
        time: seconds since 1970.
        kind: what it means to the user.
        text: what has happened.
    """

    time: float
    kind: EventKind
    text: str


class EventTracker:
    """Tracker of changes in a job: processes that fall silent, are heard again or leave, and stalls."""

    def __init__(self) -> None:
        self._silence = SilenceTracker()
        self._ended: set[str] = set()
        #: steps and requests of all processes, and since when they have been the same
        self._progress: tuple[float, float] = (-1.0, 0.0)
        self._is_stalled = False

    def take(self, rows: Sequence[ProcessStatus], now: float) -> list[tuple[EventKind, str]]:
        """Return what has happened since the last call; ``now`` is on any clock."""
        found: list[tuple[EventKind, str]] = [
            ("trouble" if is_silent else "better", text) for is_silent, text in self._silence.take(rows)
        ]
        ended = {row.process.name for row in rows if row.process.report.is_last}
        found += [("note", f"{name} has left") for name in sorted(ended - self._ended)]
        self._ended = ended
        return found + self._stall(rows, now)

    def _stall(self, rows: Sequence[ProcessStatus], now: float) -> list[tuple[EventKind, str]]:
        ranks = [row for row in rows if row.process.report.kind == "rank" and not row.process.report.is_last]
        progress = sum(row.process.steps + row.process.latest.get("reigen_batches_total") for row in ranks)
        waiting = [row for row in ranks if row.process.report.waits_for]
        if progress != self._progress[0] or not waiting:
            self._progress = progress, now
            was_stalled, self._is_stalled = self._is_stalled, False
            return [("better", "the ranks go on")] if was_stalled and waiting else []
        if self._is_stalled or now - self._progress[1] < STALL_SECONDS:
            return []
        self._is_stalled = True
        missing = [row.process.report.number for row in ranks if not row.process.report.waits_for or row.is_silent]
        name = waiting[0].process.report.waits_for
        who = f"; rank(s) {format_ranks(missing)} did not come" if missing else ""
        numbers = format_ranks([row.process.report.number for row in waiting if not row.is_silent])
        return [("trouble", f"no step for {STALL_SECONDS:.0f} s: rank(s) {numbers} wait for {name}{who}")]
