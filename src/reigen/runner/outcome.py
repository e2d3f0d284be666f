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
class RankProcessDied:
    """Process of a rank ended first, without a report; exit code and cause as in ``ProcessExited``.

    ``returned``: the function had returned.
    """

    rank: int
    exit_code: int
    returned: bool
    cause: str = ""


#: What became of a job: its failure; slots with results, of an elastic one; None: results of all ranks.
Outcome = RankReport | RankProcessDied | LauncherFinished | LauncherComplaint | tuple[int, ...] | None


def decide_outcome(
    messages: Sequence[ResultMessage], size: int
) -> RankReport | RankProcessDied | LauncherFinished | LauncherComplaint | None:
    """Decide the outcome of a job of ``size`` ranks from all messages, in order.

    Returns:
        None: the function has returned in all ranks. Else the report of the rank in which it raised first; the process
        that died first; the end of a launcher that a signal stopped; or a complaint: about a server that failed first,
        or those, perhaps none, of a launcher that did not do its part.
    """
    ended = next((message for message in messages if isinstance(message, LauncherFinished)), None)
    if ended is not None and ended.signum is not None:
        return ended
    if ended is not None and ended.server_failure:
        return LauncherComplaint(ended.server_failure)
    failure = _first_failure(messages)
    if failure is not None:
        return failure
    num_returned = sum(isinstance(message, RankReport) and not message.failed for message in messages)
    if ended is not None and num_returned == size:
        return None
    return LauncherComplaint("\n".join(list_complaints(messages)))


def decide_elastic_outcome(
    messages: Sequence[ResultMessage], ended: LauncherFinished
) -> tuple[int, ...] | RankReport | RankProcessDied | LauncherFinished | LauncherComplaint:
    """Decide the outcome of an elastic job from all messages, in order, and the launcher's last one.

    Returns:
        The slots whose results count, by rank: members of the last view in which the function has returned. Or what
        ended the job, as `decide_outcome` has it; the numbers are slots.
    """
    if ended.signum is not None:
        return ended
    reports = {message.rank: message for message in messages if isinstance(message, RankReport)}
    if ended.exit_code == 0:
        returned = [slot for slot in ended.slots or () if slot in reports and not reports[slot].failed]
        return tuple(returned) or LauncherComplaint("the job has ended, and its function has returned in no process")
    if ended.failed_slot is None:
        return LauncherComplaint("\n".join(list_complaints(messages)))
    report = reports.get(ended.failed_slot)
    if report is not None and report.failed:
        return report
    exits = [each for each in messages if isinstance(each, ProcessExited) and each.rank == ended.failed_slot]
    exit_code = exits[-1].exit_code if exits else ended.exit_code
    return RankProcessDied(ended.failed_slot, exit_code, report is not None, ended.cause)


def list_complaints(messages: Sequence[ResultMessage]) -> list[str]:
    """List the launcher's complaints about its own side."""
    return [message.text for message in messages if isinstance(message, LauncherComplaint)]


def _first_failure(messages: Sequence[ResultMessage]) -> RankReport | RankProcessDied | None:
    reports: dict[int, RankReport] = {}
    victims: list[RankReport] = []
    for message in messages:
        if isinstance(message, RankReport):
            reports[message.rank] = message
            if message.failed and not message.is_victim:
                return message
            if message.failed:
                victims.append(message)
        elif isinstance(message, ProcessExited):
            report = reports.get(message.rank)
            if report is None or (message.exit_code != 0 and not report.failed):
                return RankProcessDied(message.rank, message.exit_code, report is not None, message.cause)
            if message.exit_code != 0:
                break  # from here on the launcher stops the others
    return victims[0] if victims else None


def rank_died_error(
    death: RankProcessDied, size: int, complaints: Sequence[str] = (), host: str = ""
) -> RankFailedError:
    """Make the error for a process that ended by itself, or was lost, as the launcher's ``complaints`` explain."""
    rank, exit_code = death.rank, death.exit_code
    name = f"rank {rank} of {size}" + (f" (host {host})" if host else "")
    when = "after the function had returned" if death.returned else "before the function returned"
    hints = [SIGKILL_HINT] if exit_code in KILLED_EXIT_CODES and not death.cause else []
    when = "\n".join([f"{when}; {death.cause}" if death.cause else when, *complaints, *hints])
    if exit_code >= 0:
        return RankFailedError(f"{name} exited with code {exit_code}, {when}", exit_code, rank=rank, host=host)
    return RankFailedError(
        f"{name} was killed by {signal_name(-exit_code)}, {when}",
        128 - exit_code,
        rank=rank,
        signum=-exit_code,
        host=host,
    )
