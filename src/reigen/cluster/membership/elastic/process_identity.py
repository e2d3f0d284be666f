"""Identity of a process on its host: a later one may get its process id."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

#: numbers of fields in /proc/PID/stat, counted behind the name of the program
_STATE, _START_TIME = 0, 19
#: of a process that was sent SIGSTOP, or that a debugger has stopped
_STOPPED = {"T", "t"}


@dataclass(frozen=True, slots=True)
class LocalProcess:
    """A process of this host.

    Attributes:
        pid: its process id.
        started: when it was started, in ticks since the kernel was.
    """

    pid: int
    started: int

    @classmethod
    def current(cls) -> Self:
        """Return this process."""
        return cls(os.getpid(), _start_time(os.getpid()))

    def open(self) -> int | None:
        """Open a pidfd, which the caller closes; None: the process has ended."""
        try:
            fd = os.pidfd_open(self.pid)
        except (ProcessLookupError, OSError):
            return None
        try:
            is_same = _start_time(self.pid) == self.started
        except OSError:
            is_same = False
        if not is_same:
            os.close(fd)
        return fd if is_same else None

    @property
    def is_stopped(self) -> bool:
        """True if it was stopped by a signal, or by a debugger, and has not been continued."""
        try:
            fields = _read_fields(self.pid)
        except OSError:
            return False
        return fields[_STATE] in _STOPPED and int(fields[_START_TIME]) == self.started


def _start_time(pid: int) -> int:
    return int(_read_fields(pid)[_START_TIME])


def _read_fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
