"""Pauses in which all members wait while the state is broadcast to newcomers; long ones are announced.

How long one will be is what the latest broadcast took here, in proportion to the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from reigen import context

#: A pause that is expected to be shorter is not announced, nor one for fewer bytes: what they take is mostly chance.
LEAST_ANNOUNCED_SECONDS = 1.0
LEAST_MEASURED_BYTES = 16 << 20
#: As long as it is not known how fast it will be, a transfer of fewer bytes is not announced.
LEAST_ANNOUNCED_BYTES = 1 << 30

Announce = Callable[[float, int, tuple[int, ...]], None]


def announce_to_launcher(seconds: float, num_bytes: int, receivers: tuple[int, ...]) -> None:
    """Have the launcher tell the user, except at the beginning of the job: there is no pause before the first step.

    Args:
        seconds: that the pause will take; 0: not known.
        num_bytes: that are sent.
        receivers: ranks that get them.
    """
    elastic = context.elastic_job()
    if elastic is not None and elastic.epoch > 1:
        elastic.announce_pause(seconds, num_bytes, receivers)


class BroadcastPauses:
    """Pauses in which the state is broadcast: the source announces them.

    Readings of memory are not announced: they are faster than a network, and whether a newcomer can read is found out
    only when all wait for it.

    Args:
        announce: tells the user.
        clock: seconds.
    """

    def __init__(
        self, *, announce: Announce = announce_to_launcher, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._announce, self._clock = announce, clock
        #: of the latest broadcast; None: there was none
        self._seconds_per_byte: float | None = None

    @contextmanager
    def measured(self, num_bytes: int, receivers: frozenset[int], *, is_source: bool) -> Iterator[None]:
        """Measure a broadcast, for which all wait; the source announces it first if it may take long."""
        if is_source and receivers:
            self._announce_if_long(num_bytes, tuple(sorted(receivers)))
        begun_at = self._clock()
        yield
        if num_bytes:
            self._seconds_per_byte = (self._clock() - begun_at) / num_bytes

    def _announce_if_long(self, num_bytes: int, receivers: tuple[int, ...]) -> None:
        if self._seconds_per_byte is None:
            if num_bytes >= LEAST_ANNOUNCED_BYTES:
                self._announce(0.0, num_bytes, receivers)
            return
        seconds = num_bytes * self._seconds_per_byte
        if seconds >= LEAST_ANNOUNCED_SECONDS and num_bytes >= LEAST_MEASURED_BYTES:
            self._announce(seconds, num_bytes, receivers)
