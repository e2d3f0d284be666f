"""Outcome of a job, decided from its processes' messages, in the order in which they were sent. No I/O.

A rank that fails reports it before it leaves, so its report is older than every report of a rank that fails because of
it. Two more things decide between a culprit and its victims: a rank that raised because a peer had gone reports that,
too; and after the first exit that makes the launcher stop the others, exits mean nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reigen.errors import RankFailedError
from reigen.launch.exit_report import SIGKILL_HINT
from reigen.launch.job_state import KILLED_EXIT_CODES, ProcessExited
from reigen.launch.supervision.process_tree import signal_name
from reigen.runner.result_channel import LauncherComplaint, LauncherFinished, RankReport, ResultMessage


@dataclass(frozen=True, slots=True)
class AllReturned:
    """Function returned in all ranks."""


@dataclass(frozen=True, slots=True)
class FunctionRaised:
    """Function raised in this report's rank, first."""

    report: RankReport


@dataclass(frozen=True, slots=True)
class RankProcessDied:
    """Process of a rank ended first, without a report; exit code and cause as in ``ProcessExited``.

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
        elif isinstance(message, ProcessExited):
            report = reports.get(message.rank)
            if report is None or (message.exit_code != 0 and not report.failed):
                return RankProcessDied(message.rank, message.exit_code, report is not None, message.cause)
            if message.exit_code != 0:
                break  # from here on the launcher stops the others
    return victims[0] if victims else None


def function_raised_error(report: RankReport, size: int, traceback: str) -> RankFailedError:
    """Make the error for a function that raised; ``traceback`` is its text in Python's form."""
    rank = report.rank
    return RankFailedError(
        f"rank {rank} of {size} raised {report.text}\n\n{traceback.rstrip()}",
        report.exit_code,
        rank=rank,
        traceback=traceback,
    )


def rank_died_error(death: RankProcessDied, size: int, complaints: Sequence[str] = ()) -> RankFailedError:
    """Make the error for a process that ended by itself, or was lost, as the launcher's ``complaints`` explain."""
    rank, exit_code = death.rank, death.exit_code
    when = "after the function had returned" if death.returned else "before the function returned"
    hints = [SIGKILL_HINT] if exit_code in KILLED_EXIT_CODES and not death.cause else []
    when = "\n".join([f"{when}; {death.cause}" if death.cause else when, *complaints, *hints])
    if exit_code >= 0:
        return RankFailedError(f"rank {rank} of {size} exited with code {exit_code}, {when}", exit_code, rank=rank)
    return RankFailedError(
        f"rank {rank} of {size} was killed by {signal_name(-exit_code)}, {when}",
        128 - exit_code,
        rank=rank,
        signum=-exit_code,
    )


def unreadable_result_error(rank: int, size: int, reason: Exception) -> RankFailedError:
    """Make the error for a result that cannot be loaded here."""
    return RankFailedError(
        f"what the function returned in rank {rank} of {size} cannot be loaded here: {type(reason).__name__}: {reason}",
        0,
        rank=rank,
    )
