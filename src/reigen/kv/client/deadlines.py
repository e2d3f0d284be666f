"""When the calls of a worker's store have to be over: by one deadline each, however many steps they consist of."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from reigen.kv.client.requests import KVOperation

#: Servers keep the deadline and know who is missing; this end waits a little longer, for a server that says nothing.
_TOLERANCE_SECONDS = 1.0


class CallDeadlines:
    """The deadlines of one store, whose calls come one after the other.

    Args:
        seconds: how long a call may take.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        #: when the user's call that is under way has to be over, where it consists of several waits
        self._until: float | None = None

    @contextlib.contextmanager
    def one(self, until: float | None = None) -> Iterator[float]:
        """A block of which all waits end together: by the job's deadline, from now on. One within another is its part.

        Args:
            until: end by then, on the clock of ``time.monotonic()``.

        Yields:
            When that is.
        """
        if self._until is not None:
            yield self._until
            return
        self._until = time.monotonic() + self._seconds if until is None else until
        try:
            yield self._until
        finally:
            self._until = None

    def latest(self, what: KVOperation | str) -> float:
        """When to stop waiting; that of an operation is known where it is first waited for, and is never later."""
        until = time.monotonic() + self._seconds if self._until is None else self._until
        latest = until + _TOLERANCE_SECONDS
        if isinstance(what, str):
            return latest
        what.latest = latest if what.latest is None else min(what.latest, latest)
        return what.latest
