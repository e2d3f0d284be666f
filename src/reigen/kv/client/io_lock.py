"""Lock on the connections of a store: one thread at a time works with them, and the others can ask it to make room."""

from __future__ import annotations

import contextlib
import os
import threading


class IOLock:
    """Lock with a bell. Its holder waits for `fileno` to be readable, too, and leaves soon when it `is_wanted`.

    The lock is not fair, and a thread that comes back at once may be faster than one that has rung: so those that wait
    are counted, and the bell is only for a holder that sleeps.

    Attributes:
        num_releases: how often it was left.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._counting = threading.Lock()
        self._num_waiting = 0
        self.num_releases = 0

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            with self._counting:
                self._num_waiting += 1
            self.ring()
            self._lock.acquire()
            with self._counting:
                self._num_waiting -= 1

    def try_acquire(self) -> bool:
        """Come in if the lock is free, without asking the holder to leave; return whether it was."""
        return self._lock.acquire(blocking=False)

    @property
    def is_wanted(self) -> bool:
        """Return whether a thread waits to come in."""
        return self._num_waiting > 0

    def __exit__(self, *_: object) -> None:
        self.num_releases += 1
        self._lock.release()

    def fileno(self) -> int:
        """Return a descriptor that is readable after `ring`."""
        return self._bell

    def ring(self) -> None:
        """Ask the holder to leave."""
        os.eventfd_write(self._bell, 1)

    def clear(self) -> None:
        """Take note of the bell."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def close(self) -> None:
        """Give up the descriptor. May be called twice."""
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1
