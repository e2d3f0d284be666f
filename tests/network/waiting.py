"""Waiting for a condition with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from reigen.testing.launchers import looks


def wait_for(condition: Callable[[], object], what: str, timeout: float = 60.0) -> None:
    until = time.monotonic() + timeout
    for now in looks(0.005):
        if condition():
            return
        assert now < until, f"waited {timeout:g} s for: {what}"
