"""Process sets and joins when ranks die, leave and come again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import numpy as np
import pytest

from reigen import context
from reigen.errors import CollectiveError, PeerLostError
from reigen.net.shm_segment import ShmSegment
from reigen.testing import RankError, RankPool, run_ranks
from reigen.types import DTYPES, ReduceOp

pytestmark = pytest.mark.slow  # many real processes

Pools = Callable[[int], RankPool]
FLOAT = DTYPES["float32"]


def total(value: float, count: int = 3, process_set: int = 0) -> float:
    x = np.full(count, value, np.float32)
    context.current().allreduce(x, x, FLOAT, op=ReduceOp.SUM, process_set=process_set).wait()
    assert (x == x[0]).all()
    return float(x[0])


def reduce_until_it_fails() -> None:
    for _ in range(100_000):
        total(1.0)


def die_while_a_set_is_made(victim: int) -> None:
    """Between the announcement and the moment at which the members know of each other's memory."""
    job = context.current()
    grow = ShmSegment.grow

    def last_words(self: ShmSegment, nbytes: int, what: str, *, sharers: int = 1) -> int:
        if job.rank == victim and "process set" in what:
            os.kill(os.getpid(), signal.SIGKILL)
        return grow(self, nbytes, what, sharers=sharers)

    ShmSegment.grow = last_words  # type: ignore[method-assign]
    for act in (lambda: job.add_process_set([0, 1]), job.barrier):
        with pytest.raises(PeerLostError) as raised:
            act()
        assert raised.value.ranks == (victim,)


def die_joined(victim: int) -> None:
    job = context.current()
    if job.rank == victim:
        job.join()
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError) as raised:
        reduce_until_it_fails()
    assert raised.value.ranks == (victim,)
    with pytest.raises(PeerLostError):
        job.join().wait()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("act", [die_while_a_set_is_made, die_joined])
def test_a_rank_that_dies_is_named(act: Callable[[int], None], victim: int) -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(act, 3, victim, init=True)
    assert [(f.rank, f.kind) for f in raised.value.failures] == [(victim, "died")], str(raised.value)


def leave_joined(leaver: int) -> None:
    """A rank shuts down although it waits for the others to join."""
    job = context.current()
    number = job.add_process_set([0, 2])
    if job.rank == leaver:
        handle = job.join()
        context.shutdown()
        with pytest.raises(CollectiveError, match="shut down"):
            handle.wait()
        return
    with pytest.raises(PeerLostError, match=f"rank.* {leaver} .*left"):
        reduce_until_it_fails()
    with pytest.raises(PeerLostError):
        job.barrier(process_set=number) if job.rank != 1 else job.join()


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_joined_rank_that_shuts_down_is_named(leaver: int, rank_pool: Pools) -> None:
    rank_pool(3).run(leave_joined, leaver, init=True)


def come_again() -> list[float]:
    """Sets, one of them with registered memory, are gone after each shutdown; the next job begins at number 1."""
    found = []
    for _ in range(3):
        job = context.init()
        mine = job.add_process_set([0, 2])
        assert job.add_process_set([1]) == mine + 1 == 2
        if job.rank != 1:
            region = job.allocate(1 << 16, name="r", process_set=mine)
            region.array.view(np.float32)[:] = 1.0
            found.append(total(1.0 + job.rank, 50_000, process_set=mine))
        found.append(total(1.0))
        job.barrier().wait()
        context.shutdown()
    return found


def test_init_and_shutdown_with_sets(rank_pool: Pools) -> None:
    assert rank_pool(3).run(come_again, check_leaks=True) == [[4.0, 3.0] * 3, [3.0] * 3, [4.0, 3.0] * 3]


def stand_in_for_large() -> float:
    """What a joined rank stands in for is as large as what the others have, and goes with it."""
    job = context.current()
    found = 0.0
    if job.rank:
        for _ in range(2):
            found = total(1.0, 8_000_000)
    job.join().wait()
    return found


def test_a_joined_rank_takes_part_in_large_allreduces(rank_pool: Pools) -> None:
    assert rank_pool(3).run(stand_in_for_large, init=True) == [0.0, 2.0, 2.0]
