"""`import reigen`: the collectives on NumPy arrays, in real ranks."""

from __future__ import annotations

import numpy as np
import pytest

import reigen as hvd


def arrays() -> None:
    rank, n = hvd.rank(), hvd.size()
    total = n * (n + 1) // 2
    table = np.arange(12.0).reshape(3, 4) * (rank + 1)
    whole = np.arange(12.0).reshape(3, 4) * total
    for x, truth in ((table, whole), (table.T, whole.T), (table[:, ::2], whole[:, ::2]), (table.tolist(), whole)):
        assert np.array_equal(hvd.allreduce(x, op=hvd.Sum), truth)
        assert np.array_equal(hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)), truth)
    assert hvd.allreduce(np.int64(rank + 1), op=hvd.Max) == n
    assert np.allclose(hvd.allreduce(table, prescale_factor=0.5), whole / n / 2)
    view = table.copy()[:, ::2]
    assert hvd.allreduce_(view, op=hvd.Sum) is view
    assert np.array_equal(view, whole[:, ::2])
    target = np.full((2, 2), rank)
    assert hvd.synchronize(hvd.allreduce_async_(target, op=hvd.Sum)) is target
    assert (target == sum(range(n))).all()

    assert hvd.allgather([rank] * (rank + 1)).tolist() == [r for r in range(n) for _ in range(r + 1)]
    assert hvd.synchronize(hvd.allgather_async(rank)).tolist() == list(range(n))
    assert hvd.broadcast([rank, 1], n - 1).tolist() == [n - 1, 1]
    target = np.array([rank])
    assert hvd.broadcast_(target, 0) is target
    assert hvd.synchronize(hvd.broadcast_async_(target, n - 1)).tolist() == [0]
    assert hvd.synchronize(hvd.broadcast_async(rank, n - 1)) == n - 1
    output, received = hvd.alltoall(np.arange(n), np.ones(n, np.int32))
    assert (output.tolist(), received.tolist(), received.dtype) == ([rank] * n, [1] * n, np.int32)
    assert hvd.alltoall(np.arange(n)).tolist() == [rank] * n
    output, received = hvd.synchronize(hvd.alltoall_async(np.arange(n)))
    assert received.tolist() == [1] * n
    assert hvd.reducescatter(np.arange(n), op=hvd.Sum).tolist() == [rank * n]
    assert hvd.synchronize(hvd.reducescatter_async(np.arange(n))).tolist() == [rank]
    assert hvd.broadcast_object({"from": rank}, n - 1) == {"from": n - 1}
    assert hvd.allgather_object([rank] * rank) == [[r] * r for r in range(n)]
    hvd.barrier()


def groups() -> None:
    rank, n = hvd.rank(), hvd.size()
    group = [np.full(3, rank), [0.5 * rank], np.float32(rank)]
    for results in (
        hvd.grouped_allreduce(group, op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(group, op=hvd.Sum)),
    ):
        assert [each.tolist() for each in results] == [[n * (n - 1) // 2] * 3, [n * (n - 1) / 4], n * (n - 1) / 2]
    own = [np.ones(2), np.ones(1)]
    assert hvd.grouped_allreduce_(own, op=hvd.Sum)[0] is own[0]
    assert hvd.synchronize(hvd.grouped_allreduce_async_(own))[1] is own[1]
    assert own[1].tolist() == [n]
    gathered = hvd.grouped_allgather([rank, [rank, 1]])
    assert [each.tolist() for each in gathered] == [list(range(n)), [each for r in range(n) for each in (r, 1)]]
    assert len(hvd.synchronize(hvd.grouped_allgather_async([rank]))[0]) == n
    assert [each.tolist() for each in hvd.grouped_reducescatter([np.ones(n), np.ones(n + 1)], op=hvd.Sum)] == [
        [n],
        [n] * (2 if rank == 0 else 1),
    ]
    assert hvd.synchronize(hvd.grouped_reducescatter_async([np.ones(n)]))[0].tolist() == [1.0]


def sets_and_join() -> None:
    rank = hvd.rank()
    both = [hvd.add_process_set([0]), hvd.add_process_set(hvd.ProcessSet([1]))]
    assert hvd.allreduce(rank + 1, op=hvd.Sum, process_set=both[rank]) == rank + 1
    assert hvd.grouped_allgather([rank], process_set=both[rank])[0].tolist() == [rank]
    assert hvd.alltoall([7], [1], process_set=both[rank])[1].tolist() == [1]
    with pytest.raises(ValueError, match="is not in process set"):
        hvd.barrier(process_set=both[1 - rank])
    hvd.barrier(process_set=both[rank])
    assert hvd.remove_process_set(both[0])
    assert hvd.allreduce(1, op=hvd.Sum, process_set=hvd.global_process_set) == 2
    if rank == 0:
        assert hvd.allreduce([4.0]).tolist() == [2.0]
    assert hvd.join() == 0  # rank 0 had more


def wrong() -> None:
    fixed = np.ones(2)
    fixed.flags.writeable = False
    for message, call in {
        "may be written": lambda: hvd.allreduce_(fixed),
        "needs a NumPy array": lambda: hvd.broadcast_([1.0], 0),
        r"complex128 is not supported\. Supported: bool, float16, .*uint8\.$": lambda: hvd.allreduce([1j]),
        "supported": lambda: hvd.allgather(["text"]),
        ">f8": lambda: hvd.grouped_allreduce([np.ones(2, ">f8")]),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert hvd.allreduce(1, op=hvd.Sum) == hvd.size()


@pytest.mark.parametrize("func", [arrays, groups, wrong])
@pytest.mark.parametrize("size", [1, 2])
def test_arrays(rank_pool, size, func):
    rank_pool(size).run(func, init=True)


def test_sets_and_join(rank_pool):
    rank_pool(2).run(sets_and_join, init=True, env={"REIGEN_DYNAMIC_PROCESS_SETS": "1"})
