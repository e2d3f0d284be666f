"""What the caller of `reigen.run` is told of a rank that failed."""

from __future__ import annotations

from collections.abc import Sequence

from reigen.errors import RankFailedError
from reigen.launch.processes import signal_name
from reigen.runner.line import Report


def raised(report: Report, size: int, traceback: str) -> RankFailedError:
    """The function raised; ``traceback`` is what Python would have printed."""
    rank = report.rank
    return RankFailedError(
        f"rank {rank} of {size} raised {report.text}\n\n{traceback.rstrip()}",
        report.exit_code,
        rank=rank,
        traceback=traceback,
    )


def died(rank: int, size: int, exit_code: int, complaints: Sequence[str] = (), *, returned: bool) -> RankFailedError:
    """The process ended by itself; a negative ``exit_code`` is minus the signal that ended it.

    Where it was lost with its host, the launcher's ``complaints`` say so.
    """
    when = "after the function had returned" if returned else "before the function returned"
    when = "\n".join([when, *complaints])
    if exit_code >= 0:
        return RankFailedError(f"rank {rank} of {size} exited with code {exit_code}, {when}", exit_code, rank=rank)
    return RankFailedError(
        f"rank {rank} of {size} was killed by {signal_name(-exit_code)}, {when}",
        128 - exit_code,
        rank=rank,
        signum=-exit_code,
    )


def unreadable(rank: int, size: int, reason: Exception) -> RankFailedError:
    """The function returned, but its result is of no use here."""
    return RankFailedError(
        f"what the function returned in rank {rank} of {size} cannot be loaded here: {type(reason).__name__}: {reason}",
        0,
        rank=rank,
    )
