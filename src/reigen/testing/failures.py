"""Failures of ranks in tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class RankFailure:
    """Failure of one rank that did not return a result.

    Attributes:
        rank: its number.
        kind: ``raised`` an exception, ``died``, or was ``late`` and has been stopped.
        text: the traceback; the exit status or signal; or its stack when time was up.
        error: the exception, where it could be unpickled.
        exit_code: of a rank that died: its exit status, or minus the signal's number.
        stderr: the last lines that it wrote there during the call.
    """

    rank: int
    kind: Literal["raised", "died", "late"]
    text: str
    error: BaseException | None = None
    exit_code: int | None = None
    stderr: str = ""


class RankError(AssertionError):
    """Error for a function that failed in one or more ranks. The message has all failures.

    Attributes:
        failures: in ascending order of rank.
        results: of the ranks that succeeded, by rank.
    """

    def __init__(self, failures: Sequence[RankFailure], results: Mapping[int, Any], size: int) -> None:
        self.failures = tuple(sorted(failures, key=lambda failure: failure.rank))
        self.results = dict(results)
        parts = [f"{len(self.failures)} of {size} ranks failed"]
        for failure in self.failures:
            parts.append(f"--- rank {failure.rank} {failure.kind}\n{failure.text.rstrip()}")
            if failure.stderr.strip():
                parts.append(f"--- rank {failure.rank}, its last lines on stderr\n{failure.stderr.rstrip()}")
        super().__init__("\n".join(parts))

    @property
    def rank(self) -> int:
        """Lowest rank that failed."""
        return self.failures[0].rank

    @property
    def errors(self) -> dict[int, BaseException]:
        """Exceptions that could be unpickled, by rank."""
        return {failure.rank: failure.error for failure in self.failures if failure.error is not None}

    def of(self, rank: int) -> RankFailure:
        """Return one rank's failure, or raise KeyError."""
        return {failure.rank: failure for failure in self.failures}[rank]
