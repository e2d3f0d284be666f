"""What came of a job, decided from what its processes said, in the order in which they said it. No I/O.

A rank that fails says so before it leaves, so its report is older than every report of a rank that fails because of it.
Two more things decide between a culprit and its victims: a rank that raised because a peer had gone says that, too; and
after the first exit that makes the launcher stop the others, exits mean nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reigen.runner.result_channel import LauncherComplaint, LauncherFinished, RankExited, RankReport, ResultMessage


@dataclass(frozen=True, slots=True)
class AllReturned:
    """The function returned in all ranks."""


@dataclass(frozen=True, slots=True)
class FunctionRaised:
    """It raised in this report's rank, first."""

    report: RankReport


@dataclass(frozen=True, slots=True)
class RankProcessDied:
    """The process of a rank ended first, and said nothing of it.

    Attributes:
        rank: whose.
        exit_code: as in ``line.Exited``.
        returned: the function had returned.
        cause: as in ``line.Exited``.
    """

    rank: int
    exit_code: int
    returned: bool
    cause: str = ""


@dataclass(frozen=True, slots=True)
class LauncherStopped:
    """Somebody sent the launcher a signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class LauncherLost:
    """The launcher did not do its part; ``reason`` in its own words, or empty."""

    reason: str


JobOutcome = AllReturned | FunctionRaised | RankProcessDied | LauncherStopped | LauncherLost


def decide_outcome(messages: Sequence[ResultMessage], size: int) -> JobOutcome:
    """What came of a job of ``size`` ranks.

    Args:
        messages: everything that was said, in order.
        size: how many ranks there were.
    """
    ended = next((message for message in messages if isinstance(message, LauncherFinished)), None)
    if ended is not None and ended.signum is not None:
        return LauncherStopped(ended.signum)
    failure = _first_failure(messages)
    if failure is not None:
        return failure
    num_returned = sum(isinstance(message, RankReport) and not message.failed for message in messages)
    if ended is not None and num_returned == size:
        return AllReturned()
    return LauncherLost("\n".join(list_complaints(messages)))


def list_complaints(messages: Sequence[ResultMessage]) -> list[str]:
    """What the launcher found wrong on its own side, in its words."""
    return [message.text for message in messages if isinstance(message, LauncherComplaint)]


def _first_failure(messages: Sequence[ResultMessage]) -> FunctionRaised | RankProcessDied | None:
    reports: dict[int, RankReport] = {}
    victims: list[FunctionRaised] = []
    for message in messages:
        if isinstance(message, RankReport):
            reports[message.rank] = message
            if message.failed and not message.is_victim:
                return FunctionRaised(message)
            if message.failed:
                victims.append(FunctionRaised(message))
        elif isinstance(message, RankExited):
            report = reports.get(message.rank)
            if report is None or (message.exit_code != 0 and not report.failed):
                return RankProcessDied(message.rank, message.exit_code, report is not None, message.cause)
            if message.exit_code != 0:
                break  # from here on the launcher stops the others
    return victims[0] if victims else None
