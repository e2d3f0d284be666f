"""A timer that is a file descriptor: timerfd(2), for who sleeps in an epoll instance."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

_CLOCK_MONOTONIC = 1
_NONBLOCKING_CLOSED_BY_EXEC = os.O_NONBLOCK | os.O_CLOEXEC


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


@functools.cache
def _libc() -> Any:
    """libc, called with the lock of the interpreter held: these calls return at once."""
    libc = ctypes.PyDLL(None, use_errno=True)
    libc.timerfd_settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_TimerSpec), ctypes.c_void_p)
    return libc


class TimerFd:
    """Goes off once, ``seconds`` (less than one) after `start`; readable from then on, until `start` or `stop`."""

    def __init__(self, seconds: float) -> None:
        self._set = _libc().timerfd_settime
        self._running = _TimerSpec(value=_Timespec(0, int(seconds * 1e9)))
        self._stopped = _TimerSpec()
        self._fd: int = _libc().timerfd_create(_CLOCK_MONOTONIC, _NONBLOCKING_CLOSED_BY_EXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def fileno(self) -> int:
        """Return the descriptor, -1 after `close`."""
        return self._fd

    def start(self) -> None:
        """Count from now on."""
        self._set(self._fd, 0, self._running, None)

    def stop(self) -> None:
        """Do not go off; that it has is forgotten."""
        self._set(self._fd, 0, self._stopped, None)

    def close(self) -> None:
        """May be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
