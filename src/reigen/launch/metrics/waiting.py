"""Sentence about the waiting of a job that has ended, from its metrics. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from reigen.launch.metrics.job_metrics import ProcessMetrics

#: Of shorter jobs, most is starting.
LEAST_SECONDS = 10.0
#: A smaller part of the time is not worth a word.
_WORTHWHILE = 0.15


def describe_waiting(processes: Sequence[ProcessMetrics]) -> str:
    """Return a sentence about the waiting of a job's ranks; empty: there is nothing to say.

    In lockstep a step takes as long for all ranks, so the others have waited for the one that waited least.

    Args:
        processes: the job's, with their last reports.
    """
    ranks = [process for process in processes if process.report.kind == "rank"]
    totals = [sum(process.latest.seconds) for process in ranks]
    if len(ranks) < 2 or min(totals) < LEAST_SECONDS:
        return ""
    shares = [
        (process.latest.seconds[2] / total, process.latest.seconds[1] / total, process)
        for process, total in zip(ranks, totals, strict=True)
    ]
    transfer = sum(each[1] for each in shares) / len(shares)
    by_wait = sorted(shares, key=lambda each: each[0])
    (least, _, first), second, most = by_wait[0], by_wait[1][0], by_wait[-1][0]
    gap = second - least
    if gap >= _WORTHWHILE and gap >= transfer:
        others = f"{second:.0%}" if f"{second:.0%}" == f"{most:.0%}" else f"{second:.0%} to {most:.0%}"
        return (
            f"{first.name} (host {first.report.host}) waited for {least:.0%} of the time, the others for {others}: "
            "they waited for it"
        )
    if transfer >= _WORTHWHILE and transfer >= least:
        return f"for {transfer:.0%} of the time the ranks could do nothing but wait while data was moved"
    if least >= _WORTHWHILE:
        return f"each rank waited for {least:.0%} of the time and more, for others in turn or for parameter servers"
    return ""
