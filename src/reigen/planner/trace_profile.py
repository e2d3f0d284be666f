"""Training profile of a job that ran, from its timeline. Pure.

A rank's computing is what its step takes less what it waits for: a clock that stands still while it can do nothing but
wait for a collective. By that clock a gradient is there when backward has made it (jobs of `reigen.torch`; other jobs:
when its allreduce is submitted). Where forward ended is not recorded, and makes no difference: everything until the
first gradient counts as forward, everything behind the last one as the update.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from statistics import median

from reigen.errors import ArgumentError
from reigen.observe.analysis import intersect_intervals, merge_intervals, total_length
from reigen.observe.trace_reader import GradientMoment, Interval, Trace
from reigen.planner.profile import GradientProfile, TrainingProfile
from reigen.types import DTYPES

#: Steps that a profile needs at least; the first one in the file does not count where there are more.
LEAST_STEPS = 3


@dataclass(frozen=True, slots=True)
class _StepSample:
    """Computing of one step, seconds: until each gradient was there, and in all. ``processors``: busy meanwhile."""

    ready: dict[str, float]
    length: float
    processors: float | None


def profile_from_trace(trace: Trace, batch: int = 1, name: str = "") -> TrainingProfile:
    """Return the profile of the rank whose computing takes the median time.

    Args:
        trace: with steps.
        batch: samples of one rank in a step; a timeline does not know them.
        name: of the profile.

    Raises:
        ArgumentError: no rank has enough steps with gradients in them; the message says what is missing.
    """
    if batch < 1:
        raise ArgumentError(f"a batch of {batch} samples: it must be at least 1")
    if not trace.steps:
        raise ArgumentError(
            "this timeline has no steps, so that there is no profile of one: optimizers and trainers of Reigen mark "
            "them, reigen.report_progress(steps=1) does elsewhere; start the timeline before the steps, and let it see "
            f"{LEAST_STEPS + 1} of them"
        )
    moments = {rank: _gradients(trace, rank) for rank in trace.steps}
    samples = {rank: _samples(trace, rank, moments[rank]) for rank in trace.steps}
    ranks = [rank for rank in samples if len(samples[rank]) >= LEAST_STEPS]
    if not ranks:
        most = max(len(found) for found in samples.values())
        raise ArgumentError(
            f"this timeline has {max(map(len, trace.steps.values()))} steps of a rank, {most} of them with all "
            f"gradients; a profile needs {LEAST_STEPS}, of a job of two ranks or more that reduces its gradients by "
            "allreduce (a DistributedOptimizer does)"
        )
    ranks.sort(key=lambda rank: median(sample.length for sample in samples[rank]))
    rank = ranks[(len(ranks) - 1) // 2]
    return _make_profile(samples[rank], moments[rank], batch, name or "profile", _source(trace, rank))


def _source(trace: Trace, rank: int) -> str:
    what = "gradients" if trace.gradients.get(rank) else "allreduces, which may be several gradients each"
    return f"timeline of {trace.size} ranks, rank {rank}: {what}"


def _gradients(trace: Trace, rank: int) -> list[GradientMoment]:
    """Return a rank's gradients; where none were recorded, its allreduces, numbered as they came."""
    found = trace.gradients.get(rank)
    if found:
        return found
    first_step = trace.steps[rank][0][0]
    numbers: dict[str, int] = {}
    moments: list[GradientMoment] = []
    of_rank = [one for one in trace.executions if one.rank == rank and one.kind == "ALLREDUCE" and not one.process_set]
    for one in sorted(of_rank, key=lambda one: one.begun if one.submitted is None else one.submitted):
        if one.submitted is not None and one.submitted >= first_step:
            number = numbers.setdefault(one.tensor, len(numbers))
            moments.append(GradientMoment(one.submitted, -number, one.tensor, one.nbytes, one.dtype or "float32"))
    return moments


def _samples(trace: Trace, rank: int, moments: Sequence[GradientMoment]) -> list[_StepSample]:
    """Return the steps that have as many gradients as the step with most of them, but the first."""
    waits = merge_intervals(trace.waits.get(rank, ()))
    times = trace.processor_times.get(rank, ())
    moments = sorted(moments, key=lambda one: one.at)
    found: list[_StepSample] = []
    for index, (begin, end) in enumerate(trace.steps[rank]):
        first, last = (bisect.bisect(waits, when, key=itemgetter(1)) for when in (begin, end))
        inside = waits[first : last + 1]
        first, last = (bisect.bisect_left(moments, when, key=attrgetter("at")) for when in (begin, end))
        ready = {one.name: _computing(inside, begin, one.at) for one in moments[first:last]}
        length = _computing(inside, begin, end)
        busy = times[index].thread / 1e6 / length if length and len(times) == len(trace.steps[rank]) else None
        found.append(_StepSample(ready, length, busy))
    most = max((len(sample.ready) for sample in found), default=0)
    whole = [sample for sample in found if most and len(sample.ready) == most]
    return whole[1:] if len(whole) > LEAST_STEPS else whole


def _computing(waits: Sequence[Interval], begin: float, end: float) -> float:
    """Return seconds from ``begin`` to ``end`` (microseconds) in which nothing was waited for."""
    return (end - begin - total_length(intersect_intervals([(begin, end)], waits))) / 1e6


def _make_profile(
    samples: Sequence[_StepSample], moments: Iterable[GradientMoment], batch: int, name: str, source: str
) -> TrainingProfile:
    known = {one.name: one for one in moments}
    ready = {tensor: median(sample.ready[tensor] for sample in samples if tensor in sample.ready) for tensor in known}
    forward, last = min(ready.values()), max(ready.values())
    length = median(sample.length for sample in samples)
    busy = [sample.processors for sample in samples if sample.processors is not None]
    tensors = []
    for one in sorted(known.values(), key=lambda one: one.number):
        dtype = one.dtype if one.dtype in DTYPES else "float32"
        elements = one.nbytes // DTYPES[dtype].itemsize
        tensors.append(GradientProfile(one.name, elements, dtype, round(ready[one.name] - forward, 7)))
    return TrainingProfile(
        name=name,
        batch=batch,
        tensors=tuple(tensors),
        forward_seconds=round(forward, 7),
        backward_seconds=round(last - forward, 7),
        update_seconds=round(max(0.0, length - last), 7),
        processors=round(min(1.0, median(busy)), 3) if busy else 1.0,
        steps=len(samples),
        source=source,
    )
