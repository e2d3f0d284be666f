"""Failures to build views, in a row: when is it of no use for a process to try the next view?"""

from __future__ import annotations

from reigen.errors import AuthenticationError, CollectiveError, SharedMemoryError

#: How often a process that was in no view yet fails to build one whose members are there, before it gives up.
MAX_NEWCOMERS_FAILURES = 3
#: How often a process that was in one. Where all are at fault, the host having too little memory for one more, say, the
#: newcomer gives up before.
MAX_MEMBERS_FAILURES = 2 * MAX_NEWCOMERS_FAILURES
#: How often where others are at fault: these give up before, and the next view is one without them.
MAX_OTHERS_FAILURES = 2 * MAX_MEMBERS_FAILURES


class BuildFailures:
    """Failures of one process since it was last in a view that could be built."""

    def __init__(self) -> None:
        self._num_own = self._num_others = 0
        self._max_own = MAX_NEWCOMERS_FAILURES

    def add(self, error: Exception, rank: int, *, is_wanted: bool) -> bool:
        """Count a failure; return whether the process gives up.

        Args:
            error: why the view could not be built.
            rank: of this process in it.
            is_wanted: the view was not given up before. What fails in one that was may be a consequence of that; but
                not that this process has too little memory, and others may have given the view up for that.
        """
        # Members know the secret: one with whom a handshake fails has most likely died in it.
        if not isinstance(error, CollectiveError | AuthenticationError):
            return is_wanted
        if isinstance(error, CollectiveError) and error.ranks and rank not in error.ranks:
            self._num_others += is_wanted
        else:
            self._num_own += is_wanted or isinstance(error, SharedMemoryError)
        return self._num_own >= self._max_own or self._num_others >= MAX_OTHERS_FAILURES

    def clear(self) -> None:
        """A view could be built."""
        self._num_own = self._num_others = 0
        self._max_own = MAX_MEMBERS_FAILURES
