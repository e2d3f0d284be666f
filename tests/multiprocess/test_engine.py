"""The engine between real processes: every collective, any order, any thread; errors that leave the job working."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from reigen import context
from reigen.engine.operation_builders import build_allgather, build_reducescatter
from reigen.errors import ArgumentError, DuplicateNameError, MismatchError, SharedMemoryError
from reigen.testing import RankPool
from reigen.types import DTYPES, DType, ReduceOp

Pools = Callable[[int], RankPool]
FLOAT, INT = DTYPES["float32"], DTYPES["int64"]
NATIVE = [name for name in DTYPES if name != "bfloat16"]


def data(dtype: DType, rank: int, *shape: int) -> np.ndarray[Any, Any]:
    """Small whole numbers, exact in every type; for bool, either."""
    values = np.random.default_rng([rank, *shape]).integers(0, 3, shape)
    return np.ascontiguousarray(values.astype(dtype.storage))


def total(arrays: list[np.ndarray[Any, Any]], dtype: DType) -> np.ndarray[Any, Any]:
    if dtype.name == "bool":
        return np.logical_or.reduce(arrays)
    return np.sum(arrays, axis=0).astype(dtype.storage)


def every_collective() -> None:
    job = context.current()
    n, rank = job.size, job.rank
    for name in NATIVE:
        dtype = DTYPES[name]
        handles = {}
        for shape in ((), (0,), (1,), (7, 3), (300, 200)):
            mine = [data(dtype, r, *shape) for r in range(n)]
            out = np.empty_like(mine[rank])
            handle = job.allreduce(mine[rank], out, dtype, op=ReduceOp.SUM, name=f"sum{shape}")
            handles[f"sum{shape}"] = handle, total(mine, dtype)
            copy = np.empty_like(out)
            root = len(shape) % n
            handles[f"root{shape}"] = (
                job.broadcast(mine[rank], copy, dtype, root_rank=root, name=f"b{shape}"),
                mine[root],
            )
        for rows in (0, 1, 5, 40_000):
            # rank r gathers r * rows rows: the first one none
            pieces = [data(dtype, r, r * rows, 2) for r in range(n)]
            handles[f"gather{rows}"] = job.allgather(pieces[rank], dtype, name=f"g{rows}"), np.concatenate(pieces)
            full = [data(dtype, r, rows, 3) for r in range(n)]
            begin = sum(rows // n + (r < rows % n) for r in range(rank))
            end = begin + rows // n + (rank < rows % n)
            scattered = job.reducescatter(full[rank], dtype, op=ReduceOp.SUM, name=f"s{rows}")
            handles[f"scatter{rows}"] = scattered, total(full, dtype)[begin:end]
        # rank r sends r * j rows to rank j, and keeps two more to itself
        sent = [data(dtype, r, r * sum(range(n)) + 2, 2) for r in range(n)]
        exchanged = job.alltoall(sent[rank], dtype, splits=[rank * j for j in range(n)], name="x")
        starts = [r * sum(range(rank)) for r in range(n)]
        parts = [sent[r][starts[r] : starts[r] + r * rank] for r in range(n)]
        handles["exchange"] = exchanged, np.concatenate(parts)
        for what, (handle, expected) in handles.items():
            outcome = handle.wait()
            assert outcome.array is not None
            np.testing.assert_array_equal(outcome.array, expected, f"{name} {what}")
            assert outcome.array.shape == expected.shape
        assert handles["exchange"][0].wait().received_splits == tuple(r * rank for r in range(n))
        job.barrier().wait()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_with_every_type_and_uneven_sizes(size: int, rank_pool: Pools) -> None:
    rank_pool(size).run(every_collective, init=True)


def bfloat16_sum() -> list[int]:
    x = np.array([0x3F80, 0x4000, 0x4040], np.uint16)  # 1, 2, 3
    context.current().allreduce(x, x, DTYPES["bfloat16"], op=ReduceOp.SUM).wait()
    return x.tolist()


def test_bfloat16_is_not_taken_for_integers(rank_pool: Pools) -> None:
    assert rank_pool(2).run(bfloat16_sum, init=True) == [[0x4000, 0x4080, 0x40C0]] * 2  # 2, 4, 6


def operators() -> None:
    job = context.current()
    mine = [data(FLOAT, r, 1000) + r for r in range(job.size)]
    for op, truth in (
        (ReduceOp.AVERAGE, np.mean(mine, axis=0, dtype=np.float64)),
        (ReduceOp.MIN, np.min(mine, axis=0)),
        (ReduceOp.MAX, np.max(mine, axis=0)),
        (ReduceOp.PRODUCT, np.prod(mine, axis=0)),
    ):
        out = np.empty_like(mine[0])
        job.allreduce(mine[job.rank], out, FLOAT, op=op, name=op.name).wait()
        np.testing.assert_allclose(out, truth, rtol=1e-6)
    out = np.empty_like(mine[0])
    job.allreduce(mine[job.rank], out, FLOAT, op=ReduceOp.SUM, prescale=0.5, postscale=4.0).wait()
    np.testing.assert_allclose(out, 2 * np.sum(mine, axis=0), rtol=1e-6)


def test_operators_and_factors(rank_pool: Pools) -> None:
    rank_pool(3).run(operators, init=True)


def shuffled(steps: int) -> None:
    job = context.current()
    rng = np.random.default_rng(job.rank)
    for step in range(steps):
        arrays = [np.full(1 + 500 * i, i + job.rank, np.float32) for i in range(20)]
        handles = {}
        for i in rng.permutation(20):
            handles[i] = job.allreduce(arrays[i], arrays[i], FLOAT, op=ReduceOp.SUM, name=f"t{i}")
        for i in rng.permutation(20):
            handles[i].wait()
            assert (arrays[i] == job.size * i + sum(range(job.size))).all(), (step, i)


@pytest.mark.parametrize("cache", ["0", "3", "1024"])
@pytest.mark.parametrize("fusion", ["0", "4000", "1000000000"])
def test_any_order_on_each_rank(cache: str, fusion: str, rank_pool: Pools) -> None:
    env = {"REIGEN_CACHE_CAPACITY": cache, "REIGEN_FUSION_THRESHOLD": fusion}
    rank_pool(3).run(shuffled, 5, init=True, env=env)


def many_at_once() -> None:
    """More announcements at once than the control channel's ring holds."""
    job = context.current()
    arrays = [np.full(3, i, np.int64) for i in range(1000)]  # with names of 360 bytes: 1.4 times the ring
    handles = [
        job.broadcast(a, a, INT, root_rank=i % job.size, name=f"{i}-{'parameter' * 40}") for i, a in enumerate(arrays)
    ]
    for i, handle in enumerate(handles):
        handle.wait()
        assert (arrays[i] == i).all()


def test_more_than_the_control_channel_holds(rank_pool: Pools) -> None:
    rank_pool(2).run(many_at_once, init=True)


def threads(blocking: bool) -> None:
    job = context.current()
    failures: list[BaseException] = []

    def work(k: int) -> None:
        try:
            for step in range(30):
                x = np.full(100 * (k + 1), job.rank + k, np.float32)
                job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name=f"thread{k}", blocking=blocking).wait()
                assert (x == job.size * k + sum(range(job.size))).all(), step
        except BaseException as error:  # noqa: BLE001  told to the test below
            failures.append(error)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for worker in workers[:: 1 if job.rank else -1]:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures, failures


@pytest.mark.parametrize("blocking", [False, True])
def test_submission_from_many_threads(blocking: bool, rank_pool: Pools) -> None:
    rank_pool(2).run(threads, blocking, init=True)


def waited_by_another() -> None:
    job = context.current()
    x = np.full(4, 1.0, np.float32)
    handle = job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="x")
    seen: list[bool] = []
    waiters = [threading.Thread(target=lambda: seen.append(handle.wait().array is x)) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    while not handle.poll():
        pass
    for waiter in waiters:
        waiter.join()
    assert seen == [True] * 4
    assert handle.wait().array is x


def test_a_handle_is_polled_and_waited_for_by_any_thread_any_number_of_times(rank_pool: Pools) -> None:
    rank_pool(2).run(waited_by_another, init=True)


def mismatch() -> list[str]:
    job = context.current()
    told = []
    x = np.ones(4 + job.rank, np.float32)
    other = job.barrier(name="other")
    for _ in range(2):
        with pytest.raises(MismatchError) as caught:
            job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="x").wait()
        assert (caught.value.tensor, caught.value.ranks) == ("x", tuple(range(job.size)))
        told.append(str(caught.value))
    other.wait()
    y = np.ones(3, np.float32)
    job.allreduce(y, y, FLOAT, op=ReduceOp.SUM, name="x").wait()
    assert (y == job.size).all()
    return told


def test_a_mismatch_is_told_to_all_with_a_line_for_each_rank_and_the_job_goes_on(rank_pool: Pools) -> None:
    text = "x: the shapes differ between ranks\n  rank 0: [4]\n  rank 1: [5]\n  rank 2: [6]"
    assert rank_pool(3).run(mismatch, init=True) == [[text, text]] * 3


def local_errors() -> None:
    job = context.current()
    x = np.ones(4, np.float32)
    if job.rank == 0:
        first = job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="x")
        with pytest.raises(DuplicateNameError, match="'x'"):
            job.broadcast(x, x, FLOAT, root_rank=0, name="x")
    job.barrier(name="rank 1 has not come to x before that").wait()
    # a wrong argument sends nothing, and takes no number of the unnamed operations
    if job.rank == 1:
        for wrong in (
            lambda: job.broadcast(x, x, FLOAT, root_rank=job.size),
            lambda: job.alltoall(x, FLOAT, splits=[5] * job.size),
            lambda: job.allgather(x[0], FLOAT),
            lambda: job.barrier(name="n" * 513),
            lambda: job.reducescatter(x, FLOAT, op=ReduceOp.ADASUM),
            lambda: job.grouped_allreduce([], [], []),
            lambda: job.start_group(build_allgather, [x, x[0]], [FLOAT, FLOAT]),
            lambda: job.start_group(build_reducescatter, [x[0]], [FLOAT], (ReduceOp.AVERAGE, 1.0, 1.0)),
            lambda: job.barrier(process_set=1),
        ):
            with pytest.raises(ArgumentError):
                wrong()
        first = job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="x")
    job.barrier().wait()
    job.start_group(build_allgather, [x], [FLOAT]).wait()
    first.wait()
    assert (x == 2).all()


def test_local_errors_are_local(rank_pool: Pools) -> None:
    rank_pool(2).run(local_errors, init=True, env={"REIGEN_DEADLINE": "20"})


def regions() -> None:
    """The heap grows, is used in place, given back and used again."""
    job = context.current()
    for step in range(3):
        held = [job.allocate(nbytes, name=f"r{nbytes}") for nbytes in (1, 4096, 1 << 20, 9_999_999)]
        assert len({region.offset for region in held}) == 4
        for region in held[1:]:
            view = region.array[: region.nbytes // 8 * 8].view(np.int64)
            view[:] = np.arange(view.size) + job.rank
            name = f"in{region.nbytes}"
            job.allreduce(view, view, INT, op=ReduceOp.SUM, name=name, region=region).wait()
            expected = job.size * np.arange(view.size) + sum(range(job.size))
            np.testing.assert_array_equal(view, expected, f"{step}")
        order = held if job.rank else held[::-1]
        for region in order:
            job.free(region)
    job.barrier().wait()


def test_registered_memory_grows_and_is_used_again(rank_pool: Pools) -> None:
    rank_pool(3).run(regions, init=True)


def short_of_memory(poor: int) -> str:
    job = context.current()
    if job.rank == poor:
        from reigen.resources import memory

        memory.available_memory = lambda: memory.AvailableMemory(100 << 20)
    with pytest.raises(SharedMemoryError) as caught:
        job.allocate(200 << 20, name="big")
    small = job.allocate(1 << 20, name="small")
    view = small.array.view(np.float32)
    view[:] = 1
    job.allreduce(view, view, FLOAT, op=ReduceOp.SUM, name="small in place", region=small).wait()
    assert (view == job.size).all()
    if job.rank == poor:
        assert caught.value.needed_bytes == job.size * (200 << 20)
        assert caught.value.available_bytes == 100 << 20
    return str(caught.value)


@pytest.mark.parametrize("poor", [0, 1])
def test_shortage_on_one_rank_is_raised_on_all_and_the_job_goes_on(poor: int) -> None:
    with RankPool(2) as pool:
        texts = pool.run(short_of_memory, poor, init=True)
    assert "400.0 MiB needed on this host, 100.0 MiB available, less 16.0 MiB that are kept free" in texts[poor]
    assert all("registered memory" in text for text in texts)


def crowd() -> None:
    job = context.current()
    for step in range(10):
        x = np.full(50_000, job.rank + step, np.float32)
        job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="x").wait()
        assert (x == job.size * step + sum(range(job.size))).all()


def test_more_ranks_than_cores(rank_pool: Pools) -> None:
    rank_pool(8).run(crowd, init=True)
