"""Who works with the connections of a store: one thread at a time, and the others can ask it to make room."""

from __future__ import annotations

import contextlib
import os
import threading


class Turnstile:
    """A lock with a bell. Who holds it waits for `fileno` to be readable, too, and leaves soon when it is.

    Attributes:
        num_passed: how often it was left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.num_passed = 0

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.ring()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.num_passed += 1
        self._lock.release()

    def fileno(self) -> int:
        """A descriptor that is readable while somebody wants to come in."""
        return self._bell

    def ring(self) -> None:
        """Ask who holds it to leave."""
        os.eventfd_write(self._bell, 1)

    def heed(self) -> bool:
        """Whether somebody has rung since the last time."""
        with contextlib.suppress(BlockingIOError):
            return os.eventfd_read(self._bell) > 0
        return False

    def close(self) -> None:
        """Give up the descriptor. May be called twice; nobody comes any more."""
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1
