"""Event loop of one thread: descriptors with callbacks, timers, and a wake-up by any thread."""

from __future__ import annotations

import heapq
import itertools
import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

Callback = Callable[[], object]

#: epoll counts milliseconds in 31 bits.
_LONGEST_WAIT_SECONDS = 86_400.0
_IN, _OUT = select.EPOLLIN, select.EPOLLOUT


class HasFileno(Protocol):
    """An open file, pipe or socket."""

    def fileno(self) -> int:
        """Return the descriptor."""


class Timer:
    """A callback that is due once; made by `EventLoop.call_at`."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callback) -> None:
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """Do not call it. May be called at any time."""
        self.callback = None


class _Watch:
    __slots__ = ("on_readable", "on_writable")

    def __init__(self, on_readable: Callback | None, on_writable: Callback | None) -> None:
        self.on_readable, self.on_writable = on_readable, on_writable

    @property
    def events(self) -> int:
        return (_IN if self.on_readable else 0) | (_OUT if self.on_writable else 0)


class EventLoop:
    """Event loop of one thread, level-triggered, with callbacks for descriptors and timers.

    For one thread, but for `wake`. A descriptor must be unwatched before it is closed.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watches: dict[int, _Watch] = {}
        #: when it is due, a number that breaks ties, and the timer
        self._timers: list[tuple[float, int, Timer]] = []
        self._num_timers = itertools.count()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.watch(self._wakeup, lambda: os.eventfd_read(self._wakeup))

    def watch(
        self, file: HasFileno | int, on_readable: Callback | None = None, on_writable: Callback | None = None
    ) -> None:
        """Call these while ``file`` is readable or writable, instead of earlier callbacks of that file.

        An error or the end of a connection counts as both.
        """
        fd = _descriptor(file)
        watch = self._watches.get(fd)
        if watch is None:
            watch = _Watch(on_readable, on_writable)
            self._epoll.register(fd, watch.events)
            self._watches[fd] = watch
            return
        before = watch.events
        watch.on_readable, watch.on_writable = on_readable, on_writable
        if watch.events != before:
            self._epoll.modify(fd, watch.events)

    def unwatch(self, file: HasFileno | int) -> None:
        """Call nothing for ``file`` any more; nothing happens where it is not watched."""
        fd = _descriptor(file)
        if self._watches.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def watches(self, file: HasFileno | int) -> bool:
        """Return whether ``file`` is watched."""
        return _descriptor(file) in self._watches

    def call_at(self, when: float, callback: Callback) -> Timer:
        """Have `wait` call ``callback`` once it is ``when`` on the clock of ``time.monotonic()``."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (when, next(self._num_timers), timer))
        return timer

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for events, at most so long, and call descriptors' callbacks, then those of timers."""
        timers = self._timers
        while timers and timers[0][2].callback is None:
            heapq.heappop(timers)
        if timers:
            left = max(0.0, timers[0][0] - time.monotonic())
            timeout_seconds = left if timeout_seconds is None else min(left, timeout_seconds)
        if timeout_seconds is not None:
            timeout_seconds = min(timeout_seconds, _LONGEST_WAIT_SECONDS)
        watches = self._watches
        for fd, events, watch in [(fd, events, watches.get(fd)) for fd, events in self._epoll.poll(timeout_seconds)]:
            if watch is None:
                continue
            # an earlier callback may have ended or changed this one
            if events & ~_OUT and watch.on_readable is not None and watches.get(fd) is watch:
                watch.on_readable()
            if events & ~_IN and watch.on_writable is not None and watches.get(fd) is watch:
                watch.on_writable()
        if timers:
            now = time.monotonic()
            while timers and timers[0][0] <= now:
                if (callback := heapq.heappop(timers)[2].callback) is not None:
                    callback()

    def wake(self) -> None:
        """End a `wait`, or the next one. Any thread may call this."""
        with suppress(OSError, ValueError):  # it is closed
            os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Call nothing any more. May be called twice."""
        self._watches.clear()
        self._timers.clear()
        self._epoll.close()
        if self._wakeup >= 0:
            wakeup, self._wakeup = self._wakeup, -1
            os.close(wakeup)


def _descriptor(file: HasFileno | int) -> int:
    try:
        return file if isinstance(file, int) else file.fileno()
    except ValueError:  # of a closed file
        return -1


def wait_ready(file: HasFileno | int, timeout_seconds: float = 0.0, events: int = select.POLLIN) -> bool:
    """Wait for one descriptor, at most so long; returns whether it is ready."""
    poll = select.poll()
    poll.register(file, events)
    return bool(poll.poll(timeout_seconds * 1000))
