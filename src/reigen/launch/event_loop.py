"""Event loop of the launcher's processes: descriptors, and signals that ask them to stop."""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, Self

from reigen.launch.watchdog import STOP_SIGNALS

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class HasFileno(Protocol):
    """Open file, pipe or socket."""

    def fileno(self) -> int:
        """Return its descriptor."""


def _ignore_signal(_: int) -> None:
    """Ignore a signal: without a watchdog no process passes one on."""


class LauncherLoop:
    """Event loop of one thread, and a context manager.

    Args:
        lifeline: see ``launch.watchdog``; None where there is no watchdog.
        on_signal: called with the number of a signal that asks to stop, sent to this process or to its watchdog.
        on_orphaned: called when the watchdog has gone.
    """

    def __init__(
        self,
        lifeline: int | None = None,
        on_signal: Callable[[int], None] = _ignore_signal,
        on_orphaned: Callable[[], None] = lambda: None,
    ) -> None:
        self._lifeline, self._on_signal, self._on_orphaned = lifeline, on_signal, on_orphaned
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wakened = socket.socketpair()

    def __enter__(self) -> Self:
        lifeline = self._lifeline
        if lifeline is not None:
            self._wakeup.setblocking(False)
            signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
            self.watch(lifeline, lambda: self._read(lifeline))
            self.watch(self._wakened, lambda: self._dispatch(self._wakened.recv(64)))
        return self

    def __exit__(self, *_: object) -> None:
        if self._lifeline is not None:
            signal.set_wakeup_fd(-1)
        self._selector.close()
        self._wakeup.close()
        self._wakened.close()

    def watch(self, file: HasFileno | int, callback: Callable[[], object], events: int = READ) -> None:
        """Call ``callback`` whenever ``file`` is ready."""
        self._selector.register(file, events, callback)

    def unwatch(self, file: HasFileno | int) -> None:
        """Stop watching ``file``, if it is watched."""
        with suppress(KeyError):
            self._selector.unregister(file)

    def watches(self, file: HasFileno | int) -> bool:
        """Return whether ``file`` is watched."""
        return file in self._selector.get_map()

    def wait(self, seconds: float | None) -> None:
        """Wait for events, not longer than ``seconds``, and call their callbacks."""
        for key, _ in self._selector.select(seconds):
            if self._selector.get_map().get(key.fd) is key:  # an earlier one may have ended it
                callback: Callable[[], object] = key.data
                callback()

    def _read(self, lifeline: int) -> None:
        signals = os.read(lifeline, 64)
        if not signals:
            self.unwatch(lifeline)
            self._on_orphaned()
        self._dispatch(signals)

    def _dispatch(self, signals: bytes) -> None:
        for signum in signals:
            if signum in STOP_SIGNALS:
                self._on_signal(signum)
