"""Offset of a rank's clock from rank 0's.

A rank notes the time, asks rank 0 for its time, and notes when the answer has come. Rank 0's clock was read somewhere
in between: taken for the middle, the error is at most half of the time between. The fastest of several attempts is the
best (D. L. Mills, RFC 5905, section 10). An estimate grows older: quartz clocks run apart by up to 50 parts per million
each, so its error bound grows until a newer one, though slower, is better.

Processes of one host, in one time namespace, read the very same clock: if the measurement does not contradict, the
offset is zero and exact.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MAX_DRIFT = 100e-6


@dataclass(frozen=True)
class TimelineClock:
    """Clock: ``read`` returns nanoseconds, and ``identity`` is the same just for processes that read the same clock."""

    read: Callable[[], int]
    identity: str


def monotonic_clock() -> TimelineClock:
    """Return the monotonic clock of this process."""
    identity = ""
    with suppress(OSError):
        identity = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        with suppress(OSError):  # before Linux 5.6 there are no time namespaces
            identity += " " + os.readlink("/proc/self/ns/time")
    return TimelineClock(time.monotonic_ns, identity)


@dataclass(frozen=True)
class ClockOffsetSample:
    """Estimate of the offset to add to the own clock, and its largest error, in nanoseconds, at time ``taken``."""

    nanoseconds: int
    error: int
    taken: int

    def error_at(self, now: int) -> int:
        """Return the largest error at a time of the own clock."""
        if self is ZERO_OFFSET:
            return 0
        return self.error + int((now - self.taken) * _MAX_DRIFT)


def estimate_offset(sent: int, remote: int, received: int) -> ClockOffsetSample:
    """Estimate from one question and answer: own time of asking, the other's time, own time of the answer."""
    return ClockOffsetSample(remote - (sent + received) // 2, (received - sent + 1) // 2, received)


#: Sample where both read the same clock.
ZERO_OFFSET = ClockOffsetSample(0, 0, 0)


class ClockOffsetEstimate:
    """Best estimate of the offset of rank 0's clock; ``is_same``: the clocks have the same identity."""

    def __init__(self, is_same: bool) -> None:
        self._is_same = is_same
        #: Best sample; None while there is none.
        self.best: ClockOffsetSample | None = None

    def learn(self, new: ClockOffsetSample) -> None:
        """Take a measurement."""
        if self._is_same and abs(new.nanoseconds) <= new.error:
            self.best = ZERO_OFFSET
        elif self.best is None or new.error <= self.best.error_at(new.taken):
            self.best = new
