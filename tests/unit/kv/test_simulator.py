"""A store's rounds under thousands of random schedules. REIGEN_SIM_SEED=<seed> replays one of them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

import pytest

from tests.unit.kv.simulator import play

_REPLAY = os.environ.get("REIGEN_SIM_SEED")


def seeds(first: int, count: int) -> Sequence[int]:
    return range(first, first + count) if _REPLAY is None else [int(_REPLAY)]


def test_schedules() -> None:
    seen: Counter[str] = Counter()
    for seed in seeds(0, 250):
        seen.update(dict.fromkeys(play(seed).seen, 1))
    if _REPLAY is None:
        assert min(seen.values()) >= 15, seen
        assert set(seen) == {"closed form", "kill", "dropped", "crash", "cut", "suspect", "replaced", "aborted"}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1_000, 2_000, 500))
def test_many_schedules(first: int) -> None:
    for seed in seeds(first, 500):
        play(seed)
