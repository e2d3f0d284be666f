"""Writing to the launcher's stdout and stderr without ever waiting for them.

The launcher must notice signals and failures while its own output is stuck (a stopped terminal, a pager), so it writes
what can be written and keeps the rest; whoever fills it is asked to pause.
"""

from __future__ import annotations

import os
import select
import sys
import time
from contextlib import suppress
from typing import TextIO

from reigen.launch.output import Clock, Log, Names, Screen, Terminal

#: A pipe that is ready takes this much without blocking (PIPE_BUF).
_WRITE_BYTES = 4096
_FULL_BYTES = 1 << 20


class Outlet:
    """One destination.

    Args:
        fd: where to write. It stays blocking: other processes share it.
        screen: how lines look there.

    Attributes:
        pending: what could not be written yet.
        broken: nobody reads there any more; what is put is dropped.
    """

    def __init__(self, fd: int, screen: Screen) -> None:
        self.fd, self.screen = fd, screen
        self.pending = bytearray()
        self.broken = False
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)

    @property
    def is_full(self) -> bool:
        """Whether those who print should pause."""
        return len(self.pending) > _FULL_BYTES

    def put(self, data: bytes) -> None:
        """Write ``data`` after what is pending, when that is possible."""
        if not self.broken:
            self.pending += data

    def flush(self) -> None:
        """Write what can be written without waiting."""
        written = 0
        try:
            while written < len(self.pending) and self._poll.poll(0):
                written += os.write(self.fd, self.pending[written : written + _WRITE_BYTES])
        except OSError:  # the reader or the terminal has gone
            self.broken = True
            self.pending.clear()
        del self.pending[:written]


def outlets(*, prefix: bool, timestamps: bool, names: Names) -> tuple[Outlet, Outlet]:
    """The launcher's stdout and stderr. Where both are one terminal, one outlet: its last line must be known.

    Args:
        prefix: lines begin with their rank.
        timestamps: lines begin with the time.
        names: of processes that are no ranks.
    """
    clock = _now if timestamps else None
    out = _outlet(sys.stdout, prefix, clock, names)
    if isinstance(out.screen, Terminal) and _same_terminal(sys.stdout, sys.stderr):
        return out, out
    return out, _outlet(sys.stderr, prefix, clock, names)


def _outlet(stream: TextIO, prefix: bool, clock: Clock | None, names: Names) -> Outlet:
    fd = stream.fileno()
    if not os.isatty(fd):
        return Outlet(fd, Log(prefix=prefix, clock=clock, names=names))
    num_columns = 0
    with suppress(OSError):
        num_columns = os.get_terminal_size(fd).columns
    return Outlet(fd, Terminal(prefix=prefix, num_columns=num_columns or 80, clock=clock, names=names))


def _now() -> bytes:
    seconds = time.time()
    text = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return f"{text}.{int(seconds % 1 * 1000):03} ".encode()


def _same_terminal(one: TextIO, other: TextIO) -> bool:
    return other.isatty() and os.fstat(one.fileno()).st_rdev == os.fstat(other.fileno()).st_rdev
