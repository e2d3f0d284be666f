"""Threads of a framework's runtime, of MXNet, TensorFlow or XLA, that call Python."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Sized
from queue import Empty, SimpleQueue

#: seconds between looks of `wait_until_left`
_LOOK_SECONDS = 0.0005


class KnownThreads(threading.local):
    """Threads of a runtime that Python knows.

    ctypes has Python make, and forget, the state of a thread that is not its own with each call, which takes longer
    than to begin a collective. Ensured once more, it stays for as long as the thread.
    """

    _stays = False

    def stay(self) -> None:
        """Have Python keep the state of this thread."""
        if not self._stays:
            self._stays = True
            ctypes.pythonapi.PyGILState_Ensure()


class ContinuationThreads:
    """Threads that tell a runtime that a call is complete; it may run the rest of a program before it returns.

    There are as many as are needed at a time: none of them waits for another.

    Args:
        name: of the threads.
        idle_seconds: a thread that has had nothing to do for so long ends.

    Attributes:
        num_idle: threads that wait for work, and for which none has been put in.
    """

    def __init__(self, name: str, idle_seconds: float = 10.0) -> None:
        self.num_idle = 0
        self._name, self._idle_seconds = name, idle_seconds
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()

    def run(self, work: Callable[[], None]) -> None:
        """Have one of them call ``work``, which must not raise. Where no thread can be started, this one does."""
        with self._lock:
            is_idle = self.num_idle > 0
            self.num_idle -= is_idle
        if is_idle:
            self._work.put(work)
            return
        try:
            threading.Thread(target=self._serve, args=(work,), name=self._name, daemon=True).start()
        except RuntimeError:  # a limit, or the end of the interpreter
            work()

    def _serve(self, work: Callable[[], None] | None) -> None:
        while work is not None:
            work()
            with self._lock:
                self.num_idle += 1
            work = self._wait_for_work()

    def _wait_for_work(self) -> Callable[[], None] | None:
        while True:
            try:
                return self._work.get(timeout=self._idle_seconds)
            except Empty:
                with self._lock:
                    if self.num_idle:  # otherwise there is work for each that waits
                        self.num_idle -= 1
                        return None


def wait_until_left(calls: Sized, seconds: float = math.inf) -> bool:
    """Wait, so long at most, until no thread of a runtime is in Python; return whether that came.

    For the end of the interpreter, and before a fork: a thread that needed the interpreter's lock afterwards would end
    the process, or never get it. Threads cannot report that they have left.

    Args:
        calls: those that are in Python. Each is taken out by the last instruction of the function that was called:
            between that and the thread's leave of Python no other thread gets the lock.
        seconds: at most.
    """
    latest = time.monotonic() + seconds
    while calls and time.monotonic() < latest:
        time.sleep(_LOOK_SECONDS)
    return not calls
