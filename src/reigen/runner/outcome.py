"""Outcome of a job, decided from its processes' messages, in the order in which they were sent. No I/O.

A rank that fails reports it before it leaves, so its report is older than every report of a rank that fails because of
it. Two more things decide between a culprit and its victims: a rank that raised because a peer had gone reports that,
too; and after the first exit that makes the launcher stop the others, exits mean nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reigen.runner.result_channel import LauncherComplaint, LauncherFinished, RankExited, RankReport, ResultMessage


@dataclass(frozen=True, slots=True)
class AllReturned:
    """Function returned in all ranks."""


@dataclass(frozen=True, slots=True)
class FunctionRaised:
    """Function raised in this report's rank, first."""

    report: RankReport


@dataclass(frozen=True, slots=True)
class RankProcessDied:
    """Process of a rank ended first, without a report; exit code and cause as in ``RankExited``.

    ``returned``: the function had returned.
    """

    rank: int
    exit_code: int
    returned: bool
    cause: str = ""


@dataclass(frozen=True, slots=True)
class LauncherStopped:
    """Launcher was sent a signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class LauncherLost:
    """Launcher did not do its part; ``reason`` is its own message, or empty."""

    reason: str


JobOutcome = AllReturned | FunctionRaised | RankProcessDied | LauncherStopped | LauncherLost


def decide_outcome(messages: Sequence[ResultMessage], size: int) -> JobOutcome:
    """Decide the outcome of a job of ``size`` ranks from all messages, in order."""
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
    """List the launcher's complaints about its own side."""
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
