"""Event loop of the launcher's processes: descriptors, and signals that ask them to stop."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from typing import Self

from reigen.launch.supervision.watchdog import PASSED_SIGNALS, STOP_SIGNALS
from reigen.net.event_loop import EventLoop


class LauncherLoop(EventLoop):
    """Event loop of one thread, and a context manager.

    Args:
        watchdog_pipe: see ``launch.supervision.watchdog``; None where there is no watchdog.
        on_signal: called with the number of a signal, sent to this process or to its watchdog, that asks to stop or is
            for the ranks.
        on_watchdog_lost: called when the watchdog has gone.
    """

    def __init__(
        self,
        watchdog_pipe: int | None = None,
        on_signal: Callable[[int], None] = lambda signum: None,
        on_watchdog_lost: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._watchdog_pipe, self._on_signal, self._on_watchdog_lost = watchdog_pipe, on_signal, on_watchdog_lost
        self._signals, self._signalled = socket.socketpair()

    def __enter__(self) -> Self:
        watchdog_pipe = self._watchdog_pipe
        if watchdog_pipe is not None:
            self._signals.setblocking(False)
            signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
            self.watch(watchdog_pipe, lambda: self._read(watchdog_pipe))
            self.watch(self._signalled, lambda: self._dispatch(self._signalled.recv(64)))
        return self

    def __exit__(self, *_: object) -> None:
        if self._watchdog_pipe is not None:
            signal.set_wakeup_fd(-1)
        self.close()
        self._signals.close()
        self._signalled.close()

    def _read(self, watchdog_pipe: int) -> None:
        signals = os.read(watchdog_pipe, 64)
        if not signals:
            self.unwatch(watchdog_pipe)
            self._on_watchdog_lost()
        self._dispatch(signals)

    def _dispatch(self, signals: bytes) -> None:
        for signum in signals:
            if signum in STOP_SIGNALS or signum in PASSED_SIGNALS:
                self._on_signal(signum)
