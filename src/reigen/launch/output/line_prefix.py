"""Line prefixes: the ranks' output becomes whole lines, each with its rank. Bytes in, bytes out, no I/O.

On a terminal the unfinished line of rank 0 (a progress bar that redraws itself with carriage returns, a question) stays
at the bottom, drawn again below every line that another rank prints. Elsewhere bytes pass unchanged, line by line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

#: A longer line comes out in pieces, so that memory stays bounded.
MAX_LINE_BYTES = 1 << 16

#: Returns the time for the beginning of a line.
TimestampFunction = Callable[[], bytes]
#: Names of processes that are no ranks, by number.
ProcessNames = Mapping[int, str]

_ERASE = b"\r\x1b[K"


class LineSink(Protocol):
    """Destination of lines."""

    def show(self, source: tuple[int, int], lines: list[bytes], rest: bytes) -> bytes:
        """Return the bytes to write.

        Args:
            source: (rank, number of its stream).
            lines: complete lines since the last call, without their ends.
            rest: its unfinished line so far.
        """

    def collapse(self, rest: bytes) -> bytes:
        """Return the part of an unfinished line that still matters."""


class LineSplitter:
    """Splitter of one rank's stream into lines."""

    def __init__(self, screen: LineSink, source: tuple[int, int]) -> None:
        self._screen, self._source = screen, source
        self._rest = b""
        #: The stream's last lines, for the report of a failure.
        self.tail: deque[bytes] = deque(maxlen=20)

    def feed(self, data: bytes) -> bytes:
        """Take output; return the bytes to write."""
        *lines, rest = (self._rest + data).split(b"\n")
        rest = self._screen.collapse(rest)
        while len(rest) > MAX_LINE_BYTES:
            lines.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._rest = rest
        return self._show(lines)

    def end(self) -> bytes:
        """Take the end of the stream; return the bytes to write for a last line without an end."""
        lines, self._rest = [self._rest] if self._rest else [], b""
        return self._show(lines)

    def _show(self, lines: list[bytes]) -> bytes:
        self.tail.extend(line[:1024] for line in lines[-20:])
        return self._screen.show(self._source, lines, self._rest)


class LogSink:
    """File or pipe. Lines begin with the ``clock``'s time, if there is one, and with their rank, if ``prefix``."""

    def __init__(
        self, *, prefix: bool, clock: TimestampFunction | None = None, names: ProcessNames | None = None
    ) -> None:
        self._head = _LinePrefix(prefix, clock, names or {})

    def show(self, source: tuple[int, int], lines: list[bytes], rest: bytes) -> bytes:
        """Return the lines, whole."""
        head = self._head.of(source[0])
        return b"".join([head + line + b"\n" for line in lines])

    def collapse(self, rest: bytes) -> bytes:
        """Return all of it: nothing is lost in a log."""
        return rest


class TerminalSink:
    """Terminal of ``num_columns``, and its last line. Lines begin as in ``LogSink``."""

    def __init__(
        self,
        *,
        prefix: bool,
        num_columns: int,
        clock: TimestampFunction | None = None,
        names: ProcessNames | None = None,
    ) -> None:
        self._head = _LinePrefix(prefix, clock, names or {})
        self._num_columns = num_columns
        #: The unfinished line that is drawn, and its source.
        self._drawn, self._drawn_source = b"", (0, 0)

    def show(self, source: tuple[int, int], lines: list[bytes], rest: bytes) -> bytes:
        """Draw the lines above the unfinished line of rank 0."""
        head = self._head.of(source[0])
        out = [_ERASE] if self._drawn and lines else []
        out += [head + visible_text(line) + b"\n" for line in lines]
        before = self._drawn
        if lines and source == self._drawn_source:
            self._drawn = b""
        if source[0] == 0 and rest:
            self._drawn, self._drawn_source = self._fit(head + visible_text(rest)), source
        if self._drawn and (lines or self._drawn != before):
            out.append(b"\r" + self._drawn + b"\x1b[K")
        return b"".join(out)

    def collapse(self, rest: bytes) -> bytes:
        """Return the visible part, and a carriage return if the next character overwrites it."""
        return visible_text(rest) + (b"\r" if rest.endswith(b"\r") else b"") if b"\r" in rest else rest

    def _fit(self, line: bytes) -> bytes:
        """Cut ``line`` to one row: a longer one could not be erased. Lines with escape sequences are kept."""
        text = line.decode(errors="surrogateescape")
        if b"\x1b" in line or len(text) < self._num_columns:
            return line
        return text[: self._num_columns - 1].encode(errors="surrogateescape")


@dataclass(frozen=True, slots=True)
class _LinePrefix:
    """Prefix of lines."""

    prefix: bool
    clock: TimestampFunction | None
    names: ProcessNames

    def of(self, number: int) -> bytes:
        """Return the prefix of a process."""
        name = f"[{self.names.get(number, number)}] ".encode() if self.prefix else b""
        return (b"" if self.clock is None else self.clock()) + name


def visible_text(line: bytes) -> bytes:
    r"""Return the visible part of a line with carriage returns: the last text that was written over the others."""
    return next((part for part in reversed(line.split(b"\r")) if part), b"") if b"\r" in line else line
