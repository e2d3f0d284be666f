"""Live table below the output of a job: when it is drawn, and where."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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


class ComplaintQueue:
    """Queue of messages to the user, which would be drawn over if they were written beside the table.

    Args:
        tell: writes a message at once.
        is_held: there is a table, and messages wait for its next turn. They may come from any thread.
    """

    def __init__(self, tell: Callable[[str], None], *, is_held: bool) -> None:
        self._tell, self._is_held = tell, is_held
        self._messages: deque[str] = deque()

    def __call__(self, message: str) -> None:
        """Tell the user."""
        self._messages.append(message)
        if not self._is_held:
            self.close()

    def take(self) -> list[str]:
        """Return the messages that wait."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def close(self) -> None:
        """Hold nothing back any more."""
        self._is_held = False
        for message in self.take():
            self._tell(message)


class LiveTable:
    """Live table of a job.

    Args:
        metrics: of its processes.
        display: its output.
        complaints: that are written above it.
    """

    def __init__(self, metrics: JobMetrics, display: TerminalDisplay, complaints: ComplaintQueue) -> None:
        self._metrics, self._display, self._complaints = metrics, display, complaints
        self._lines = TopLines()
        self._due = 0.0

    def turn(self, now: float) -> float:
        """Draw the table, if it is time; return the seconds until the next call. ``now``: on the reports' clock."""
        self._say_complaints()
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
        self._say_complaints()
        self._complaints.close()

    def _say_complaints(self) -> None:
        for message in self._complaints.take():
            self._display.say(f"reigen run: {message}\n".encode())
