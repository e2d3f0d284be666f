"""Pauses in which all members wait while newcomers get the state; long ones are announced before they begin.

How long one will be is what the latest transfer of that kind took here, in proportion to the bytes. The first one of a
job is at its beginning, when all ranks get the state of rank 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable

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


class TransferPauses:
    """Pauses of one kind of transfer: the source announces them.

    Args:
        announces_unknown: also those of which it is not known how long they will be.
        announce: tells the user.
        clock: seconds.
    """

    def __init__(
        self,
        *,
        announces_unknown: bool,
        announce: Announce = announce_to_launcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._announces_unknown, self._announce, self._clock = announces_unknown, announce, clock
        #: of the latest transfer; None: there was none
        self._seconds_per_byte: float | None = None
        self._num_bytes, self._begun_at = 0, 0.0

    def begin(self, num_bytes: int, receivers: frozenset[int], *, is_source: bool) -> None:
        """Take note that a transfer begins, for which all wait; the source announces it if it may take long."""
        self._num_bytes, self._begun_at = num_bytes, self._clock()
        if not is_source or not receivers:
            return
        seconds = 0.0 if self._seconds_per_byte is None else num_bytes * self._seconds_per_byte
        is_long = seconds >= LEAST_ANNOUNCED_SECONDS and num_bytes >= LEAST_MEASURED_BYTES
        if self._seconds_per_byte is None:
            is_long = self._announces_unknown and num_bytes >= LEAST_ANNOUNCED_BYTES
        if is_long:
            self._announce(seconds, num_bytes, tuple(sorted(receivers)))

    def end(self) -> None:
        """Take note that the transfer has ended: receivers have everything."""
        if self._num_bytes:
            self._seconds_per_byte = (self._clock() - self._begun_at) / self._num_bytes
