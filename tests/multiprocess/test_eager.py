"""Eager allreduces between real processes: mixed with everything else, and with ranks that die, stop or stay away."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reigen import context
from reigen.errors import CollectiveError, DeadlineError, PeerLostError
from reigen.net.shm_eager import max_eager_bytes
from reigen.testing import RankError, RankPool, run_ranks
from reigen.types import DTYPES, ReduceOp

Pools = Callable[[int], RankPool]
FLOAT = DTYPES["float32"]
#: Elements of what still travels eagerly, and of what does not any more.
SIZES = (1, 100, *(max_eager_bytes(size) // 4 + more for size in (2, 3) for more in (0, 1)))


def num_answers() -> int:
    eager = context.current()._engine._eager
    assert eager is not None
    return eager._slots.count


def allreduce(name: str, value: float = 1.0, count: int = 4) -> float:
    """Sum ``value`` over the ranks in a blocking call; all elements must be the same."""
    x = np.full(count, value, np.float32)
    context.current().allreduce(x, x, FLOAT, op=ReduceOp.SUM, name=name, blocking=True).wait()
    assert (x == x[0]).all()
    return float(x[0])


def play(seed: int) -> int:
    """Blocking calls in one order, and beside them what each rank does in its own way."""
    job = context.current()
    common, own = random.Random(seed), random.Random(1000 * seed + job.rank)
    ranks_sum = job.size * (job.size + 1) / 2
    for step in range(400):
        number = common.randrange(len(SIZES))
        name, count, way = f"x{number}", SIZES[number], own.random()
        if way < 0.1:  # this rank does not wait at once
            x = np.full(count, step * (job.rank + 1), np.float32)
            handle = job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name=name)
            np.ones(own.randrange(10_000)).sum()
            handle.wait()
            assert (x == step * ranks_sum).all()
        elif way < 0.2:  # this rank's other thread submits something meanwhile
            other: list[float] = []
            thread = threading.Thread(target=lambda: other.append(allreduce(f"other {step}", 1.0)))  # noqa: B023
            thread.start()
            assert allreduce(name, step * (job.rank + 1), count) == step * ranks_sum
            job.barrier(name=f"after {step}", blocking=True).wait()
            thread.join()
            assert other == [job.size]
            continue
        else:
            assert allreduce(name, step * (job.rank + 1), count) == step * ranks_sum
        y, waits = np.ones(4, np.float32), own.random() < 0.5
        job.allreduce(y, y, FLOAT, op=ReduceOp.SUM, name=f"other {step}", blocking=waits).wait()
        assert y[0] == job.size
        job.barrier(name=f"after {step}", blocking=True).wait()
    return num_answers()


@pytest.mark.parametrize("size", [2, 3])
def test_blocking_calls_among_others(size: int, rank_pool: Pools) -> None:
    found = rank_pool(size).run(play, 1, init=True)
    assert len(set(found)) == 1, found


def repeat() -> int:
    for step in range(300):
        assert allreduce("x", step) == step * context.current().size
    return num_answers()


def test_calls_that_repeat_themselves_are_answered_eagerly(rank_pool: Pools) -> None:
    first, second = rank_pool(2).run(repeat, init=True)
    assert first == second
    assert first > 0


def lose(victim: int) -> tuple[str, tuple[int, ...]]:
    """One rank dies while the others wait for it in a call that would be answered eagerly."""
    for _ in range(20):
        allreduce("x")
    if context.current().rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        allreduce("x")
    except CollectiveError as error:
        return type(error).__name__, error.ranks
    return "nothing was raised", ()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_is_an_error_that_names_the_rank(victim: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(lose, 3, victim, init=True)
    assert [(f.rank, f.kind) for f in caught.value.failures] == [(victim, "died")]
    assert list(caught.value.results.values()) == [(PeerLostError.__name__, (victim,))] * 2


def stay_away(absent: int, fifo: str) -> tuple[str, tuple[int, ...], float]:
    """One rank comes after the deadline: an error for the other, and the job goes on."""
    for _ in range(20):
        allreduce("x")
    raised, named = "", ()
    if context.current().rank == absent:
        Path(fifo).read_bytes()  # which ends when the other has seen its error
    else:
        try:
            allreduce("x")
        except CollectiveError as error:
            raised, named = type(error).__name__, error.ranks
        Path(fifo).write_bytes(b"")
    return raised, named, allreduce("x")


@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_stays_away_is_named_at_the_deadline(absent: int, tmp_path: Path) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    results = run_ranks(stay_away, 2, absent, fifo, init=True, env={"REIGEN_DEADLINE": "1.5"})
    assert results[absent] == ("", (), 2.0)
    assert results[1 - absent] == (DeadlineError.__name__, (absent,), 2.0)


def leave_at_once() -> float:
    """Rank 0 has gone before the others have read its answer."""
    for _ in range(20):
        allreduce("x")
    found = allreduce("x", 2.0)
    context.shutdown()
    return found


def test_the_last_result_is_everybodys_though_rank_0_leaves_at_once(rank_pool: Pools) -> None:
    assert rank_pool(3).run(leave_at_once, init=True) == [6.0] * 3
