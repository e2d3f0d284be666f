"""Autotuner: a state machine that gets the ends of steps, and says which parameters the job takes on next. Pure.

The search
----------
a. *Blocks.* A point is measured in a block: its parameters are taken on, the steps until all ranks have them and
   `SETTLE_STEPS` more are thrown away, then `NUM_SAMPLES` samples are taken, each of a few steps. A block's time is the
   median of its samples' times of a step.
b. *Drift.* A job does not always run equally fast: others use its hosts, clocks change. So the base (the parameters
   with which the job began) is measured anew after every `POINTS_PER_BASE` points, and a point counts by its time
   relative to the base's before and behind it: A-B-A.
c. *Search.* After some points that lie far apart a model of all that was observed proposes the next one. The search
   ends when it expects nothing from any, at the most points, or after the most seconds.
d. *Check.* What seems best is measured alternately with the base, B-A-B-A, `NUM_PAIRS` times each. It stays if it was
   faster, and if with 90 % confidence (bootstrap over pairs and samples) it is not slower by more than 2 %. Else the
   base does: a job does not end slower than it began.
e. *Warm start.* What another job has found is checked (d) first; if it stays there is no search.
f. Where the ranks hardly wait for collectives, nothing is searched for: there is nothing to gain.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from reigen.autotune.search_space import ParameterPoint, SearchSpace
from reigen.autotune.surrogate import PointObservation, Surrogate

#: Samples of a block; steps that are thrown away behind a change; the most steps to wait until all ranks have it.
NUM_SAMPLES, SETTLE_STEPS, MAX_STEPS_TO_CHANGE = 5, 2, 60
#: Points between two blocks of the base; pairs of the check.
POINTS_PER_BASE, NUM_PAIRS = 3, 4
#: A sample ends after so many seconds, however few steps that are.
SAMPLE_SECONDS = 0.25
#: The search ends after so many seconds, with at least so many points.
SEARCH_SECONDS, LEAST_POINTS = 40.0, 4
#: Expected improvement of the logarithm of a step's time that is not worth a try, once so many points were tried: from
#: fewer a model may be sure of what is wrong.
LEAST_IMPROVEMENT, SURE_POINTS = 0.003, 12
#: Part of a step for which rank 0 waits for collectives, below which nothing is tuned.
LEAST_WAIT = 0.05
#: A point may be slower by this part, with 90 % confidence, and still be taken.
_MAX_LOSS, _CONFIDENCE, _NUM_RESAMPLES = 0.02, 0.9, 1000
_NUM_STARTS = 4
#: Parameters with so many values are tried with each.
_FEW_VALUES = 4


@dataclass(frozen=True, slots=True)
class TunerOptions:
    """Options of a search.

    Attributes:
        warmup_samples: samples that are thrown away at the beginning.
        steps_per_sample: steps of a sample, at most.
        max_points: points that are tried, at most.
        search_seconds: how long, at most, before the check.
    """

    warmup_samples: int = 3
    steps_per_sample: int = 10
    max_points: int = 20
    search_seconds: float = SEARCH_SECONDS


@dataclass(frozen=True, slots=True)
class StepEnd:
    """End of a step on rank 0.

    Attributes:
        now: on a clock of seconds.
        waited_seconds: for which the program has waited for collectives, ever.
        reduced_bytes: bytes that were reduced, ever.
        is_applied: the parameters that were chosen last have been taken on by all ranks.
        obstacle: why nothing may be tuned in this job; empty: something may.
    """

    now: float
    waited_seconds: float = 0.0
    reduced_bytes: float = 0.0
    is_applied: bool = True
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class TunedBlock:
    """Block of samples at a point.

    Attributes:
        point: the parameters.
        phase: ``warmup``, ``base``, ``search`` or ``check``.
        samples: seconds of a step in each sample.
        wait_share: part of the time for which rank 0 waited for collectives.
        step_bytes: bytes that were reduced in a step.
        began: when.
        ended: when.
    """

    point: ParameterPoint
    phase: str
    samples: tuple[float, ...]
    wait_share: float
    step_bytes: float
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.samples)

    @property
    def noise(self) -> float:
        """Standard deviation of the logarithm of `seconds`, by the samples' absolute deviations from the median."""
        middle = self.seconds
        spread = statistics.median(abs(sample - middle) for sample in self.samples)
        return 1.4826 * spread / middle * math.sqrt(math.pi / 2 / len(self.samples))


@dataclass(frozen=True, slots=True)
class TuningOutcome:
    """End of a search.

    Attributes:
        base, chosen: the parameters before and now; the same ones where nothing was better.
        speedup: how many times faster a step is, as the check has measured it; 1.0: nothing was checked.
        low, high: it is between them with 90 % confidence.
        base_seconds: of a step with the base's parameters.
        num_points: points that were tried, besides the base.
        seconds: since the first step.
        reason: why it has come to this.
    """

    base: ParameterPoint
    chosen: ParameterPoint
    speedup: float
    low: float
    high: float
    base_seconds: float
    num_points: int
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class TunerDecision:
    """Consequence of the end of a step.

    Attributes:
        point: parameters to take on from now on; None: as before.
        block: that has ended with this step.
        outcome: tuning is over.
    """

    point: ParameterPoint | None = None
    block: TunedBlock | None = None
    outcome: TuningOutcome | None = None


NO_DECISION = TunerDecision()


@dataclass(frozen=True, slots=True)
class _BlockRequest:
    """Request of the search for a block."""

    point: ParameterPoint
    phase: str
    num_samples: int = NUM_SAMPLES


_Search = Generator[_BlockRequest, TunedBlock, TuningOutcome]


@dataclass
class _OpenBlock:
    """Block that is being measured."""

    request: _BlockRequest
    #: steps since the change was asked for, and since it was applied; None: it is not yet
    num_steps: int = 0
    num_settled: int | None = None
    #: where samples began, and the one that is open; 0 steps: none is
    first: StepEnd | None = None
    sample_began: float = 0.0
    sample_steps: int = 0
    total_steps: int = 0
    samples: list[float] = field(default_factory=list)


class Autotuner:
    """Chooses parameters.

    Args:
        space: the points that may be tried.
        surrogate: proposes points.
        options: how much is measured.
        warm_start: what another job has found.
    """

    def __init__(
        self,
        space: SearchSpace,
        surrogate: Surrogate,
        options: TunerOptions,
        warm_start: ParameterPoint | None = None,
    ) -> None:
        self.space = space
        self._surrogate, self._options = surrogate, options
        self._warm_start = warm_start
        self._point = space.base
        self._search = self._run()
        self._open = _OpenBlock(next(self._search), num_settled=0)
        self._began: float | None = None
        self._now = 0.0
        #: blocks of base and points, in the order in which they were measured
        self.blocks: list[TunedBlock] = []
        self.outcome: TuningOutcome | None = None

    @property
    def num_points(self) -> int:
        """Points that were tried, besides the base."""
        return len({block.point for block in self.blocks} - {self.space.base})

    def step_ended(self, step: StepEnd) -> TunerDecision:
        """Take in the end of a step; returns what follows."""
        if self.outcome is not None:
            return NO_DECISION
        self._now = step.now
        if self._began is None:
            self._began = step.now
        if step.obstacle:
            return self._finish(self._keep(step.obstacle))
        block = self._measure(step)
        if block is None:
            return NO_DECISION
        if block.phase != "warmup":
            self.blocks.append(block)
        try:
            request = self._search.send(block)
        except StopIteration as stop:
            return self._finish(stop.value, block)
        changes, self._point = request.point != self._point, request.point
        self._open = _OpenBlock(request, num_settled=None if changes else SETTLE_STEPS)
        return TunerDecision(request.point if changes else None, block)

    def observations(self) -> list[PointObservation]:
        """Return the points that were tried, relative to the base before and behind them; the base among them."""
        base, coordinates = self.space.base, self.space.coordinates
        found = [PointObservation(base, coordinates(base), 0.0, 0.0)]
        for place, block in enumerate(self.blocks):
            if block.phase != "search":
                continue
            around = [
                next((one for one in blocks if one.point == base), None)
                for blocks in (reversed(self.blocks[:place]), iter(self.blocks[place:]))
            ]
            bases = [one for one in around if one is not None]
            value = statistics.fmean(math.log(one.seconds) for one in bases) - math.log(block.seconds)
            noise = math.hypot(block.noise, *(one.noise / len(bases) for one in bases))
            found.append(PointObservation(block.point, coordinates(block.point), value, noise))
        return found

    def best_point(self) -> ParameterPoint:
        """Return what seems best by now."""
        found = self.observations()
        return found[self._surrogate.best(found)].point if len(found) > 1 else self.space.base

    # -- steps to blocks ----------------------------------------------------------------------------------------------

    def _measure(self, step: StepEnd) -> TunedBlock | None:
        """Count a step; return the block if it ends it."""
        block = self._open
        if block.num_settled is None:
            block.num_steps += 1
            if step.is_applied or block.num_steps >= MAX_STEPS_TO_CHANGE:
                block.num_settled = 0
            return None
        if block.num_settled < SETTLE_STEPS:
            block.num_settled += 1
            if block.num_settled < SETTLE_STEPS:
                return None
        if block.first is None:
            block.first, block.sample_began = step, step.now
            return None
        block.sample_steps += 1
        seconds = step.now - block.sample_began
        if block.sample_steps < self._options.steps_per_sample and seconds < SAMPLE_SECONDS:
            return None
        block.samples.append(max(seconds, 1e-9) / block.sample_steps)
        block.total_steps += block.sample_steps
        block.sample_began, block.sample_steps = step.now, 0
        if len(block.samples) < block.request.num_samples:
            return None
        total = max(step.now - block.first.now, 1e-9)
        return TunedBlock(
            block.request.point,
            block.request.phase,
            tuple(block.samples),
            (step.waited_seconds - block.first.waited_seconds) / total,
            (step.reduced_bytes - block.first.reduced_bytes) / block.total_steps,
            block.first.now,
            step.now,
        )

    # -- blocks to decisions ------------------------------------------------------------------------------------------

    def _run(self) -> _Search:
        options = self._options
        if options.warmup_samples:
            yield _BlockRequest(self.space.base, "warmup", options.warmup_samples)
        first = yield _BlockRequest(self.space.base, "base")
        if first.wait_share < LEAST_WAIT:
            return self._keep(
                f"rank 0 waits for collectives in {first.wait_share:.1%} of the time: there is nothing to gain"
            )
        self.space = self.space.limited(first.step_bytes)
        if not self.space.dimensions:
            return self._keep("no parameter is left that could make a difference")
        warm = self._warm_start
        if warm is not None and warm != self.space.base and self.space.contains(warm):
            outcome = yield from self._check(warm, "the log's best point")
            if outcome.chosen != self.space.base:
                return outcome
        yield from self._explore(first.ended)
        best = self.best_point()
        if best == self.space.base:
            return self._keep("nothing that was tried seems faster")
        return (yield from self._check(best, "the best point"))

    def _explore(self, began: float) -> Generator[_BlockRequest, TunedBlock, None]:
        """Measure points, and the base between them."""
        starts: Iterator[ParameterPoint] = iter(spread_points(self.space))
        tried, is_base = {self.space.base}, True
        while len(tried) <= self._options.max_points:
            seconds = self._now - began
            if seconds > self._options.search_seconds and len(tried) > LEAST_POINTS:
                break
            point = next((one for one in starts if one not in tried), None) or self._propose(tried)
            if point is None:
                break
            tried.add(point)
            yield _BlockRequest(point, "search")
            is_base = (len(tried) - 1) % POINTS_PER_BASE == 0
            if is_base:
                yield _BlockRequest(self.space.base, "base")
        if not is_base:
            yield _BlockRequest(self.space.base, "base")

    def _propose(self, tried: set[ParameterPoint]) -> ParameterPoint | None:
        candidates = [point for point in self.space.points() if point not in tried]
        proposed = self._surrogate.propose(self.observations(), [*map(self.space.coordinates, candidates)])
        if proposed is None or (proposed[1] < LEAST_IMPROVEMENT and len(tried) > SURE_POINTS):
            return self._unseen(tried)
        return candidates[proposed[0]]

    def _unseen(self, tried: set[ParameterPoint]) -> ParameterPoint | None:
        """Return the best point with a value that none had yet, of a parameter that has few: no model knows it."""
        best = self.best_point()
        for dimension in self.space.dimensions:
            seen = {getattr(point, dimension.name) for point in tried}
            for value in dimension.values if len(dimension.values) <= _FEW_VALUES else ():
                if value not in seen:
                    return replace(best, **{dimension.name: value})  # type: ignore[arg-type]
        return None

    def _check(self, point: ParameterPoint, name: str) -> _Search:
        pairs = []
        for _ in range(NUM_PAIRS):
            tested = yield _BlockRequest(point, "check")
            base = yield _BlockRequest(self.space.base, "check")
            pairs.append((base, tested))
        speedup, low, high = bootstrap_speedup([(base.samples, tested.samples) for base, tested in pairs])
        base_seconds = statistics.median(base.seconds for base, _ in pairs)
        is_kept = speedup > 1.0 and low > 1.0 - _MAX_LOSS
        text = f"{name} is {speedup:.3f} times as fast as the base, {low:.3f} to {high:.3f} with 90 % confidence"
        chosen = point if is_kept else self.space.base
        reason = text if is_kept else f"{text}: the base stays"
        return self._outcome(chosen, reason, base_seconds, (speedup, low, high) if is_kept else (1.0, 1.0, 1.0))

    def _keep(self, reason: str) -> TuningOutcome:
        bases = [block.seconds for block in self.blocks if block.point == self.space.base]
        return self._outcome(self.space.base, reason, statistics.median(bases) if bases else 0.0, (1.0, 1.0, 1.0))

    def _outcome(
        self, chosen: ParameterPoint, reason: str, base_seconds: float, speedup: tuple[float, float, float]
    ) -> TuningOutcome:
        seconds = self._now - (self._now if self._began is None else self._began)
        return TuningOutcome(self.space.base, chosen, *speedup, base_seconds, self.num_points, seconds, reason)

    def _finish(self, outcome: TuningOutcome, block: TunedBlock | None = None) -> TunerDecision:
        self.outcome, self._point = outcome, outcome.chosen
        self._search.close()
        return TunerDecision(outcome.chosen, block, outcome)


def spread_points(space: SearchSpace) -> list[ParameterPoint]:
    """Return points of a space that lie far apart and from the base: each the farthest from those before it."""
    chosen = [space.coordinates(space.base)]
    rest = {point: space.coordinates(point) for point in space.points() if point != space.base}
    found: list[ParameterPoint] = []
    while rest and len(found) < _NUM_STARTS:
        # Not the corners themselves: where a size is extreme, steps may take several times as long.
        point = max(
            rest, key=lambda one: (min(math.dist(rest[one], other) for other in chosen), -_extremity(rest[one]))
        )
        chosen.append(rest.pop(point))
        found.append(point)
    return found


def _extremity(coordinates: Sequence[float]) -> float:
    return sum(abs(one - 0.5) for one in coordinates)


def bootstrap_speedup(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[float, float, float]:
    """Return how many times faster the second of each pair is, and between which values that is with 90 % confidence.

    Efron, "Bootstrap methods", 1979: pairs are drawn with replacement, and in each of them its samples.

    Args:
        pairs: seconds in samples of the base, and of the point that is compared with it.
    """
    generator = random.Random(0)

    def speedup(drawn: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
        return statistics.median(statistics.median(base) / statistics.median(tested) for base, tested in drawn)

    resampled = sorted(
        speedup(
            [
                (generator.choices(base, k=len(base)), generator.choices(tested, k=len(tested)))
                for base, tested in generator.choices(pairs, k=len(pairs))
            ]
        )
        for _ in range(_NUM_RESAMPLES)
    )
    tail = round((1 - _CONFIDENCE) / 2 * _NUM_RESAMPLES)
    return speedup(pairs), resampled[tail], resampled[-tail - 1]
