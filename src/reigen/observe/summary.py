"""Summary of a timeline: its figures, and sentences about them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from reigen.errors import format_ranks
from reigen.observe.analysis import (
    CollectiveRow,
    MatchedCollective,
    StepRow,
    StragglerRow,
    collective_rows,
    filter_by_steps,
    match_collectives,
    step_rows,
    straggler_rows,
)
from reigen.observe.step_shares import measure_steps
from reigen.observe.trace_reader import Trace
from reigen.observe.units import format_time
from reigen.observe.verdict import JobVerdict, judge


@dataclass(frozen=True)
class TraceSummary:
    """Content of `reigen trace`.

    ``occurrences`` are the collectives, put together from all ranks, of the marked steps, if any are; ``late`` the
    ranks that the others waited for; ``unfinished`` says what the job hung in; ``verdict`` what bounded it; ``doubts``
    what is missing.
    """

    trace: Trace
    collectives: list[CollectiveRow]
    steps: list[StepRow]
    occurrences: list[MatchedCollective]
    late: list[StragglerRow]
    unfinished: list[str]
    verdict: JobVerdict
    doubts: list[str]

    @property
    def sentences(self) -> list[str]:
        """Return it in sentences, the most important first."""
        return [*self.unfinished, *self.verdict.lines(), *self.doubts]


def summarize(trace: Trace) -> TraceSummary:
    """Compute the figures, and the verdict from them."""
    found = filter_by_steps(trace, match_collectives(trace))
    return TraceSummary(
        trace,
        collective_rows(trace),
        step_rows(trace),
        found,
        straggler_rows(trace, found),
        _describe_unfinished(trace),
        judge(trace, found, measure_steps(trace, found)),
        _describe_doubts(trace),
    )


def _describe_unfinished(trace: Trace) -> list[str]:
    """List collectives that the job hung in when it ended."""
    by_tensor: dict[str, dict[int, float]] = {}
    for one in trace.pending:
        by_tensor.setdefault(one.tensor, {})[one.rank] = one.since
    found = []
    for tensor, waiting in sorted(by_tensor.items(), key=lambda item: min(item[1].values()))[:3]:
        missing = [rank for rank in range(trace.size) if rank not in waiting]
        text = (
            f"at the end rank(s) {format_ranks(waiting)} had been waiting in {tensor!r} for "
            f"{format_time(trace.end - min(waiting.values()))}"
        )
        found.append(f"{text}; rank(s) {format_ranks(missing)} had not submitted it: look there" if missing else text)
    return found


def _describe_doubts(trace: Trace) -> list[str]:
    found = []
    if not trace.steps and trace.executions:
        found.append("no steps are marked (DistributedOptimizer does it): what computing hides is unknown")
    if trace.num_dropped:
        found.append(f"{trace.num_dropped} events or pages came too fast and were dropped: figures are of the rest")
    if len(trace.names) < trace.size:
        absent = [rank for rank in range(trace.size) if rank not in trace.names]
        found.append(f"nothing was heard of rank(s) {format_ranks(absent)}")
    if trace.is_cut:
        found.append("the file breaks off in the middle of a record: figures are of what is before")
    return found
