"""Advice from a timeline, in sentences. Pure."""

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
    percentile,
    step_rows,
    straggler_rows,
)
from reigen.observe.trace_reader import Trace

#: Smaller shares, of the steps, or of the whole time where no steps are marked, are not worth a sentence.
_WORTHWHILE = 0.02
_EXPOSED = 0.1
_HIDDEN = 0.5
#: Advice about a rank whose share of all waiting is so many times the mean.
_TOO_MUCH = 1.5
#: Timelines shorter than this allow no conclusion about stragglers.
_SHORT_MICROS = 500_000
_SMALL_BYTES = 64 << 10
_MANY_A_STEP = 32
_FEW_TOGETHER = 4


@dataclass(frozen=True)
class TraceSummary:
    """Content of `reigen trace`.

    ``occurrences`` are the collectives, put together from all ranks, of the marked steps, if any are; ``late`` the
    ranks that the others waited for; ``advice`` has the most important sentence first.
    """

    trace: Trace
    collectives: list[CollectiveRow]
    steps: list[StepRow]
    occurrences: list[MatchedCollective]
    late: list[StragglerRow]
    advice: list[str]


def summarize(trace: Trace) -> TraceSummary:
    """Compute the figures, and advice from them."""
    rows, marked, found = collective_rows(trace), step_rows(trace), filter_by_steps(trace, match_collectives(trace))
    late = straggler_rows(trace, found)
    advice = [
        *_advise_unfinished(trace),
        *_advise_stragglers(trace, marked, late),
        *_advise_exposed(marked),
        *_advise_small(trace, marked),
        *_advise_accuracy(trace),
    ]
    return TraceSummary(trace, rows, marked, found, late, advice or ["nothing stands out"])


def format_time(micros: float) -> str:
    """Format a time with three digits and a unit: ``12.3 us``, ``4.57 ms``, ``2.50 s``."""
    unit, scale = ("s", 1e6) if micros >= 1e6 else ("ms", 1e3) if micros >= 1e3 else ("us", 1.0)
    value = micros / scale
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def format_bytes(nbytes: float) -> str:
    """Format a number of bytes with a unit: ``40 B``, ``4.0 KiB``, ``25.0 MiB``."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"


def _advise_unfinished(trace: Trace) -> list[str]:
    """List collectives that the job hung in when it ended."""
    by_tensor: dict[str, dict[int, float]] = {}
    for one in trace.pending:
        by_tensor.setdefault(one.tensor, {})[one.rank] = one.since
    advice = []
    for tensor, waiting in sorted(by_tensor.items(), key=lambda item: min(item[1].values()))[:3]:
        missing = [rank for rank in range(trace.size) if rank not in waiting]
        text = (
            f"at the end rank(s) {format_ranks(waiting)} had been waiting in {tensor!r} for "
            f"{format_time(trace.end - min(waiting.values()))}"
        )
        advice.append(f"{text}; rank(s) {format_ranks(missing)} had not submitted it: look there" if missing else text)
    return advice


def _advise_stragglers(trace: Trace, marked: list[StepRow], late: list[StragglerRow]) -> list[str]:
    num_steps = max((row.count for row in marked), default=0)
    total = num_steps * percentile([row.step for row in marked], 0.5) if num_steps else trace.end
    if total < _SHORT_MICROS:
        return []
    advice = []
    fair = sum(row.cost for row in late) / max(2, len(late))
    for row in late:
        if row.cost < _WORTHWHILE * total or row.cost < _TOO_MUCH * fair:
            continue
        cost = f"{format_time(row.cost / num_steps)} a step" if num_steps else f"{format_time(row.cost)} in all"
        advice.append(
            f"rank {row.rank} was the last in {row.part_last:.0%} of the collectives; the others waited {cost} for it "
            f"alone ({row.cost / total:.0%} of the time): look at its data loading, its share of the data, and what "
            "else runs on its host"
        )
    return advice


def _advise_exposed(marked: list[StepRow]) -> list[str]:
    known = [(row.communication * (1 - row.hidden), row.hidden, row) for row in marked if row.hidden is not None]
    found = [one for one in known if one[1] < _HIDDEN and one[0] >= _EXPOSED * one[2].step]
    if not found:
        return []
    exposed, hidden, row = max(found, key=lambda one: one[0])
    text = (
        f"on rank {row.rank}, {format_time(exposed)} of a step of {format_time(row.step)} is communication that "
        f"nothing hides ({hidden:.0%} is hidden): more computing for each step (a larger batch, "
        "backward_passes_per_step), fewer bytes (Compression.fp16 or bf16) or other buckets (REIGEN_BUCKET_BYTES) help"
    )
    return [text]


def _advise_small(trace: Trace, marked: list[StepRow]) -> list[str]:
    reductions = [one for one in trace.executions if one.kind == "ALLREDUCE" and one.nbytes <= _SMALL_BYTES]
    a_step = len(reductions) / max(1, sum(row.count for row in marked)) if marked else 0.0
    together = percentile([one.batch for one in reductions], 0.5)
    if a_step < _MANY_A_STEP or together >= _FEW_TOGETHER:
        return []
    size = format_bytes(percentile([one.nbytes for one in reductions], 0.5))
    text = (
        f"many small tensors: {a_step:.0f} allreduces a step of at most 64 KiB (median {size}), {together:.0f} of them "
        "together: submit them all before waiting for the first (the _async functions), or as one "
        "(grouped_allreduce, DistributedOptimizer)"
    )
    return [text]


def _advise_accuracy(trace: Trace) -> list[str]:
    advice = []
    if not trace.steps and trace.executions:
        advice.append("no steps are marked (DistributedOptimizer does it): what computing hides is unknown")
    if trace.num_dropped:
        advice.append(f"{trace.num_dropped} events or pages came too fast and were dropped: figures are of the rest")
    if len(trace.names) < trace.size:
        absent = [rank for rank in range(trace.size) if rank not in trace.names]
        advice.append(f"nothing was heard of rank(s) {format_ranks(absent)}")
    if trace.is_cut:
        advice.append("the file breaks off in the middle of a record: figures are of what is before")
    return advice
