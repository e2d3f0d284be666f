"""What went wrong in which rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class RankFailure:
    """One rank that did not return a result.

    Attributes:
        rank: which.
        kind: ``raised`` an exception, ``died``, or was ``late`` and has been stopped.
        text: the traceback; how it died; or where it was when time was up.
        error: the exception, where it could be brought over.
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
    """A function failed in one or more ranks. The message tells everything of all of them.

    Attributes:
        failures: in ascending order of rank.
        results: what the ranks that succeeded returned, by rank.
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
        """The lowest rank that failed."""
        return self.failures[0].rank

    @property
    def errors(self) -> dict[int, BaseException]:
        """The exceptions that could be brought over, by rank."""
        return {failure.rank: failure.error for failure in self.failures if failure.error is not None}

    def of(self, rank: int) -> RankFailure:
        """What happened in one rank.

        Raises:
            KeyError: it did not fail.
        """
        for failure in self.failures:
            if failure.rank == rank:
                return failure
        raise KeyError(rank)
