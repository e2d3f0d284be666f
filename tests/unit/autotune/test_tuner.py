"""The tuner on made-up jobs: steps of a known length go in, parameters come out. The clock is the job's own."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from reigen.autotune.search_space import ParameterPoint, SearchSpace, make_search_space
from reigen.autotune.surrogate import GaussianSurrogate, PointObservation
from reigen.autotune.tuner import (
    LEAST_IMPROVEMENT,
    LEAST_PAIRS,
    MAX_STEPS_TO_CHANGE,
    NUM_PAIRS,
    NUM_SAMPLES,
    POINTS_PER_BASE,
    SETTLE_STEPS,
    TUNING_SECONDS,
    Autotuner,
    StepEnd,
    TunedBlock,
    TunerDecision,
    TunerOptions,
    bootstrap_speedup,
    spread_points,
)

MIB = 1 << 20
BASE = ParameterPoint(128 * MIB, 4 * MIB, "ordered", 1)
SPACE = make_search_space(BASE, {}, network_ranks=4, num_sockets=4)
OPTIONS = TunerOptions(warmup_samples=1, steps_per_sample=4)

#: Seconds of a step with these parameters.
Surface = Callable[[ParameterPoint], float]


def distance(size: int, best: int) -> float:
    return abs(math.log2(size) - math.log2(best))


def smooth(point: ParameterPoint) -> float:
    """Best with buckets of 1 MiB, batches of 8 MiB and two sockets."""
    sockets = {1: 0.006, 2: 0.0, 4: 0.002}[point.tcp_sockets]
    return (
        0.05
        + 0.002 * distance(point.bucket_bytes, MIB)
        + 0.001 * distance(point.fusion_threshold_bytes, 8 * MIB)
        + sockets
        + 0.02 * (point.tcp_algorithm == "latency")
    )


def flat(point: ParameterPoint) -> float:
    return 0.02


def base_is_best(point: ParameterPoint) -> float:
    return 0.05 if point == BASE else 0.052


@dataclass
class FakeJob:
    """A job whose steps take as long as its surface says, give or take some noise, and times the drift at that time."""

    surface: Surface
    noise: float = 0.0
    drift: Callable[[float], float] = lambda now: 1.0
    wait_share: float = 0.5
    step_bytes: float = 1e9
    steps_to_change: int = 3
    has_buckets: bool = True
    point: ParameterPoint = BASE
    began: float = 1000.0
    now: float = 1000.0
    decisions: list[TunerDecision] = field(default_factory=list)

    def run(self, tuner: Autotuner, max_steps: int = 200_000, seed: int = 0) -> None:
        rng = random.Random(seed)
        waited = reduced = 0.0
        waiting = 0
        for _ in range(max_steps):
            seconds = self.surface(self.point) * self.drift(self.now) * math.exp(rng.gauss(0, self.noise))
            self.now += seconds
            waited += self.wait_share * seconds
            reduced += self.step_bytes
            waiting = max(0, waiting - 1)
            decision = tuner.step_ended(StepEnd(self.now, waited, reduced, waiting == 0, has_buckets=self.has_buckets))
            if decision.block is not None or decision.outcome is not None:
                self.decisions.append(decision)
            if decision.point is not None:
                self.point, waiting = decision.point, self.steps_to_change
            if decision.outcome is not None:
                return
        raise AssertionError("the tuner has not come to an end")


def tuned(
    job: FakeJob, space: SearchSpace = SPACE, warm_start: ParameterPoint | None = None, seed: int = 0
) -> Autotuner:
    tuner = Autotuner(space, GaussianSurrogate(), OPTIONS, warm_start)
    job.run(tuner, seed=seed)
    return tuner


@functools.cache
def short_search() -> Autotuner:
    """A search of a few points, that has ended."""
    tuner = Autotuner(SPACE, GaussianSurrogate(), TunerOptions(1, 4, max_points=8))
    FakeJob(smooth).run(tuner)
    return tuner


def regret(surface: Surface, chosen: ParameterPoint, space: SearchSpace = SPACE) -> float:
    """How much longer a step takes than with the best point of all."""
    return surface(chosen) / min(map(surface, space.points())) - 1


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_it_comes_near_the_best_point_of_all(seed: int) -> None:
    job = FakeJob(smooth, noise=0.03)
    outcome = tuned(job, seed=seed).outcome
    assert outcome is not None
    assert regret(smooth, outcome.chosen) < 0.07
    assert outcome.chosen == job.point
    assert outcome.low <= outcome.speedup <= outcome.high
    assert outcome.low < smooth(BASE) / smooth(outcome.chosen) < outcome.high + 0.05
    assert outcome.num_points <= OPTIONS.max_points


@pytest.mark.slow
@pytest.mark.parametrize(
    "drift",
    [
        lambda now: 1.0 + (now - 1000.0) / 60,  # ever slower: twice as slow after a minute
        lambda now: 2.0 if now < 1010 else 1.0,
        lambda now: 1.0 + 0.3 * math.sin(now / 20),
    ],
    ids=["slower", "half", "wave"],
)
def test_what_changes_with_time_is_not_taken_for_an_effect_of_the_parameters(drift: Callable[[float], float]) -> None:
    for surface in (flat, base_is_best):
        outcome = tuned(FakeJob(surface, noise=0.01, drift=drift)).outcome
        assert outcome is not None
        assert surface(outcome.chosen) <= surface(BASE) * 1.02
    outcome = tuned(FakeJob(smooth, noise=0.01, drift=drift)).outcome
    assert outcome is not None
    assert smooth(outcome.chosen) < smooth(BASE)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_it_never_ends_with_what_is_slower_than_the_beginning(seed: int) -> None:
    job = FakeJob(base_is_best, noise=0.1)
    outcome = tuned(job, seed=seed).outcome
    assert outcome is not None
    assert base_is_best(outcome.chosen) <= base_is_best(BASE) * 1.02
    assert job.point == outcome.chosen


def test_between_points_the_base_is_measured_again() -> None:
    tuner = short_search()
    phases = "".join(block.phase[0] for block in tuner.blocks)
    search, check = phases.rstrip("c"), phases.lstrip("bs")
    assert check in ("c" * 2 * LEAST_PAIRS, "c" * 2 * NUM_PAIRS)
    runs = search.split("b")
    assert runs[0] == runs[-1] == "", "it begins with the base, and ends with it"
    assert all(run == "s" * POINTS_PER_BASE for run in runs[1:-2])
    searched = [block.point for block in tuner.blocks if block.phase == "search"]
    assert len(set(searched)) == len(searched), "no point is tried twice"
    assert BASE not in searched


def test_a_check_alternates_what_seems_best_with_the_base() -> None:
    tuner = short_search()
    assert tuner.outcome is not None
    points = [block.point for block in tuner.blocks if block.phase == "check"]
    pair = [tuner.outcome.chosen, BASE]
    assert points in ([*pair, *reversed(pair)], [*pair, *reversed(pair)] * (NUM_PAIRS // 2))


def test_steps_before_all_ranks_have_what_was_chosen_are_thrown_away() -> None:
    """A change costs three slow steps here; no sample has one of them in it."""
    tuner = Autotuner(SPACE, GaussianSurrogate(), TunerOptions(0, 1, seconds=1e6))
    now, slow, point = 0.0, 0, BASE
    blocks: list[TunedBlock] = []
    while len(blocks) < 6:
        now += 5.0 if slow > 0 else smooth(point)
        slow -= 1
        decision = tuner.step_ended(StepEnd(now, now / 2, 0, is_applied=slow <= 0))
        blocks += [decision.block] if decision.block is not None else []
        if decision.point is not None:
            point, slow = decision.point, 3
    for block in blocks:
        assert block.samples == pytest.approx([smooth(block.point)] * NUM_SAMPLES)


def test_what_some_rank_never_takes_on_does_not_stop_the_search() -> None:
    tuner = Autotuner(SPACE, GaussianSurrogate(), TunerOptions(0, 1))
    now, num_points = 0.0, 0
    for _ in range(3 * (MAX_STEPS_TO_CHANGE + SETTLE_STEPS + NUM_SAMPLES + 2)):
        now += 0.01
        num_points += tuner.step_ended(StepEnd(now, now / 2, 0, is_applied=False)).point is not None
    assert num_points >= 3


def test_where_nobody_waits_nothing_is_searched_for() -> None:
    job = FakeJob(smooth, wait_share=0.02)
    outcome = tuned(job).outcome
    assert outcome is not None
    assert outcome.chosen == job.point == BASE
    assert "2.0% of the time" in outcome.reason
    assert outcome.num_points == 0


def test_an_obstacle_ends_it_at_once() -> None:
    tuner = Autotuner(SPACE, GaussianSurrogate(), OPTIONS)
    decision = tuner.step_ended(StepEnd(1.0, obstacle="sums depend on it"))
    assert decision.outcome is not None
    assert (decision.point, decision.outcome.reason) == (BASE, "sums depend on it")
    assert tuner.step_ended(StepEnd(2.0)) == TunerDecision()


def test_what_another_job_has_found_is_checked_and_not_searched_for() -> None:
    best = min(SPACE.points(), key=smooth)
    tuner = tuned(FakeJob(smooth, noise=0.02), warm_start=best)
    assert tuner.outcome is not None
    assert tuner.outcome.chosen == best
    assert {block.phase for block in tuner.blocks} == {"base", "check"}


@pytest.mark.slow
def test_what_is_not_true_any_more_of_another_job_is_searched_for() -> None:
    worst = max(SPACE.points(), key=smooth)
    tuner = tuned(FakeJob(smooth, noise=0.02), warm_start=worst)
    assert tuner.outcome is not None
    assert regret(smooth, tuner.outcome.chosen) < 0.07


def test_a_point_that_is_not_in_the_space_is_not_begun_with() -> None:
    tuner = Autotuner(
        SPACE, GaussianSurrogate(), TunerOptions(0, 1, max_points=2), ParameterPoint(MIB, MIB, "ring", 64)
    )
    FakeJob(smooth).run(tuner)
    assert all(block.point.tcp_algorithm != "ring" for block in tuner.blocks)


@pytest.mark.parametrize(
    ("factor", "drift", "noise"),
    [
        (6, lambda now: 1.0, 0.03),
        (20, lambda now: 1.0, 0.03),
        (6, lambda now: 1.0 if now < 1025 else 3.0, 0.03),
        pytest.param(1, lambda now: 1.0, 0.03, marks=pytest.mark.slow),
        pytest.param(6, lambda now: 1.0 + (now - 1000.0) / 60, 0.03, marks=pytest.mark.slow),
        pytest.param(6, lambda now: 1.0 + 0.3 * math.sin(now / 20), 0.3, marks=pytest.mark.slow),
    ],
    ids=["384 ms", "1.3 s", "384 ms, then 1.2 s", "64 ms", "ever slower", "noisy"],
)
def test_it_ends_in_time(factor: float, drift: Callable[[float], float], noise: float) -> None:
    job = FakeJob(lambda point: factor * smooth(point), drift=drift, noise=noise)
    tuner = Autotuner(SPACE, GaussianSurrogate(), TunerOptions())
    job.run(tuner)
    assert tuner.outcome is not None
    first = job.began + 2 * factor * smooth(BASE)
    assert tuner.outcome.seconds <= TUNING_SECONDS
    assert job.now - first <= TUNING_SECONDS
    assert job.point == tuner.outcome.chosen
    assert smooth(job.point) <= smooth(BASE)


def test_steps_too_long_for_anything_end_it() -> None:
    job = FakeJob(lambda point: 5.0)
    tuner = Autotuner(SPACE, GaussianSurrogate(), TunerOptions())
    job.run(tuner)
    assert tuner.outcome is not None
    assert (tuner.outcome.num_points, tuner.outcome.chosen) == (0, BASE)
    assert "--autotune-seconds" in tuner.outcome.reason
    assert tuner.outcome.seconds <= TUNING_SECONDS
    longer = Autotuner(SPACE, GaussianSurrogate(), TunerOptions(seconds=400.0))
    FakeJob(lambda point: 100 * smooth(point)).run(longer)
    assert longer.outcome is not None
    assert longer.outcome.num_points > 0


def pipelined(step_bytes: float, bytes_a_second: float, seconds_a_message: float, compute: float) -> Surface:
    """Steps whose buckets travel while later gradients are computed, over connections that share a link."""

    def seconds(point: ParameterPoint) -> float:
        bucket = min(point.bucket_bytes, step_bytes)
        rate = bytes_a_second * {1: 1.0, 2: 1.15, 4: 1.1}[point.tcp_sockets]
        rate *= {"ordered": 1.0, "direct": 1.04, "latency": 0.5}[point.tcp_algorithm]
        wire = step_bytes / rate + step_bytes / bucket * seconds_a_message
        return max(compute + bucket / rate + seconds_a_message, wire + compute * bucket / step_bytes)

    return seconds


#: Models of wide layers at 1 Gbit/s, and of deep ones at 200 Mbit/s and 5 ms.
WIDE, DEEP = pipelined(24 * MIB, 1.1e8, 0.004, 0.1), pipelined(6 * MIB, 2.4e7, 0.02, 0.04)
#: What somebody would try by hand.
GRID = [
    replace(BASE, bucket_bytes=size * MIB, tcp_algorithm=algorithm, tcp_sockets=sockets)
    for size in (1, 4, 16, 64)
    for algorithm, sockets in (("ordered", 1), ("ordered", 4), ("direct", 1))
]


@pytest.mark.parametrize(
    ("surface", "drift", "seed"),
    [
        (WIDE, lambda now: 1.0, 0),
        *(
            pytest.param(surface, drift, seed, marks=pytest.mark.slow)
            for seed in (1, 2)
            for surface in (WIDE, DEEP)
            for drift in (lambda now: 1.0, lambda now: 1.0 + 0.3 * math.sin(now / 20))
        ),
    ],
)
def test_it_is_as_fast_as_the_best_of_a_grid_by_hand(
    surface: Surface, drift: Callable[[float], float], seed: int
) -> None:
    job = FakeJob(surface, noise=0.01, drift=drift, step_bytes=24 * MIB)
    tuner = Autotuner(SPACE, GaussianSurrogate(), TunerOptions())
    job.run(tuner, seed=seed)
    assert surface(job.point) <= 1.03 * min(map(surface, GRID))


def test_where_a_check_says_no_the_search_goes_on() -> None:
    """Points are fast at first sight only."""
    num_steps: Counter[ParameterPoint] = Counter()

    def seconds(point: ParameterPoint) -> float:
        num_steps[point] += 1
        return 0.02 if point == BASE else 0.015 if num_steps[point] < 70 else 0.021

    job = FakeJob(seconds, noise=0.01)
    tuner = Autotuner(SPACE, GaussianSurrogate(), TunerOptions(1, 10, max_points=8))
    job.run(tuner)
    checked = {block.point for block in tuner.blocks if block.phase == "check"} - {BASE}
    assert len(checked) > 1
    assert job.point == BASE


def test_a_point_without_hope_costs_few_samples() -> None:
    tuner = Autotuner(SPACE, GaussianSurrogate(), TunerOptions(1, 10, max_points=4))
    FakeJob(lambda point: 0.02 if point.tcp_algorithm == "ordered" else 0.04).run(tuner)
    num_samples = {block.point.tcp_algorithm: len(block.samples) for block in tuner.blocks if block.phase == "search"}
    assert num_samples["direct"] < num_samples.get("ordered", NUM_SAMPLES) == NUM_SAMPLES


def test_where_nothing_was_fused_and_there_are_no_buckets_nothing_is_searched_for_on_one_host() -> None:
    base = replace(BASE, tcp_algorithm="", tcp_sockets=0)
    tuner = Autotuner(make_search_space(base, {}), GaussianSurrogate(), TunerOptions())
    for step in range(1, 100):
        end = StepEnd(step / 10, step / 20, step * 1e8, has_buckets=False, num_fused=0)
        if tuner.step_ended(end).outcome is not None:
            break
    assert tuner.outcome is not None
    assert tuner.outcome.num_points == 0
    assert "no parameter is left" in tuner.outcome.reason


def test_without_buckets_their_size_is_not_searched_for() -> None:
    job = FakeJob(smooth, has_buckets=False)
    tuner = Autotuner(SPACE, GaussianSurrogate(), TunerOptions(1, 10, max_points=4))
    job.run(tuner)
    assert {block.point.bucket_bytes for block in tuner.blocks} == {BASE.bucket_bytes}


def test_points_to_begin_with_lie_far_apart() -> None:
    points = spread_points(SPACE)
    assert len(points) == len({*points, BASE}) - 1
    assert {point.tcp_algorithm for point in points} | {"ordered"} == {"ordered", "direct"}


def test_the_same_samples_have_no_speedup_and_others_have_theirs() -> None:
    same = [((1.0, 1.1, 0.9), (1.0, 1.1, 0.9))] * 4
    speedup, low, high = bootstrap_speedup(same)
    assert speedup == 1.0
    assert low < 1.0 < high
    twice = [((2.0, 2.2, 1.8), (1.0, 1.1, 0.9))] * 4
    speedup, low, high = bootstrap_speedup(twice)
    assert 1.5 < low < speedup == 2.0 < high < 2.5


def observe(values: Sequence[tuple[float, float]]) -> list[PointObservation]:
    return [PointObservation(BASE, (place,), value, 0.01) for place, value in values]


def test_a_library_that_is_loaded_later_proposes_the_same() -> None:
    observations, candidates = observe([(0.0, 0.0), (0.5, 0.2), (1.0, 0.1)]), [(0.25,), (0.75,)]
    late = GaussianSurrogate(loads_now=False)
    assert late.propose(observations, candidates) == GaussianSurrogate().propose(observations, candidates)


def test_the_surrogate_proposes_what_lies_between_good_points_and_expects_nothing_where_all_is_alike() -> None:
    surrogate = GaussianSurrogate()
    found = surrogate.propose(observe([(0.0, 0.0), (0.3, 0.3), (0.6, 0.3), (1.0, 0.0)]), [(0.1,), (0.45,), (0.9,)])
    assert found is not None
    assert found[0] == 1
    alike = surrogate.propose(observe([(place / 10, 0.0) for place in range(11)]), [(0.05,), (0.55,)])
    assert alike is not None
    assert alike[1] < LEAST_IMPROVEMENT < found[1]
    assert surrogate.propose(observe([(0.0, 0.0)]), []) is None
    means = surrogate.means(observe([(0.0, 0.0), (0.5, 0.2), (1.0, 0.1)]))
    assert max(means) == means[1]
