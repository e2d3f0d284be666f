"""An elastic job goes on with another scheduler: random schedules. REIGEN_SIM_SEED=<seed> replays one of them."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.unit.kv.scheduler_restarts import play


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Hundreds of processes have much to say."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def test_random_schedules() -> None:
    first, count = int(os.environ.get("REIGEN_SIM_SEED", "0")), 1 if "REIGEN_SIM_SEED" in os.environ else 200
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        seen += play(seed)
    if count > 1:
        kinds = (
            "scheduler", "cut record", "some told", "lost", "killed", "server killed", "newcomer waits", "barrier",
        )  # fmt: skip
        assert min(seen[what] for what in kinds) > 20, seen


@pytest.mark.parametrize(
    "seed",
    [10_891],  # a loss is noticed when the next process of its slot has come and left
)
def test_schedules_that_have_failed(seed: int) -> None:
    play(seed)


@pytest.mark.slow
def test_many_random_schedules() -> None:
    for seed in range(10_000, 13_000):
        play(seed)
