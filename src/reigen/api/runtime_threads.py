"""Threads of a framework's runtime, of MXNet, TensorFlow or XLA, that call Python."""

from __future__ import annotations

import ctypes
import threading


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
