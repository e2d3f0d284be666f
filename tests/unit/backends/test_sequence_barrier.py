"""Turnstiles: barriers around the end of the counters, and who is blamed when somebody does not come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from reigen.backends.shm.sequence_barrier import SequenceBarrier
from reigen.errors import CollectiveError, DeadlineError, PeerLostError
from reigen.net.futex import FutexWord
from reigen.testing import run_threads


class Others:
    """Neighbours of which is known what happens to them."""

    def __init__(self, rank: int, failure: Callable[[Sequence[int]], CollectiveError | None] = lambda _: None) -> None:
        self.rank = rank
        self.ranks = range(20)
        self.failure = failure


class Words(list[FutexWord]):
    """The counters of so many ranks, and where each says that it sleeps."""

    def __init__(self, size: int, start: int = 0) -> None:
        memory = np.zeros(64 * size, np.uint8)
        super().__init__(FutexWord(memory, 64 * rank) for rank in range(size))
        self.sleeping = [FutexWord(memory, 64 * rank + 32) for rank in range(size)]
        for word in self:
            word.store(start)


def turnstile(shared: Words, others: Others, start: int = 0, looks: int = 0) -> SequenceBarrier:
    made = SequenceBarrier(shared, shared.sleeping, others, looks)  # type: ignore[arg-type]  # has what is used
    made.count = start
    return made


@pytest.mark.parametrize("looks", [0, 50])
@pytest.mark.parametrize("start", [0, 2**32 - 100, 2**31 - 100])
def test_nobody_passes_before_all_have_come(start: int, looks: int) -> None:
    size, steps = 4, 300
    shared, progress = Words(size, start), [0] * size

    def act(rank: int, _: object) -> None:
        mine = turnstile(shared, Others(rank), start, looks)
        for step in range(steps):
            progress[rank] = step
            mine.wait(mine.post(), time.monotonic() + 30)
            assert min(progress) >= step

    run_threads(act, size)


def test_who_has_not_come_is_named_at_the_deadline() -> None:
    shared = Words(4)
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

    mine = turnstile(Words(3), Others(0, failure))
    with pytest.raises(PeerLostError, match="rank 2 died"):
        mine.wait(mine.post(), time.monotonic() + 60)


def test_who_came_and_then_went_is_not_missed() -> None:
    """Its last step and its end fall between looking at the counters and looking at the processes."""
    shared = Words(3)
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


def test_a_post_wakes_those_that_sleep_and_makes_no_system_call_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Words(3)
    mine, wakes = turnstile(shared, Others(0)), []

    def wake(word: FutexWord) -> None:
        wakes.append(word)

    monkeypatch.setattr(FutexWord, "wake", wake)
    mine.post()
    assert wakes == []
    shared.sleeping[2].store(1)
    mine.post()
    assert wakes == [shared[0]]
    shared.sleeping[2].store(0)
    shared.sleeping[0].store(1)  # this rank itself cannot
    mine.post()
    assert wakes == [shared[0]]


def test_who_sleeps_says_so_for_as_long_as_it_sleeps() -> None:
    shared, seen = Words(2), []

    def idle() -> bool:
        seen.append([word.load() for word in shared.sleeping])
        shared[1].store(len(seen))
        return True

    mine = SequenceBarrier(shared, shared.sleeping, Others(0), 0, idle=idle)  # type: ignore[arg-type]
    for _ in range(2):
        mine.wait(mine.post(), time.monotonic() + 30)
        assert [word.load() for word in shared.sleeping] == [0, 0]
    assert seen == [[1, 0], [1, 0]]


def test_who_sleeps_does_other_things_meanwhile() -> None:
    shared = Words(2)
    calls = []

    def idle() -> bool:
        calls.append(None)
        if len(calls) == 3:
            shared[1].store(1)
        return True

    mine = SequenceBarrier(shared, shared.sleeping, Others(0), 0, idle=idle)  # type: ignore[arg-type]
    began = time.monotonic()
    mine.wait(mine.post(), began + 30)
    assert len(calls) == 3
    assert time.monotonic() - began < 15.0
