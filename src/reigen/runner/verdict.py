"""What came of a job, decided from what its processes said, in the order in which they said it. No I/O.

A rank that fails says so before it leaves, so its report is older than every report of a rank that fails because of it.
Two more things decide between a culprit and its victims: a rank that raised because a peer had gone says that, too; and
after the first exit that makes the launcher stop the others, exits mean nothing any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reigen.runner.line import Complaint, Ended, Exited, Message, Report


@dataclass(frozen=True, slots=True)
class Returned:
    """The function returned in all ranks."""


@dataclass(frozen=True, slots=True)
class Raised:
    """It raised in this report's rank, first."""

    report: Report


@dataclass(frozen=True, slots=True)
class Died:
    """The process of a rank ended first, and said nothing of it.

    Attributes:
        rank: whose.
        exit_code: as in ``line.Exited``.
        returned: the function had returned.
    """

    rank: int
    exit_code: int
    returned: bool


@dataclass(frozen=True, slots=True)
class Stopped:
    """Somebody sent the launcher a signal."""

    signum: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The launcher did not do its part; ``reason`` in its own words, or empty."""

    reason: str


Verdict = Returned | Raised | Died | Stopped | Lost


def judge(messages: Sequence[Message], size: int) -> Verdict:
    """What came of a job of ``size`` ranks.

    Args:
        messages: everything that was said, in order.
        size: how many ranks there were.
    """
    ended = next((message for message in messages if isinstance(message, Ended)), None)
    if ended is not None and ended.signum is not None:
        return Stopped(ended.signum)
    failure = _first_failure(messages)
    if failure is not None:
        return failure
    num_returned = sum(isinstance(message, Report) and not message.failed for message in messages)
    if ended is not None and num_returned == size:
        return Returned()
    return Lost("\n".join(complaints(messages)))


def complaints(messages: Sequence[Message]) -> list[str]:
    """What the launcher found wrong on its own side, in its words."""
    return [message.text for message in messages if isinstance(message, Complaint)]


def _first_failure(messages: Sequence[Message]) -> Raised | Died | None:
    reports: dict[int, Report] = {}
    victims: list[Raised] = []
    for message in messages:
        if isinstance(message, Report):
            reports[message.rank] = message
            if message.failed and not message.is_victim:
                return Raised(message)
            if message.failed:
                victims.append(Raised(message))
        elif isinstance(message, Exited):
            report = reports.get(message.rank)
            if report is None or (message.exit_code != 0 and not report.failed):
                return Died(message.rank, message.exit_code, returned=report is not None)
            if message.exit_code != 0:
                break  # from here on the launcher stops the others
    return victims[0] if victims else None
