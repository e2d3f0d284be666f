"""Nodes and their scheduler under thousands of random schedules. REIGEN_SIM_SEED=<seed> replays one of them."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from tests.unit.cluster.membership_simulator import play

_REPLAY = os.environ.get("REIGEN_SIM_SEED")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of nodes have much to say."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def seeds(first: int, count: int) -> Sequence[int]:
    return range(first, first + count) if _REPLAY is None else [int(_REPLAY)]


def test_schedules() -> None:
    seen: Counter[str] = Counter()
    for seed in seeds(0, 200):
        seen.update(dict.fromkeys(play(seed).seen, 1))
    if _REPLAY is None:
        assert min(seen.values()) >= 10, seen
        assert set(seen) == {
            "good end", "bad end", "barrier", "given up", "broken barrier", "cut", "kill", "crash", "freeze",
        }  # fmt: skip


def test_what_was_acknowledged_is_never_lost() -> None:
    seen: Counter[str] = Counter()
    for seed in seeds(0, 200):
        seen.update(dict.fromkeys(play(seed, durable=True).seen, 1))
    if _REPLAY is None:
        assert min(seen[what] for what in ("kill", "crash", "massacre", "freeze", "cut", "push", "restored")) >= 30, (
            seen
        )


@pytest.mark.slow
def test_many_schedules() -> None:
    for seed in seeds(1_000, 1_000):
        play(seed)
        play(seed, durable=True)
