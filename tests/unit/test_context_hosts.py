"""Jobs on several hosts, whose ranks are threads: every collective, process sets, registered memory, ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from reigen.context import Context
from reigen.errors import CollectiveError, PeerLostError
from reigen.types import DTYPES, ReduceOp
from tests.unit.engine.jobs import across

FLOAT = DTYPES["float32"]
LAYOUTS = [((0,), (1,)), ((0, 1), (2,)), ((0, 2), (1, 3)), ((0,), (1,), (2,))]


def of(rank: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.arange(count, dtype=np.float32) % 31 + rank


@pytest.mark.parametrize("machines", LAYOUTS, ids=str)
def test_every_collective(machines: Sequence[Sequence[int]]) -> None:
    size = sum(map(len, machines))

    def act(job: Context) -> None:
        for count in (1, 1000, 300_000):
            x = of(job.rank, count)
            job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name=f"sum {count}", blocking=True).wait()
            assert np.array_equal(x, sum(of(r, count) for r in range(size)))
        y = of(job.rank, 7)
        job.broadcast(y, y, FLOAT, root_rank=size - 1).wait()
        assert np.array_equal(y, of(size - 1, 7))
        gathered = job.allgather(of(job.rank, job.rank + 1), FLOAT).wait().array
        assert np.array_equal(gathered, np.concatenate([of(r, r + 1) for r in range(size)]))
        outcome = job.alltoall(np.full(size, job.rank, np.float32), FLOAT).wait()
        assert np.array_equal(outcome.array, np.arange(size))
        part = job.reducescatter(of(job.rank, 2 * size), FLOAT, op=ReduceOp.SUM).wait().array
        whole = sum(of(r, 2 * size) for r in range(size))
        assert np.array_equal(part, whole[2 * job.rank : 2 * job.rank + 2])
        job.barrier(blocking=True).wait()

    across(machines, act)


@pytest.mark.parametrize("machines", LAYOUTS, ids=str)
def test_many_at_once_in_different_orders(machines: Sequence[Sequence[int]]) -> None:
    size, names = sum(map(len, machines)), [f"t{number}" for number in range(60)]

    def act(job: Context) -> None:
        mine = np.random.default_rng(job.rank).permutation(names)
        arrays = {name: of(job.rank, 1 + 97 * index) for index, name in enumerate(names)}
        handles = [job.allreduce(arrays[n], arrays[n], FLOAT, op=ReduceOp.SUM, name=str(n)) for n in mine]
        for handle in handles:
            handle.wait()
        for index, name in enumerate(names):
            assert np.array_equal(arrays[name], sum(of(r, 1 + 97 * index) for r in range(size)))

    across(machines, act)


@pytest.mark.parametrize("machines", LAYOUTS, ids=str)
def test_registered_memory(machines: Sequence[Sequence[int]]) -> None:
    size = sum(map(len, machines))

    def act(job: Context) -> None:
        regions = [job.allocate(4 * count, name=f"bucket {count}") for count in (10, 200_000)]
        for step in range(3):
            for region in regions:
                view = region.array.view(np.float32)
                view[:] = of(job.rank, view.size) + step
                job.allreduce(view, view, FLOAT, op=ReduceOp.AVERAGE, name=f"{view.size}", region=region).wait()
                expected = sum(of(r, view.size) + step for r in range(size)) / size
                assert np.allclose(view, expected, rtol=1e-6)
        for region in regions:
            job.free(region)
        job.barrier().wait()

    across(machines, act)


def test_process_sets_within_and_across_hosts() -> None:
    def act(job: Context) -> None:
        for ranks in ((0, 1), (1, 2), (0, 2, 3), (3,)):
            number = job.add_process_set(ranks)
            if job.rank in ranks:
                x = of(job.rank, 5000)
                job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, process_set=number).wait()
                assert np.array_equal(x, sum(of(r, 5000) for r in ranks))
            job.remove_process_set(number)

    across([(0, 1), (2, 3)], act)


@pytest.mark.parametrize("machines", LAYOUTS, ids=str)
def test_who_leaves_is_named_to_those_who_wait(machines: Sequence[Sequence[int]]) -> None:
    last = sum(map(len, machines)) - 1

    def act(job: Context) -> None:
        x = of(job.rank, 10)
        job.allreduce(x, x, FLOAT, name="all").wait()
        if job.rank == last:
            job.close()
            return
        with pytest.raises(CollectiveError, match=rf"rank(\(s\))? {last}\b.* left the job") as caught:
            job.allreduce(x, x, FLOAT, name="all but one").wait()
        assert isinstance(caught.value, PeerLostError)
        assert caught.value.ranks == (last,)

    across(machines, act)


def test_one_backend_for_all_ranks_of_one_host() -> None:
    def act(job: Context) -> tuple[str, str]:
        x = of(job.rank, 100_000)
        job.allreduce(x, x, FLOAT, op=ReduceOp.SUM).wait()
        assert np.array_equal(x, sum(of(r, 100_000) for r in range(3)))
        return job.backend, job.backend_reason

    assert set(across([(0, 1, 2)], act, backend="tcp")) == {
        ("tcp", "REIGEN_PLANE=tcp: even between the 3 ranks of one host")
    }
