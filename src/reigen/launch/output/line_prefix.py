"""Lines of the ranks' output, each with its rank. Bytes in, bytes out, no I/O.

On a terminal the unfinished line of rank 0 (a progress bar that redraws itself with carriage returns, a question) stays
at the bottom, drawn again below every line that another rank prints. Elsewhere bytes pass unchanged, line by line; an
unfinished line with carriage returns passes as it comes, and ends where another rank prints a line.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping

#: A longer line comes out in pieces, so that memory stays bounded.
MAX_LINE_BYTES = 1 << 16

#: Returns the time for the beginning of a line.
TimestampFunction = Callable[[], bytes]
#: Names of processes that are no ranks, by number.
ProcessNames = Mapping[int, str]

_ERASE = b"\r\x1b[K"


class LineSink(ABC):
    """Destination of lines, which begin with the ``clock``'s time, if there is one, and with their rank, if ``prefix``.

    ``names`` are those of PS processes.
    """

    def __init__(
        self, *, prefix: bool, clock: TimestampFunction | None = None, names: ProcessNames | None = None
    ) -> None:
        self._prefix, self._clock, self._names = prefix, clock, names or {}

    def head(self, number: int) -> bytes:
        """Return the beginning of a process's lines."""
        name = f"[{self._names.get(number, number)}] ".encode() if self._prefix else b""
        return (b"" if self._clock is None else self._clock()) + name

    @abstractmethod
    def show(self, source: tuple[int, int], lines: list[bytes], rest: bytes) -> bytes:
        """Return the bytes to write.

        Args:
            source: (rank, number of its stream).
            lines: complete lines since the last call, without their ends.
            rest: its unfinished line so far.
        """

    @abstractmethod
    def say(self, message: bytes) -> bytes:
        """Return the bytes to write for whole lines of the launcher's own."""

    @abstractmethod
    def collapse(self, source: tuple[int, int], rest: bytes) -> bytes:
        """Return the part of an unfinished line that still matters when it has been shown."""


class LineSplitter:
    """Splitter of one rank's stream into lines.

    Args:
        screen: sink of the lines.
        source: (rank, number of its stream).
        keep: takes whole lines, returns those to show now.
    """

    def __init__(
        self, screen: LineSink, source: tuple[int, int], keep: Callable[[list[bytes]], list[bytes]] = list
    ) -> None:
        self._screen, self._source, self._keep = screen, source, keep
        self._rest = b""
        #: The stream's last lines, for the report of a failure.
        self.tail: deque[bytes] = deque(maxlen=20)

    def feed(self, data: bytes) -> bytes:
        """Take output; return the bytes to write."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        out = self._show(lines)
        self._rest = self._screen.collapse(self._source, self._rest)
        while len(self._rest) > MAX_LINE_BYTES:
            line, self._rest = self._rest[:MAX_LINE_BYTES], self._rest[MAX_LINE_BYTES:]
            out += self._show([line])
        return out

    def show(self, lines: list[bytes]) -> bytes:
        """Show lines that were kept back; return the bytes to write."""
        return self._screen.show(self._source, lines, self._rest)

    def end(self) -> bytes:
        """Take the end of the stream; return the bytes to write for a last line without an end."""
        lines, self._rest = [self._rest] if self._rest else [], b""
        return self._show(lines)

    def _show(self, lines: list[bytes]) -> bytes:
        self.tail.extend(line[:1024] for line in lines[-20:])
        return self._screen.show(self._source, self._keep(lines), self._rest)


class LogSink(LineSink):
    """File or pipe."""

    def __init__(
        self, *, prefix: bool, clock: TimestampFunction | None = None, names: ProcessNames | None = None
    ) -> None:
        super().__init__(prefix=prefix, clock=clock, names=names)
        #: The stream whose unfinished line stands at the end, and how much of each unfinished line is written.
        self._drawn_source: tuple[int, int] | None = None
        self._num_written: dict[tuple[int, int], int] = {}

    def show(self, source: tuple[int, int], lines: list[bytes], rest: bytes) -> bytes:
        """Return the lines, whole, and an unfinished one that redraws itself."""
        drawn = rest.rstrip(b"\r") if b"\r" in rest and len(rest) <= MAX_LINE_BYTES else b""
        if not lines and not drawn:
            return b""
        head, out = self.head(source[0]), b""
        texts = [line + b"\n" for line in lines] + [drawn] * bool(drawn)
        if self._drawn_source == source:
            out = _redraw(head, texts.pop(0)[self._num_written[source] :])
        elif self._drawn_source is not None:
            out = b"\n"
        first = lines[0].rstrip(b"\r") if lines else b""
        if self._drawn_source != source and first and self._num_written.get(source, 0) == len(first):
            del texts[0]  # a line of another rank has ended it
        if lines:
            self._num_written.pop(source, None)
        for text in texts:
            is_redrawn = text.startswith(b"\r") or not text.endswith(b"\n")
            out += (b"" if text.startswith(b"\r") else head) + (_redraw(head, text) if is_redrawn else text)
        self._drawn_source = source if drawn else None
        if drawn:
            self._num_written[source] = len(drawn)
        return out

    def say(self, message: bytes) -> bytes:
        """Return the message, on a line of its own."""
        if not message or self._drawn_source is None:
            return message
        self._drawn_source = None
        return b"\n" + message

    def collapse(self, source: tuple[int, int], rest: bytes) -> bytes:
        """Return all of it but the part that is written and overwritten."""
        begin = rest.rstrip(b"\r").rfind(b"\r")
        if begin <= 0 or self._drawn_source != source:
            return rest
        self._num_written[source] -= begin
        return rest[begin:]


def _redraw(head: bytes, text: bytes) -> bytes:
    """Put ``head`` into ``text`` where it begins again from the left."""
    return re.sub(rb"\r(?![\r\n]|$)", lambda match: match[0] + head, text)


class TerminalSink(LineSink):
    """Terminal of ``num_columns``, and its last line."""

    def __init__(
        self,
        *,
        prefix: bool,
        num_columns: int,
        clock: TimestampFunction | None = None,
        names: ProcessNames | None = None,
    ) -> None:
        super().__init__(prefix=prefix, clock=clock, names=names)
        self.num_columns = num_columns
        #: The unfinished line that is drawn, and its source.
        self._drawn, self._drawn_source = b"", (0, 0)

    def show(self, source: tuple[int, int], lines: list[bytes], rest: bytes) -> bytes:
        """Draw the lines above the unfinished line of rank 0."""
        head = self.head(source[0])
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

    def say(self, message: bytes) -> bytes:
        """Draw the message above the unfinished line."""
        return _ERASE + message + self._drawn if self._drawn and message else message

    def collapse(self, source: tuple[int, int], rest: bytes) -> bytes:
        """Return the visible part, and a carriage return if the next character overwrites it."""
        return visible_text(rest) + (b"\r" if rest.endswith(b"\r") else b"") if b"\r" in rest else rest

    @property
    def unfinished(self) -> bytes:
        """The unfinished line that is drawn; empty: the cursor is at the beginning of a line."""
        return self._drawn

    def _fit(self, line: bytes) -> bytes:
        """Cut ``line`` to one row: a longer one could not be erased. Lines with escape sequences are kept."""
        text = line.decode(errors="surrogateescape")
        if b"\x1b" in line or len(text) < self.num_columns:
            return line
        return text[: self.num_columns - 1].encode(errors="surrogateescape")


def visible_text(line: bytes) -> bytes:
    r"""Return the visible part of a line with carriage returns: the last text that was written over the others."""
    return next((part for part in reversed(line.split(b"\r")) if part), b"") if b"\r" in line else line
