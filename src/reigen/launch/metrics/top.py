"""Live table below the output of a job: when it is drawn, and where."""

from __future__ import annotations

from typing import Protocol

from reigen.launch.metrics.job_metrics import JobMetrics
from reigen.launch.metrics.live_table import TopLines, draw_table

#: Seconds between two looks.
_LOOK_SECONDS = 0.5


class TerminalDisplay(Protocol):
    """Output of the job, which the table stands below."""

    @property
    def footer_size(self) -> tuple[int, int] | None:
        """Columns and lines for the table; None: there is no terminal."""

    def set_footer(self, lines: list[bytes]) -> None:
        """Show the table."""

    def say(self, message: bytes) -> None:
        """Write a line."""


class LiveTable:
    """Live table of a job.

    Args:
        metrics: of its processes.
        display: its output.
    """

    def __init__(self, metrics: JobMetrics, display: TerminalDisplay) -> None:
        self._metrics, self._display = metrics, display
        self._lines = TopLines()
        self._due = 0.0

    def turn(self, now: float) -> float:
        """Draw the table, if it is time; return the seconds until the next call. ``now``: on the reports' clock."""
        if now >= self._due:
            self._due = now + _LOOK_SECONDS
            rows, size = self._metrics.status(now), self._display.footer_size
            if size is None:
                for line in self._lines.take(rows, now):
                    self._display.say(f"reigen run: {line}\n".encode())
            elif rows:
                self._display.set_footer(draw_table(rows, *size))
        return max(0.0, self._due - now)

    def close(self) -> None:
        """Take the table away."""
        if self._display.footer_size is not None:
            self._display.set_footer([])
