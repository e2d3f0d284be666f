"""Errors of `reigen.run` about a rank that failed."""

from __future__ import annotations

from collections.abc import Sequence

from reigen.errors import RankFailedError
from reigen.launch.exit_report import SIGKILL_HINT
from reigen.launch.job_state import KILLED_EXIT_CODES
from reigen.launch.process_tree import signal_name
from reigen.runner.outcome import RankProcessDied
from reigen.runner.result_channel import RankReport


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
