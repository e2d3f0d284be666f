"""Clock offsets from questions and answers whose ways take different times."""

from __future__ import annotations

import random

import pytest

from reigen.observe.clock_sync import ZERO_OFFSET, ClockOffsetEstimate, estimate_offset, monotonic_clock

MS = 1_000_000


def ask(rng: random.Random, now: int, offset: int, rate: float = 0.0) -> tuple[int, int, int]:
    """(sent, there, received) at the own time ``now``, with ways of 20 us to 2 ms."""
    there_takes, back_takes = (int(rng.uniform(0.02, 2.0) * MS) for _ in range(2))
    reached = now + there_takes
    return now, reached + offset + int(reached * rate), reached + back_takes


@pytest.mark.parametrize("offset", [0, 1, -5_000 * MS, 3_600_000 * MS])
def test_the_error_bound_holds_and_gets_small(offset: int) -> None:
    rng = random.Random(offset)
    estimate = ClockOffsetEstimate(is_same=False)
    errors = []
    for attempt in range(50):
        estimate.learn(estimate_offset(*ask(rng, attempt * 10 * MS, offset)))
        assert estimate.best is not None
        assert abs(estimate.best.nanoseconds - offset) <= estimate.best.error
        errors.append(estimate.best.error)
    assert errors[-1] < 0.5 * MS
    assert errors == sorted(errors, reverse=True)


def test_the_bound_holds_for_clocks_that_run_apart() -> None:
    rng, rate = random.Random(7), 60e-6
    estimate = ClockOffsetEstimate(is_same=False)
    for attempt in range(400):
        now = attempt * 1000 * MS
        estimate.learn(estimate_offset(*ask(rng, now, 5 * MS, rate)))
        best = estimate.best
        assert best is not None
        for later in (now + 3 * MS, now + 900 * MS):
            assert abs(best.nanoseconds - 5 * MS - int(later * rate)) <= best.error_at(later) + 1
    assert best.taken > 390_000 * MS


def test_one_clock_is_exact_unless_the_measurement_contradicts() -> None:
    rng = random.Random(3)
    estimate = ClockOffsetEstimate(is_same=True)
    estimate.learn(estimate_offset(*ask(rng, 0, 0)))
    assert estimate.best is ZERO_OFFSET
    assert estimate.best.error_at(10**15) == 0
    estimate = ClockOffsetEstimate(is_same=True)
    estimate.learn(estimate_offset(*ask(rng, 0, 100 * MS)))
    assert estimate.best is not None
    assert abs(estimate.best.nanoseconds - 100 * MS) <= estimate.best.error


def test_processes_here_read_one_clock() -> None:
    assert monotonic_clock().identity == monotonic_clock().identity != ""
    assert monotonic_clock().read() <= monotonic_clock().read()
