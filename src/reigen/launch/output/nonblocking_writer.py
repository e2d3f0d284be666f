"""Writers to the launcher's stdout and stderr that never wait.

The launcher must notice signals and failures while its own output is stuck (a stopped terminal, a pager), so it writes
as much as is possible and keeps the rest; the sources of a full writer are asked to pause.
"""

from __future__ import annotations

import errno
import os
import select
import sys
import time
from contextlib import suppress
from typing import TextIO

from reigen.launch.output.line_prefix import LineSink, LogSink, ProcessNames, TerminalSink, TimestampFunction

#: A pipe that is ready takes this much without blocking (PIPE_BUF).
_WRITE_BYTES = 4096
_FULL_BYTES = 1 << 20


class NonblockingWriter:
    """Writer to one descriptor, which stays blocking: other processes share it.

    Attributes:
        pending: bytes that could not be written yet.
        broken: the reader has gone, or it cannot be written; further data is dropped.
        why_broken: the kernel's reason, where there may still be a reader: the disk is full; else empty.
    """

    def __init__(self, fd: int, screen: LineSink) -> None:
        self.fd, self.screen = fd, screen
        self.pending = bytearray()
        self.broken, self.why_broken = False, ""
        #: lines below all others, on a terminal; what erases them, where they are drawn
        self._footer: list[bytes] = []
        self._erase = b""
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def is_full(self) -> bool:
        """Return whether the sources should pause."""
        return len(self.pending) > _FULL_BYTES

    def put(self, data: bytes) -> None:
        """Write ``data`` after the pending bytes, when that is possible."""
        if not self.broken and data:
            self._erase_footer()
            self.pending += data

    def set_footer(self, lines: list[bytes]) -> None:
        """Have these lines stand below all others, in place of those before; none: no more. For a terminal."""
        self._erase_footer()
        self._footer = lines

    def draw_footer(self) -> None:
        """Draw the footer again, if something was written since."""
        if self._footer and not self._erase and not self.broken and isinstance(self.screen, TerminalSink):
            unfinished = self.screen.unfinished
            self.pending += b"\n" * bool(unfinished) + b"\r\n".join(self._footer)
            num_up = len(self._footer) - 1 + bool(unfinished)
            self._erase = b"\r" + (b"\x1b[%dA" % num_up if num_up else b"") + b"\x1b[J" + unfinished

    def _erase_footer(self) -> None:
        self.pending += self._erase
        self._erase = b""

    def flush(self) -> None:
        """Write as much as is possible without waiting."""
        written = 0
        try:
            while written < len(self.pending) and self._poll.poll(0):
                written += os.write(self.fd, self.pending[written : written + _WRITE_BYTES])
        except OSError as error:  # the reader or the terminal has gone, or the disk is full
            self.broken, self.why_broken = True, "" if error.errno == errno.EPIPE else os.strerror(error.errno or 0)
            self.pending.clear()
        del self.pending[:written]


def open_std_writers(
    *, prefix: bool, timestamps: bool, names: ProcessNames
) -> tuple[NonblockingWriter, NonblockingWriter]:
    """Open writers for the launcher's stdout and stderr; one for both if they are the same terminal, pipe or file."""
    clock = _now if timestamps else None
    out = _open_writer(sys.stdout, prefix, clock, names)
    if _is_same_file(sys.stdout, sys.stderr):  # its last line must be known
        return out, out
    return out, _open_writer(sys.stderr, prefix, clock, names)


def _open_writer(
    stream: TextIO, prefix: bool, clock: TimestampFunction | None, names: ProcessNames
) -> NonblockingWriter:
    fd = stream.fileno()
    if not os.isatty(fd):
        return NonblockingWriter(fd, LogSink(prefix=prefix, clock=clock, names=names))
    num_columns = 0
    with suppress(OSError):
        num_columns = os.get_terminal_size(fd).columns
    return NonblockingWriter(fd, TerminalSink(prefix=prefix, num_columns=num_columns or 80, clock=clock, names=names))


def _now() -> bytes:
    seconds = time.time()
    text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return f"{text}.{int(seconds % 1 * 1000):03} ".encode()


def _is_same_file(one: TextIO, other: TextIO) -> bool:
    if one.isatty() and other.isatty():  # by any of its names
        return os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev
    return os.path.sameopenfile(one.fileno(), other.fileno())
