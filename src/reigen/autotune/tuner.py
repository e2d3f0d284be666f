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
   ends when it expects nothing from any, at the most points, or when the time that is left is needed for (d). A block
   whose samples are all slower than the base's by `HOPELESS` ends before its time.
d. *Check.* What seems best is measured alternately with the base, B-A, A-B, so that drift meets both alike, up to
   `NUM_PAIRS` times each. It stays if it was faster, and if with 90 % confidence (bootstrap over pairs and samples) it
   is not slower by more than 2 %. Else the base does: a job does not end slower than it began. The check ends as soon
   as the answer is clear, and if that is no and there is time, the search goes on, with what the check has observed.
e. *Warm start.* What another job has found is checked (d) first; if it stays there is no search.
f. Where the ranks hardly wait for collectives, nothing is searched for: there is nothing to gain.
g. *Time.* All this, from the first step on, takes at most `TunerOptions.seconds`. What a block takes is known from
   those before it, so (c) begins none that would leave too little for (d). Long steps have blocks of fewer samples.
   Should steps become longer in between, tuning ends before the step that would end too late, with what is known then.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from reigen.autotune.search_space import ParameterPoint, SearchSpace
from reigen.autotune.surrogate import PointObservation, Surrogate

#: Samples of a block, and the fewest, of long steps; steps that are thrown away behind a change; the most steps to wait
#: until all ranks have it.
NUM_SAMPLES, LEAST_SAMPLES, SETTLE_STEPS, MAX_STEPS_TO_CHANGE = 5, 3, 1, 60
#: Points between two blocks of the base; pairs of the check, and the fewest.
POINTS_PER_BASE, NUM_PAIRS, LEAST_PAIRS = 3, 4, 2
#: A sample ends after so many seconds, however few steps that are.
SAMPLE_SECONDS = 0.25
#: Tuning ends after so many seconds.
TUNING_SECONDS = 60.0
#: A block ends after two samples that are slower than the base by this factor.
HOPELESS, _HOPELESS_SAMPLES = 1.25, 2
#: Steps that a change takes, as long as none was seen; the latest blocks: the next ones
#: take no longer than the longest of them.
_STEPS_TO_CHANGE, _RECENT_BLOCKS = 4, 4
#: Expected improvement of the logarithm of a step's time that is not worth a try, once so many points were tried: from
#: fewer a model may be sure of what is wrong.
LEAST_IMPROVEMENT, SURE_POINTS = 0.003, 12
#: Part of a step for which rank 0 waits for collectives, below which nothing is tuned.
LEAST_WAIT = 0.05
#: A point may be slower by this part, with 90 % confidence, and still be taken.
_MAX_LOSS, _CONFIDENCE, _NUM_RESAMPLES = 0.02, 0.9, 1000
#: Width of that interval in standard deviations; part of all seconds that the check may take if that is not to be less
#: than `LEAST_PAIRS`; gain (logarithm) for which those are enough.
_CONFIDENCE_WIDTH, _CHECK_SHARE, _CLEAR_GAIN = 3.29, 0.35, 0.06
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
        seconds: that tuning takes, at most.
    """

    warmup_samples: int = 3
    steps_per_sample: int = 10
    max_points: int = 20
    seconds: float = TUNING_SECONDS


@dataclass(frozen=True, slots=True)
class StepEnd:
    """End of a step on rank 0.

    Attributes:
        now: on a clock of seconds.
        waited_seconds: for which the program has waited for collectives, ever.
        reduced_bytes: bytes that were reduced, ever.
        is_applied: the parameters that were chosen last have been taken on by all ranks.
        obstacle: why nothing may be tuned in this job; empty: something may.
        has_buckets: there are gradient buckets whose size can change.
        num_fused: operations that have travelled with others, ever.
    """

    now: float
    waited_seconds: float = 0.0
    reduced_bytes: float = 0.0
    is_applied: bool = True
    obstacle: str = ""
    has_buckets: bool = True
    num_fused: int = 1


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
    """Request of the search for a block; 0 samples: as many as steps of this length have."""

    point: ParameterPoint
    phase: str
    num_samples: int = 0


@dataclass
class _Comparison:
    """Check of a point: blocks of the base and of the point, in pairs."""

    point: ParameterPoint
    name: str
    pairs: list[tuple[TunedBlock, TunedBlock]] = field(default_factory=list)

    def speedup(self) -> tuple[float, float, float]:
        """Return how many times faster the point is, and between which values that is with 90 % confidence."""
        return bootstrap_speedup([(base.samples, tested.samples) for base, tested in self.pairs])


_Search = Generator[_BlockRequest, TunedBlock, TuningOutcome]


@dataclass
class _OpenBlock:
    """Block that is being measured."""

    request: _BlockRequest
    #: when it was asked for; None: at the first step
    asked: float | None = None
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
        self._tried = {space.base}
        self._starts: Iterator[ParameterPoint] = iter([])
        #: the check that is under way, and what those before it have observed of points that did not stay
        self._comparison: _Comparison | None = None
        self._rejected: dict[ParameterPoint, PointObservation] = {}
        self._search = self._run()
        self._open = _OpenBlock(next(self._search), num_settled=0)
        self._began: float | None = None
        self._now, self._step_seconds = 0.0, 0.0
        self._has_buckets, self._is_fused = True, True
        #: seconds of changes, and of samples, in the latest blocks
        self._change_seconds: deque[float] = deque(maxlen=_RECENT_BLOCKS)
        self._sample_seconds: deque[float] = deque(maxlen=_RECENT_BLOCKS)
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
        if self._began is None:
            self._began = self._open.asked = step.now
        else:
            self._step_seconds = step.now - self._now
        self._now, self._has_buckets, self._is_fused = step.now, step.has_buckets, step.num_fused > 0
        if step.obstacle:
            return self._finish(self._keep(step.obstacle))
        block, point = self._measure(step), None
        if block is not None:
            self._take(block)
            try:
                request = self._search.send(block)
            except StopIteration as stop:
                return self._finish(stop.value, block)
            changes, self._point = request.point != self._point, request.point
            self._open = _OpenBlock(request, step.now, num_settled=None if changes else SETTLE_STEPS)
            point = request.point if changes else None
        if self._seconds_left() < self._step_seconds:
            return self._finish(self._conclude(), block)
        return TunerDecision(point, block) if block is not None else NO_DECISION

    def observations(self) -> list[PointObservation]:
        """Return the points that were tried, relative to the base before and behind them; the base among them."""
        base, coordinates = self.space.base, self.space.coordinates
        found = [PointObservation(base, coordinates(base), 0.0, 0.0)]
        found += self._rejected.values()
        for place, block in enumerate(self.blocks):
            if block.phase != "search" or block.point in self._rejected:
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
        """Return the best point by now, without those that a check has refused."""
        found = self.observations()
        if len(found) <= 1:
            return self.space.base
        means = self._surrogate.means(found)
        places = [place for place, one in enumerate(found) if one.point not in self._rejected]
        best = max(places, key=means.__getitem__)
        return found[best].point if means[best] - means[0] >= LEAST_IMPROVEMENT else self.space.base

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
        if len(block.samples) < (block.request.num_samples or self._num_samples()) and not self._is_hopeless(block):
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

    def _num_samples(self) -> int:
        """Return the samples of a block of steps as long as the latest one."""
        enough = NUM_SAMPLES * SAMPLE_SECONDS / max(self._step_seconds, 1e-9)
        return max(LEAST_SAMPLES, min(NUM_SAMPLES, math.ceil(enough)))

    def _is_hopeless(self, block: _OpenBlock) -> bool:
        if block.request.phase != "search" or len(block.samples) < _HOPELESS_SAMPLES:
            return False
        base = next((one.seconds for one in reversed(self.blocks) if one.point == self.space.base), math.inf)
        return min(block.samples) > HOPELESS * base

    def _take(self, block: TunedBlock) -> None:
        if block.phase != "warmup":
            self.blocks.append(block)
            self._sample_seconds.append(block.ended - block.began)
        if self._open.num_steps and self._open.asked is not None:
            self._change_seconds.append(block.began - self._open.asked)

    # -- time ---------------------------------------------------------------------------------------------------------

    def _seconds_left(self) -> float:
        began = self._now if self._began is None else self._began
        return self._options.seconds - (self._now - began)

    def _seconds_of(self, num_changes: int, num_blocks: int) -> float:
        """Return the seconds that so many changes of parameters, and the samples of so many blocks, take."""
        guess = (_STEPS_TO_CHANGE + SETTLE_STEPS) * self._step_seconds
        change, samples = max(self._change_seconds, default=guess), max(self._sample_seconds, default=0.0)
        return num_changes * change + num_blocks * samples

    def _check_seconds(self, num_pairs: int) -> float:
        """Return the seconds of a check: A-B, B-A, A-B, B-A has five changes."""
        return self._seconds_of(num_pairs + 1, 2 * num_pairs)

    def _has_time(self, num_points: int) -> bool:
        """Return whether there is time to measure so many points, and for a check behind them."""
        share = _CHECK_SHARE * self._options.seconds
        is_clear = max(one.value for one in self.observations()) > _CLEAR_GAIN
        num_pairs = LEAST_PAIRS if is_clear or self._check_seconds(NUM_PAIRS) > share else NUM_PAIRS
        return self._seconds_left() >= self._seconds_of(num_points, num_points) + self._check_seconds(num_pairs)

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
        self.space = self.space.limited(
            first.step_bytes, has_buckets=self._has_buckets, is_fused=self._is_fused or self._has_buckets
        )
        if not self.space.dimensions:
            return self._keep("no parameter is left that could make a difference")
        if not self._has_time(1):
            return self._keep(
                f"steps of {first.seconds:.1f} s are too long to try anything in {self._options.seconds:.0f} s "
                "(--autotune-seconds allows more)"
            )
        warm = self._warm_start
        if warm is not None and warm != self.space.base and self.space.contains(warm):
            outcome = yield from self._check(warm, "the log's best point")
            if outcome.chosen != self.space.base:
                return outcome
            self._tried.add(warm)
        self._starts = iter(spread_points(self.space))
        last: TuningOutcome | None = None
        while True:
            yield from self._explore()
            best = self.best_point()
            if best == self.space.base:
                return last if last is not None else self._keep("nothing that was tried seems faster")
            outcome = last = yield from self._check(best, "the best point")
            if outcome.chosen != self.space.base or not self._has_time(0):
                return outcome

    def _explore(self) -> Generator[_BlockRequest, TunedBlock, None]:
        """Measure points, and the base between them, as long as there is time for a check as well."""
        num_since = 0
        while len(self._tried) <= self._options.max_points and self._has_time(2 if self.num_points else 1):
            point = next((one for one in self._starts if one not in self._tried), None) or self._propose()
            if point is None:
                break
            self._tried.add(point)
            yield _BlockRequest(point, "search")
            num_since += 1
            if num_since == POINTS_PER_BASE:
                yield _BlockRequest(self.space.base, "base")
                num_since = 0
        if num_since and self._has_time(1):
            yield _BlockRequest(self.space.base, "base")

    def _propose(self) -> ParameterPoint | None:
        tried = self._tried
        candidates = [point for point in self.space.points() if point not in tried]
        proposed = self._surrogate.propose(self.observations(), [*map(self.space.coordinates, candidates)])
        if proposed is None or (proposed[1] < LEAST_IMPROVEMENT and len(tried) > SURE_POINTS):
            return self._unseen()
        return candidates[proposed[0]]

    def _unseen(self) -> ParameterPoint | None:
        """Return the best point with a value that none had yet, of a parameter that has few: no model knows it."""
        best = self.best_point()
        for dimension in self.space.dimensions:
            seen = {getattr(point, dimension.name) for point in self._tried}
            for value in dimension.values if len(dimension.values) <= _FEW_VALUES else ():
                if value not in seen:
                    return replace(best, **{dimension.name: value})  # type: ignore[arg-type]
        return None

    def _check(self, point: ParameterPoint, name: str) -> _Search:
        """Compare a point with the base: A-B, B-A, and so on, so that what drifts meets both alike."""
        comparison = self._comparison = _Comparison(point, name)
        while True:
            tested = yield _BlockRequest(point, "check")
            base = yield _BlockRequest(self.space.base, "check")
            comparison.pairs.append((base, tested))
            base = yield _BlockRequest(self.space.base, "check")
            tested = yield _BlockRequest(point, "check")
            comparison.pairs.append((base, tested))
            speedup, low, high = comparison.speedup()
            is_clear = low > 1.0 or high < 1.0
            has_time = self._seconds_left() >= self._seconds_of(2, 4)
            if is_clear or len(comparison.pairs) >= NUM_PAIRS or not has_time:
                break
        outcome = self._conclude()
        if outcome.chosen != point:
            noise = math.log(high / low) / _CONFIDENCE_WIDTH
            self._rejected[point] = PointObservation(
                point, self.space.coordinates(point), min(0.0, math.log(speedup)), noise
            )
        self._comparison = None
        return outcome

    def _conclude(self) -> TuningOutcome:
        """Return the outcome by now: the point of the latest check stays if that says so."""
        comparison = self._comparison
        if comparison is None or len(comparison.pairs) < LEAST_PAIRS:
            return self._keep(f"after {self._options.seconds:.0f} s nothing was found to be faster for sure")
        speedup, low, high = comparison.speedup()
        base_seconds = statistics.median(base.seconds for base, _ in comparison.pairs)
        is_kept = speedup > 1.0 and low > 1.0 - _MAX_LOSS
        interval = f"{low:.3f} to {high:.3f} with 90 % confidence"
        text = f"{comparison.name} is {speedup:.3f} times as fast as the base, {interval}"
        if not is_kept:
            return self._outcome(self.space.base, f"{text}: the base stays", base_seconds, (1.0, 1.0, 1.0))
        return self._outcome(comparison.point, text, base_seconds, (speedup, low, high))

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
