"""Negotiation under thousands of random schedules: orders, delays, mismatches, deadlines, ranks that leave and die.

REIGEN_SIM_SEED=<seed> replays one of them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import pytest
from tests.unit.simulator import FOREVER, play

from reigen.engine.messages import Cause

_BLOCK = 500
_REPLAY = os.environ.get("REIGEN_SIM_SEED")


def seeds(first: int, count: int) -> Sequence[int]:
    return range(first, first + count) if _REPLAY is None else [int(_REPLAY)]


@pytest.mark.parametrize("first", range(0, 10_000, _BLOCK))
def test_schedules(first: int) -> None:
    for seed in seeds(first, _BLOCK):
        play(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(10_000, 60_000, 5_000))
def test_many_schedules(first: int) -> None:
    for seed in seeds(first, 5_000):
        play(seed)


def test_the_schedules_reach_what_they_are_meant_to() -> None:
    seen: Counter[str] = Counter()
    for seed in range(500):
        s = play(seed)
        seen["fused"] += any(len(next(iter(m.values()))) > 1 for m in s.batches.values())
        seen["mismatch"] += any(r.cause is not Cause.LATE for r in s.refused.values())
        seen["late"] += any(r.cause is Cause.LATE for r in s.refused.values())
        seen["died"] += any(r.gone == "died" for r in s.ranks)
        seen["left"] += any(r.gone == "left" for r in s.ranks)
        seen["rank 0 gone"] += bool(s.ranks[0].gone)
        seen["cached"] += any("Ready" in line for line in s.log)
        seen["forgotten"] += any("Forget" in line for line in s.log)
        seen["submitted again"] += s.plan.deadline_seconds == FOREVER and any(
            c > 1 for r in s.ranks for c in r.count.values()
        )
    assert min(seen.values()) >= 15, seen
    assert len(seen) == 9
