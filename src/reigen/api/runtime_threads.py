"""Threads of a framework's runtime, of MXNet, TensorFlow or XLA, that call Python."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Sized

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
