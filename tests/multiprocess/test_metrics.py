"""Metrics of real processes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import reigen
from reigen import context
from reigen.errors import ArgumentError, NotInitializedError
from reigen.testing import RankPool

Pools = Callable[[int], RankPool]


def work() -> dict[str, float]:
    rank = reigen.rank()
    for _ in range(3):
        handles = [reigen.allreduce_async(np.ones(1000, np.float32), name=f"g{number}") for number in range(4)]
        for handle in handles:
            reigen.synchronize(handle)
        context.mark("STEP")
        reigen.report_progress(samples=8 + rank)
    reigen.report_progress(steps=2, goal_steps=100)
    reigen.barrier()
    return reigen.metrics()


@pytest.mark.parametrize("size", [1, 3])
def test_a_rank_knows_what_it_has_done(size: int, rank_pool: Pools) -> None:
    for rank, found in enumerate(rank_pool(size).run(work, init=True)):
        assert found["reigen_steps_total"] == 5
        assert found["reigen_goal_steps"] == 100
        assert found["reigen_samples_total"] == 3 * (8 + rank)
        assert found['reigen_operations_total{operation="allreduce"}'] == 12
        assert found["reigen_ranks"] == size
        moved = found.get('reigen_bytes_total{operation="allreduce",way="shared_memory"}', 0)
        assert moved == (12 * 4000 if size > 1 else 0)
        assert found["reigen_response_cache_hits_total"] == 8
        num_batches, num_fused = found["reigen_batches_total"], found["reigen_fused_operations_total"]
        assert 3 <= num_batches <= 13
        assert 0 <= num_fused <= 12
        assert found['reigen_memory_bytes{kind="resident"}'] > 1 << 20
        assert min(found.values()) >= 0


def misuse() -> None:
    reigen.report_progress(samples=np.int64(3), goal_steps=np.uint8(200))
    assert type(reigen.metrics()["reigen_samples_total"]) is int
    for wrong in (-1, 1 << 60, 0.5, float("nan"), "1"):
        with pytest.raises(ArgumentError, match=r"report_progress\(\) takes"):
            reigen.report_progress(samples=wrong)


def test_progress_is_in_whole_numbers(rank_pool: Pools) -> None:
    rank_pool(1).run(misuse, init=True)


def test_without_a_job_there_are_no_metrics() -> None:
    with pytest.raises(NotInitializedError):
        reigen.metrics()


def registered(nbytes: int) -> list[float]:
    key = 'reigen_memory_bytes{kind="registered"}'
    found = [reigen.metrics()[key]]
    region = context.current().allocate(nbytes, name="memory")
    found.append(reigen.metrics()[key])
    context.current().free(region)
    reigen.barrier()
    found.append(reigen.metrics()[key])
    return found


def test_registered_memory_is_counted_while_it_is_there(rank_pool: Pools) -> None:
    assert rank_pool(3).run(registered, 1 << 20, init=True) == [[0, 1 << 20, 0]] * 3


def bytes_sent() -> list[float]:
    found = []
    for call in (reigen.allreduce, reigen.broadcast):
        arguments = {"op": reigen.Sum} if call is reigen.allreduce else {"root_rank": 0}
        call(np.ones(1000, np.float32), name="x", **arguments)
        reigen.barrier()
        found.append(reigen.metrics().get(f'reigen_bytes_total{{operation="{call.__name__}",way="network"}}', 0))
    return found


def test_bytes_between_hosts_are_those_that_were_sent(rank_pool: Pools) -> None:
    """Of two ranks each sends half of the other's sum and half of the result; the root sends all, the other nothing."""
    sent = rank_pool(2).run(bytes_sent, init=True, env={"REIGEN_PLANE": "tcp"})
    assert sent == [[4000, 4000], [4000, 0]]
