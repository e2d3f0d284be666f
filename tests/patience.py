"""Tests of deadlines that pass, on machines that may keep any thread or process from running for a while."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import pytest

T = TypeVar("T")


def patiently(attempt: Callable[[float], T], seconds: float = 0.3) -> T:
    """What ``attempt(seconds)`` returns; if it fails, it is tried again twice, with six times as long each time.

    Whoever is kept from running for longer than a deadline is late, and is rightly named beside the one that the test
    keeps away. So such a test begins with a short deadline, which is all that it takes on a quiet machine.

    Args:
        attempt: the whole of a test, with deadlines of so many seconds: nothing of one reaches the next.
        seconds: the shortest.
    """
    for number in range(2):
        with suppress(Exception, pytest.fail.Exception):
            return attempt(seconds * 6**number)
    return attempt(seconds * 36)
