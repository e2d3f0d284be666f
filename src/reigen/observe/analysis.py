"""Analysis of a timeline: times of collectives, how far computing hides them, and stragglers.

Times are microseconds. Pure: a `Trace` in, figures out.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from reigen.engine.messages import UNNAMED
from reigen.observe.trace_reader import CollectiveExecution, Interval, Trace

#: More names than this are shown with their numbers replaced by ``*``.
MAX_NAMES = 24


@dataclass(frozen=True)
class CollectiveRow:
    """Executions of one kind and name.

    Attributes:
        kind: ALLREDUCE and the like.
        name: of the tensor; numbers may be ``*``.
        count: how often on each rank, about.
        nbytes: of one, the median.
        total: time of execution on one rank, on average. Tensors of one batch share it by bytes.
        median, p95: of one execution, with its whole batch.
        negotiation, negotiation_p95: time from submission to begin, median and 95th percentile.
        bytes_per_second: of execution; 0 where there are none.
    """

    kind: str
    name: str
    count: int
    nbytes: int
    total: float
    median: float
    p95: float
    negotiation: float
    negotiation_p95: float
    bytes_per_second: float


@dataclass(frozen=True)
class StepRow:
    """Steps of one rank; medians over its ``count`` steps.

    Attributes:
        step: time of a step.
        waiting: of it, the caller could only wait for collectives.
        communication: of it, collectives were carried out.
        hidden: part of the communication in which the caller did not wait; of all steps together.
    """

    rank: int
    count: int
    step: float
    waiting: float
    communication: float
    hidden: float | None


@dataclass(frozen=True)
class MatchedCollective:
    """Collective with the times of all its ranks.

    Attributes:
        kind: ALLREDUCE and the like.
        tensor: its name.
        executions: by rank.
        last: the rank that came last, or None if that is less than the clocks' errors.
        alone: since when it was the only one that was missing.
    """

    kind: str
    tensor: str
    executions: dict[int, CollectiveExecution]
    last: int | None
    alone: Interval

    @property
    def submitted(self) -> dict[int, float]:
        """Return the time of each rank's submission."""
        return {rank: one.submitted for rank, one in self.executions.items() if one.submitted is not None}

    @property
    def lateness(self) -> float:
        """Time in which only the last rank was missing."""
        return self.alone[1] - self.alone[0]


@dataclass(frozen=True)
class StragglerRow:
    """Lateness of one rank.

    Attributes:
        times_last: number of collectives in which it was the last.
        part_last: their part of those that it took part in with others.
        median, p95: time in which only this rank was missing, when it was last.
        total: time in which all others had come to some collective and only this rank was missing.
        cost: of it, time in which another rank's caller could only wait; the mean of the other ranks.
    """

    rank: int
    times_last: int
    part_last: float
    median: float
    p95: float
    total: float
    cost: float


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals: the same times, in order, with gaps between them."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if begin >= end:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def intersect_intervals(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Intersect two lists of merged intervals: the times in both."""
    found: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            found.append((begin, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return found


def total_length(intervals: Iterable[Interval]) -> float:
    """Return their length together."""
    return sum(end - begin for begin, end in intervals)


def percentile(values: Iterable[float], part: float) -> float:
    """Return the value below which ``part`` of the values lie, interpolated; 0 if there are none."""
    found = [*values]
    return float(np.quantile(found, part)) if found else 0.0


def collective_rows(trace: Trace) -> list[CollectiveRow]:
    """Return rows of collectives, the longest first."""
    names = _short_names(trace.executions)
    weights: Counter[tuple[int, float]] = Counter()  # bytes of a batch
    groups: defaultdict[tuple[str, str], list[CollectiveExecution]] = defaultdict(list)
    for one in trace.executions:
        weights[one.rank, one.begun] += one.nbytes
        groups[one.kind, names[one.tensor]].append(one)
    rows = []
    for (kind, name), found in groups.items():
        num_ranks = len({one.rank for one in found})
        busy = 0.0
        for one in found:
            weight = weights[one.rank, one.begun]
            busy += (one.ended - one.begun) * (one.nbytes / weight if weight else 1 / one.batch)
        durations = [one.ended - one.begun for one in found]
        waits = [one.begun - one.submitted for one in found if one.submitted is not None]
        rows.append(
            CollectiveRow(
                kind,
                name,
                round(len(found) / num_ranks),
                int(percentile([one.nbytes for one in found], 0.5)),
                busy / num_ranks,
                percentile(durations, 0.5),
                percentile(durations, 0.95),
                percentile(waits, 0.5),
                percentile(waits, 0.95),
                sum(one.nbytes for one in found) / busy * 1e6 if busy else 0.0,
            )
        )
    return sorted(rows, key=lambda row: -row.total)


def step_rows(trace: Trace) -> list[StepRow]:
    """Return rows of steps, by rank; empty if no steps are marked."""
    rows = []
    for rank, marked in sorted(trace.steps.items()):
        busy = merge_intervals((one.begun, one.ended) for one in trace.executions if one.rank == rank)
        waits = merge_intervals(trace.waits.get(rank, ()))
        exposed = intersect_intervals(busy, waits)
        communication, waiting, seen = (measure_coverage(kind, sorted(marked)) for kind in (busy, waits, exposed))
        rows.append(
            StepRow(
                rank,
                len(marked),
                percentile([end - begin for begin, end in marked], 0.5),
                percentile(waiting, 0.5),
                percentile(communication, 0.5),
                1 - sum(seen) / sum(communication) if sum(communication) else None,
            )
        )
    return rows


def measure_coverage(intervals: Sequence[Interval], spans: Sequence[Interval]) -> list[float]:
    """Return for each of the spans, which follow each other, how much of it the intervals (merged) cover."""
    found, first = [], 0
    for begin, end in spans:
        while first < len(intervals) and intervals[first][1] <= begin:
            first += 1
        covered, index = 0.0, first
        while index < len(intervals) and intervals[index][0] < end:
            covered += min(end, intervals[index][1]) - max(begin, intervals[index][0])
            index += 1
        found.append(covered)
    return found


def match_collectives(trace: Trace) -> list[MatchedCollective]:
    """Match executions of different ranks, in order of time; those that two ranks or more recorded.

    All ranks have submitted a collective before the first of them begins it, and each submits the next of the same name
    after that. So, in the order in which they begin, executions of a name belong together until one was submitted after
    the others' begin.
    """
    by_name: defaultdict[tuple[str, str, int], list[CollectiveExecution]] = defaultdict(list)
    for one in trace.executions:
        if one.submitted is not None:
            by_name[one.kind, one.tensor, one.process_set].append(one)
    found: list[MatchedCollective] = []
    for (kind, tensor, _), executions in by_name.items():
        group: dict[int, CollectiveExecution] = {}
        first_begun = 0.0
        for one in sorted(executions, key=lambda e: e.begun):
            assert one.submitted is not None
            slack = trace.clock_errors.get(one.rank, 0.0)
            if group and (one.rank in group or one.submitted - slack > first_begun):
                _add(found, kind, tensor, group, trace)
                group = {}
            if not group:
                first_begun = one.begun + slack
            group[one.rank] = one
        _add(found, kind, tensor, group, trace)
    return sorted(found, key=lambda occurrence: occurrence.alone[1])


def filter_by_steps(trace: Trace, found: Sequence[MatchedCollective]) -> list[MatchedCollective]:
    """Filter those between the begin of the first step and the end of the last; all, if no steps are marked.

    Reading data and compiling before that takes each rank another time and does not come again.
    """
    marked = [step for several in trace.steps.values() for step in several]
    if not marked:
        return list(found)
    begin, end = min(b for b, _ in marked), max(e for _, e in marked)
    return [occurrence for occurrence in found if begin <= occurrence.alone[1] <= end]


def straggler_rows(trace: Trace, found: Sequence[MatchedCollective]) -> list[StragglerRow]:
    """Return rows of stragglers; the rank that cost most first."""
    rows = []
    waits = {rank: merge_intervals(intervals) for rank, intervals in trace.waits.items()}
    for rank in sorted(trace.names):
        own = [occurrence for occurrence in found if rank in occurrence.executions]
        late = [occurrence for occurrence in own if occurrence.last == rank]
        times = [occurrence.lateness for occurrence in late]
        alone = merge_intervals(occurrence.alone for occurrence in late)
        costs = [
            total_length(intersect_intervals(alone, waits.get(other, ()))) for other in trace.names if other != rank
        ]
        rows.append(
            StragglerRow(
                rank,
                len(late),
                len(late) / len(own) if own else 0.0,
                percentile(times, 0.5),
                percentile(times, 0.95),
                total_length(alone),
                sum(costs) / max(1, len(costs)),
            )
        )
    return sorted(rows, key=lambda row: (-row.cost, -row.total))


def select_worst(found: Sequence[MatchedCollective], most: int) -> list[MatchedCollective]:
    """Select the collectives for whose last rank alone the others waited longest.

    Of those that were waiting for the same rank at the same time, the longest.
    """
    chosen: list[MatchedCollective] = []
    for one in sorted((o for o in found if o.last is not None), key=lambda o: -o.lateness):
        if not any(one.last == o.last and intersect_intervals([one.alone], [o.alone]) for o in chosen):
            chosen.append(one)
        if len(chosen) == most:
            break
    return chosen


def _add(
    found: list[MatchedCollective], kind: str, tensor: str, group: dict[int, CollectiveExecution], trace: Trace
) -> None:
    if len(group) < 2:
        return
    submitted = {rank: one.submitted for rank, one in group.items() if one.submitted is not None}
    before, last = sorted(submitted, key=submitted.__getitem__)[-2:]
    clock_error = trace.clock_errors.get(before, 0.0) + trace.clock_errors.get(last, 0.0)
    alone = (submitted[before], submitted[last])
    is_clear = alone[1] - alone[0] > clock_error
    found.append(MatchedCollective(kind, tensor, group, last if is_clear else None, alone))


def _short_names(executions: Iterable[CollectiveExecution]) -> dict[str, str]:
    """Return for each tensor the name under which it is counted."""
    tensors = {one.tensor for one in executions}
    short = {name: f"{name.partition(UNNAMED)[0]}{UNNAMED}*" if UNNAMED in name else name for name in tensors}
    if len(set(short.values())) > MAX_NAMES:
        short = {name: re.sub(r"\d+", "*", name) for name in tensors}
    return short
