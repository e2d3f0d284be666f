"""Messages to the browsers that show a job's dashboard. Pure: times and rows of the live table in.

A browser that connects gets everything that is kept, and then what is new, once a second, or at once when a process
falls silent or the job ends. One that reads slowly misses states of the table, but no points of the charts and, as far
as they are kept, no events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from reigen.launch.dashboard.history import HistoryPoint, JobHistory, measure_job
from reigen.launch.dashboard.job_events import DashboardEvent, EventKind, EventTracker
from reigen.launch.metrics.job_metrics import ProcessStatus
from reigen.launch.metrics.live_table import choose_rows

#: Most events that are kept, and most rows of the table.
MAX_EVENTS = 200
MAX_ROWS = 256
_MAX_TEXT = 1000
_STATE_SECONDS = 1.0


class TableRow(msgspec.Struct, frozen=True):
    """Row of the table: a process; shares are of its time, ``eta`` is in seconds, and so is ``age``, of its report."""

    name: str
    kind: Literal["rank", "server"]
    host: str
    step: float
    steps: float
    samples: float
    compute: float
    transfer: float
    wait: float
    waits_for: str
    memory: float
    age: float
    eta: float | None
    is_last: bool
    is_silent: bool
    is_waited_for: bool


class JobLine(msgspec.Struct, frozen=True):
    """State of the whole job; ``seconds``: since the dashboard was started; ``goal`` and ``eta``: None: not known."""

    program: str
    seconds: float
    ranks: int
    servers: int
    step: float
    goal: float | None
    eta: float | None
    steps: float
    samples: float


class JobEnd(msgspec.Struct, frozen=True):
    """End of a job; ``text``: the cause of a failure; ``verdict``: the ranks that were waited for, or empty."""

    exit_code: int
    text: str
    verdict: str


class DashboardMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Message to a browser.

    Attributes:
        time: seconds since 1970.
        job: the whole job.
        rows: the table, as far as there is room.
        left_out: number of processes that are not in it.
        points: of the charts: those that the browser does not have, or all of them.
        has_all_points: those that it has are to be forgotten.
        point_seconds: of each point.
        events: those that the browser does not have.
        end: of the job; None: it runs.
    """

    time: float
    job: JobLine
    rows: list[TableRow]
    left_out: int
    points: list[HistoryPoint]
    has_all_points: bool
    point_seconds: float
    events: list[DashboardEvent]
    end: JobEnd | None = None


@dataclass(frozen=True, slots=True)
class FeedCursor:
    """Place in the feed up to which a browser has everything; the default has nothing."""

    point_seconds: float = 0.0
    num_points: int = 0
    num_events: int = 0


def make_row(row: ProcessStatus) -> TableRow:
    """Return a process as a row of the table; rates of one of which nothing is heard are 0."""
    process, report = row.process, row.process.report
    is_active = not (row.is_silent or report.is_last)
    compute, transfer, wait = process.shares() if is_active and report.kind == "rank" else (0.0, 0.0, 0.0)
    return TableRow(
        process.name,
        report.kind,
        report.host,
        process.steps,
        process.rate("reigen_steps_total") if is_active else 0.0,
        process.rate("reigen_samples_total") if is_active else 0.0,
        compute,
        transfer,
        wait,
        report.waits_for,
        process.latest.get("reigen_memory_bytes", "resident"),
        row.age_seconds,
        row.eta_seconds if is_active else None,
        report.is_last,
        row.is_silent,
        row.is_waited_for,
    )


class DashboardFeed:
    """Feed of a job's dashboard.

    Args:
        program: of the job, by name.
        now: on the clock of the reports.
    """

    def __init__(self, program: str, now: float) -> None:
        self._program, self._begun = program, now
        self.history = JobHistory()
        self.end: JobEnd | None = None
        self._tracker = EventTracker()
        self._events: deque[DashboardEvent] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self._rows: Sequence[ProcessStatus] = ()
        self._measured_at = self._sent_at = now - _STATE_SECONDS
        self._now, self._time = now, 0.0

    def turn(self, rows: Sequence[ProcessStatus], now: float, wall_time: float) -> bool:
        """Take in the table of this moment; returns whether there is something to send.

        Args:
            rows: of the live table.
            now: on the clock of the reports.
            wall_time: seconds since 1970.
        """
        self._rows, self._now, self._time = rows, now, wall_time
        happened = self._tracker.take(rows, now) if self.end is None else []
        for kind, text in happened:
            self.note(kind, text, wall_time)
        if now - self._measured_at >= _STATE_SECONDS and self.end is None:
            self._measured_at = max(self._measured_at + _STATE_SECONDS, now - _STATE_SECONDS)
            if any(row.process.history for row in rows):  # before that there are no rates
                self.history.add(measure_job(rows, now - self._begun))
        if not happened and now - self._sent_at < _STATE_SECONDS:
            return False
        self._sent_at = now
        return True

    def note(self, kind: EventKind, text: str, wall_time: float) -> None:
        """Add an event."""
        self._events.append(DashboardEvent(wall_time, kind, text[:_MAX_TEXT]))
        self._num_events += 1

    def finish(self, end: JobEnd, wall_time: float) -> None:
        """Take note that the job has ended."""
        self.end, self._time = end, wall_time
        self.note("end", f"the job has ended with exit code {end.exit_code}", wall_time)

    def message(self, cursor: FeedCursor) -> tuple[DashboardMessage, FeedCursor]:
        """Return a message with everything that a browser does not have yet, and its place behind that."""
        history, rows = self.history, self._rows
        has_all = cursor.point_seconds != history.point_seconds or cursor.num_points > len(history.points)
        missing = min(self._num_events - cursor.num_events, len(self._events))
        shown, left_out = choose_rows(rows, MAX_ROWS)
        message = DashboardMessage(
            self._time,
            self._job_line(rows),
            [make_row(row) for row in shown],
            left_out,
            history.points if has_all else history.points[cursor.num_points :],
            has_all,
            history.point_seconds,
            list(self._events)[len(self._events) - missing :],
            self.end,
        )
        return message, FeedCursor(history.point_seconds, len(history.points), self._num_events)

    def _job_line(self, rows: Sequence[ProcessStatus]) -> JobLine:
        ranks = [row for row in rows if row.process.report.kind == "rank"]
        ahead = max(ranks, key=lambda row: row.process.steps, default=None)
        now = measure_job(rows, 0.0)
        return JobLine(
            self._program,
            self._now - self._begun,
            len(ranks),
            len(rows) - len(ranks),
            0.0 if ahead is None else ahead.process.steps,
            None if ahead is None else ahead.process.latest.get("reigen_goal_steps") or None,
            None if ahead is None or self.end is not None else make_row(ahead).eta,
            now.steps,
            now.samples,
        )
