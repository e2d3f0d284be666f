"""Turnstiles: barriers around the end of the counters, and who is blamed when somebody does not come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from reigen.errors import CollectiveError, DeadlineError, PeerLostError
from reigen.planes.turnstile import Turnstile
from reigen.testing import run_threads
from reigen.wire.futex import Word


class Others:
    """Neighbours of which is known what happens to them."""

    def __init__(self, rank: int, failure: Callable[[Sequence[int]], CollectiveError | None] = lambda _: None) -> None:
        self.rank = rank
        self.ranks = range(20)
        self.failure = failure


def words(size: int, start: int = 0) -> list[Word]:
    memory = np.zeros(64 * size, np.uint8)
    found = [Word(memory, 64 * rank) for rank in range(size)]
    for word in found:
        word.store(start)
    return found


def turnstile(shared: list[Word], others: Others, start: int = 0, looks: int = 0) -> Turnstile:
    made = Turnstile(shared, others, looks)  # type: ignore[arg-type]  # three of the things that Neighbours can
    made.count = start
    return made


@pytest.mark.parametrize("looks", [0, 50])
@pytest.mark.parametrize("start", [0, 2**32 - 100, 2**31 - 100])
def test_nobody_passes_before_all_have_come(start: int, looks: int) -> None:
    size, steps = 4, 300
    shared, progress = words(size, start), [0] * size

    def act(rank: int, _: object) -> None:
        mine = turnstile(shared, Others(rank), start, looks)
        for step in range(steps):
            progress[rank] = step
            mine.wait(mine.post(), time.monotonic() + 30)
            assert min(progress) >= step

    run_threads(act, size)


def test_who_has_not_come_is_named_at_the_deadline() -> None:
    shared = words(4)
    mine = turnstile(shared, Others(0))
    step = mine.post()
    shared[2].store(step)
    with pytest.raises(DeadlineError, match=r"rank\(s\) 1, 3 did not take their part in time") as caught:
        mine.wait(step, time.monotonic() + 0.05)
    assert caught.value.ranks == (1, 3)


def test_a_loss_ends_the_wait_long_before_the_deadline() -> None:
    def failure(needed: Sequence[int]) -> CollectiveError | None:
        assert list(needed) == [1, 2]
        return PeerLostError("rank 2 died", ranks=(2,))

    mine = turnstile(words(3), Others(0, failure))
    with pytest.raises(PeerLostError, match="rank 2 died"):
        mine.wait(mine.post(), time.monotonic() + 60)


def test_who_came_and_then_went_is_not_missed() -> None:
    """Its last step and its end fall between looking at the counters and looking at the processes."""
    shared = words(3)
    asked: list[list[int]] = []

    def failure(needed: Sequence[int]) -> CollectiveError | None:
        asked.append(list(needed))
        shared[1].store(1)
        if len(asked) == 3:
            shared[2].store(1)
        return PeerLostError("rank 1 left", ranks=(1,)) if 1 in needed else None

    mine = turnstile(shared, Others(0, failure))
    mine.wait(mine.post(), time.monotonic() + 60)
    assert asked == [[1, 2], [2], [2]]


def test_who_sleeps_does_other_things_meanwhile() -> None:
    shared = words(2)
    calls = []

    def idle() -> bool:
        calls.append(None)
        if len(calls) == 3:
            shared[1].store(1)
        return True

    mine = Turnstile(shared, Others(0), 0, idle=idle)  # type: ignore[arg-type]
    began = time.monotonic()
    mine.wait(mine.post(), began + 30)
    assert len(calls) == 3
    assert time.monotonic() - began < 15.0
