"""Waiting for a condition with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], what: str, timeout: float = 60.0) -> None:
    until = time.monotonic() + timeout
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < until, f"waited {timeout:g} s for: {what}"
        pause.wait(0.005)
