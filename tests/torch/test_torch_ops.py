"""Collectives on torch tensors, in real ranks, against closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import reigen.torch as hvd
from reigen.testing import RankError

DTYPES = ["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]


def tensor(dtype: str, rank: int, shape: tuple[int, ...] = (3, 4)) -> torch.Tensor:
    """Small whole numbers, so that every dtype holds them and their sums exactly."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape) % 7 + rank
    return torch.tensor(numbers).to(getattr(torch, dtype))


def as_floats(value: torch.Tensor) -> np.ndarray:
    return value.to(torch.float64).numpy()


# -- values -----------------------------------------------------------------------------------------------------------


def every_dtype_and_op() -> None:
    n = hvd.size()
    for dtype in DTYPES:
        mine = tensor(dtype, hvd.rank())
        everyone = np.stack([as_floats(tensor(dtype, r)) for r in range(n)])
        truth = {hvd.Min: everyone.min(0), hvd.Max: everyone.max(0)}
        if dtype != "bool":
            truth |= {
                hvd.Sum: everyone.sum(0),
                hvd.Product: everyone.prod(0),
                hvd.Average: everyone.mean(0) if dtype in FLOATS else np.trunc(everyone.mean(0)),
            }
        for op, expected in truth.items():
            result = hvd.allreduce(mine, op=op, name=f"{dtype}.{op}")
            assert result.dtype == mine.dtype
            assert result.shape == mine.shape
            assert np.array_equal(as_floats(result), expected), (dtype, op, result, expected)


def every_dtype_moves() -> None:
    rank, n = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        mine = tensor(dtype, rank, (n, 2))
        everyone = [tensor(dtype, r, (n, 2)) for r in range(n)]
        assert torch.equal(hvd.broadcast(mine, n - 1), everyone[-1])
        assert torch.equal(hvd.allgather(mine), torch.cat(everyone))
        assert torch.equal(hvd.alltoall(mine), torch.cat([other[rank : rank + 1] for other in everyone]))


@pytest.mark.parametrize("func", [every_dtype_and_op, every_dtype_moves])
@pytest.mark.parametrize("size", [1, 2])
def test_every_dtype(rank_pool, size, func):
    rank_pool(size).run(func, init=True)


def scales() -> None:
    x = torch.tensor([1.0, -3.0]) * (hvd.rank() + 1)
    total = sum(range(1, hvd.size() + 1))
    expected = torch.tensor([1.0, -3.0]) * total * 0.5 * 4
    assert torch.equal(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), expected)
    assert torch.equal(hvd.allreduce_(x.clone(), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), expected)
    assert torch.equal(hvd.allreduce(x), torch.tensor([1.0, -3.0]) * total / hvd.size())  # Average by default


def shapes_and_layouts() -> None:
    rank, n = hvd.rank(), hvd.size()
    total = sum(range(1, n + 1))
    scalar = torch.tensor(float(rank + 1))
    assert hvd.allreduce(scalar, op=hvd.Sum).shape == ()
    assert hvd.allreduce_(scalar, op=hvd.Sum).item() == total
    assert scalar.item() == total
    assert hvd.allgather(torch.tensor(rank)).tolist() == list(range(n))
    assert hvd.allreduce(torch.empty(0, 3)).shape == (0, 3)
    assert hvd.broadcast(torch.empty(0), 0).shape == (0,)
    assert hvd.allgather(torch.empty(0, 3)).shape == (0, 3)

    image = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    channels_last = (image * (rank + 1)).to(memory_format=torch.channels_last)
    assert torch.equal(hvd.allreduce(channels_last, op=hvd.Sum), image * total)
    base = torch.zeros(4, 6)
    base[:, ::2] = float(rank + 1)
    view = base[:, ::2]
    assert hvd.allreduce_(view, op=hvd.Sum) is view
    assert torch.equal(base, torch.tensor([total, 0.0] * 3).repeat(4, 1))  # written through the view, and nothing else
    transposed = torch.full((2, 3), float(rank)).t()
    hvd.broadcast_(transposed, n - 1)
    assert torch.equal(transposed, torch.full((3, 2), float(n - 1)))
    assert torch.equal(hvd.allreduce((image * 1j).imag.conj(), op=hvd.Max), image)


def uneven() -> None:
    rank, n = hvd.rank(), hvd.size()
    gathered = hvd.allgather(torch.full((rank + 1, 2), rank))
    assert gathered.tolist() == [[r, r] for r in range(n) for _ in range(r + 1)]
    # rank r sends i + 1 rows of value 10 r + i to rank i, and keeps one row back
    rows = [10 * rank + i for i in range(n) for _ in range(i + 1)]
    splits = [i + 1 for i in range(n)]
    for given in (splits, torch.tensor(splits, dtype=torch.int32)):
        output, received = hvd.alltoall(torch.tensor([*rows, -1]), given)
        assert output.tolist() == [10 * r + rank for r in range(n) for _ in range(rank + 1)]
        assert received.dtype == torch.int32
        assert received.tolist() == [rank + 1] * n
    output, received = hvd.synchronize(hvd.alltoall_async(torch.arange(2 * n)))  # always a pair
    assert output.tolist() == [2 * rank, 2 * rank + 1] * n
    assert received.tolist() == [2] * n
    table = torch.arange(5.0 * 2).reshape(5, 2)
    mine = np.array_split(table.numpy(), n)[rank]  # the first 5 % n ranks get one row more
    assert hvd.reducescatter(table * (rank + 1), op=hvd.Sum).tolist() == (mine * sum(range(1, n + 1))).tolist()
    assert hvd.reducescatter(table).tolist() == mine.tolist()


def asynchronous() -> None:
    rank, n = hvd.rank(), hvd.size()
    names = [f"t{i}" for i in range(20)]
    order = names if rank == 0 else names[::-1]  # named ones in any order
    handles = {name: hvd.allreduce_async(torch.full((3,), float(name[1:])), name=name, op=hvd.Sum) for name in order}
    for name in names:
        result = hvd.synchronize(handles[name])
        assert result.tolist() == [float(name[1:]) * n] * 3
        assert hvd.poll(handles[name])
        assert hvd.synchronize(handles[name]) is None  # handed out once
    target = torch.full((2,), float(rank))
    handle = hvd.broadcast_async_(target, n - 1)
    assert hvd.synchronize(handle) is target
    assert target.tolist() == [n - 1.0] * 2
    assert hvd.synchronize(hvd.broadcast_async(torch.tensor([rank]), 0)).tolist() == [0]
    assert hvd.synchronize(hvd.allgather_async(torch.tensor([rank]))).tolist() == list(range(n))
    assert hvd.synchronize(hvd.reducescatter_async(torch.ones(n), op=hvd.Sum)).tolist() == [float(n)]
    in_place = torch.ones(2)
    assert hvd.synchronize(hvd.allreduce_async_(in_place, op=hvd.Sum)) is in_place
    assert in_place.tolist() == [float(n)] * 2
    assert hvd.synchronize(12345) is None
    hvd.barrier()


def compressed() -> None:
    x = torch.tensor([1.0, 2.5, 1 + 2**-12]) * (hvd.rank() + 1)
    n = hvd.size()
    for compression, wire in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        everyone = [(x / (hvd.rank() + 1) * (r + 1)).to(wire).double() for r in range(n)]
        expected = torch.stack(everyone).sum(0).to(wire).float()
        result = hvd.allreduce(x, compression=compression, op=hvd.Sum)
        assert result.dtype == torch.float32
        assert torch.equal(result, expected)
    counts = torch.tensor([2**20 + 1])
    assert torch.equal(hvd.allreduce(counts, compression=hvd.Compression.fp16, op=hvd.Max), counts)


def places() -> tuple[int, ...]:
    return (
        hvd.rank(),
        hvd.size(),
        hvd.local_rank(),
        hvd.local_size(),
        hvd.cross_rank(),
        hvd.cross_size(),
        hvd.is_initialized(),
    )


@pytest.mark.parametrize("func", [scales, shapes_and_layouts, uneven, asynchronous, compressed])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_collectives(rank_pool, size, func):
    rank_pool(size).run(func, init=True)


def test_places(rank_pool):
    assert rank_pool(2).run(places, init=True) == [(0, 2, 0, 2, 0, 1, True), (1, 2, 1, 2, 0, 1, True)]


# -- gradients --------------------------------------------------------------------------------------------------------


def gradients() -> None:
    """The rules of the specification, written out for these weights."""
    rank, n = hvd.rank(), hvd.size()
    mean, total = (n + 1) / 2, n * (n + 1) / 2  # of rank + 1
    weight = float(rank + 1)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, requires_grad=True)

    x = leaf(3)
    (hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0) * weight).sum().backward()
    assert x.grad.tolist() == [2 * total] * 3
    x = leaf(3)
    (hvd.allreduce(x, compression=hvd.Compression.fp16) * weight).sum().backward()
    assert x.grad.tolist() == [mean] * 3
    x = leaf(rank + 1, 2)
    gathered = hvd.allgather(x)
    rows = torch.arange(1.0, gathered.shape[0] + 1).unsqueeze(1)
    (gathered * rows * weight).sum().backward()
    begin = rank * (rank + 1) // 2
    assert x.grad.tolist() == [[(begin + i + 1) * mean] * 2 for i in range(rank + 1)]
    x = torch.tensor(1.0, requires_grad=True)
    (hvd.allgather(x) * weight).sum().backward()
    assert x.grad.item() == mean
    x = leaf(2)
    (hvd.broadcast(x, n - 1) * weight).sum().backward()
    assert x.grad.tolist() == [mean if rank == n - 1 else 0.0] * 2
    x = leaf(n + 1)  # the last row is sent to nobody
    (hvd.alltoall(x, [1] * n)[0] * weight).sum().backward()
    assert x.grad.tolist() == [*range(1, n + 1), 0]
    x = leaf(n)
    (hvd.alltoall(x) * weight).sum().backward()
    assert x.grad.tolist() == [*range(1, n + 1)]
    for op, factor in ((hvd.Average, 1), (hvd.Sum, n)):
        x = leaf(n)
        (hvd.reducescatter(x, op=op, postscale_factor=0.5) * weight).sum().backward()
        assert x.grad.tolist() == [0.5 * factor * (r + 1) for r in range(n)]
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
    with pytest.raises(ValueError, match=r"no gradient; detach\(\) its input"):
        hvd.allreduce(leaf(2), op=hvd.Max).sum().backward()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients(rank_pool, size):
    rank_pool(size).run(gradients, init=True)


def gradients_of_gradients() -> None:
    """The squared result of a sum over n ranks: 2 n y is its gradient, which depends on x through two more sums."""
    n = hvd.size()
    for reduce, factor in (
        (lambda x: hvd.allreduce(x, op=hvd.Sum), n),
        (lambda x: hvd.grouped_allreduce([x], op=hvd.Sum, name="group")[0], n),
        (hvd.allreduce, 1),
        (hvd.alltoall, 1),
    ):
        x = torch.arange(1.0, n + 1, requires_grad=True)
        y = reduce(x)
        (first,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        assert first.tolist() == (2 * factor * (x * factor if reduce is not hvd.alltoall else x)).tolist()
        (second,) = torch.autograd.grad(first.sum(), x)
        assert second.tolist() == [2.0 * factor * factor] * n


def gradients_of_broadcast_gradients() -> None:
    """The root's gradient of sum(y**3) is the average of 3 y**2; averaged again, its own is 6 y / n."""
    n, root = hvd.size(), hvd.size() - 1
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    for name in ("cubes", None):
        (first,) = torch.autograd.grad((hvd.broadcast(x, root, name=name) ** 3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        is_root = float(hvd.rank() == root)
        assert first.tolist() == [3.0 * is_root, 12.0 * is_root]
        assert second.tolist() == [6.0 / n * is_root, 12.0 / n * is_root]
        assert hvd.allreduce(torch.tensor([5.0])).tolist() == [5.0]  # the ranks' calls still match
    (first,) = torch.autograd.grad((hvd.broadcast(x, root) * math.inf).sum(), x)
    assert first.tolist() == [math.inf if hvd.rank() == root else 0.0] * 2


@pytest.mark.parametrize("func", [gradients_of_gradients, gradients_of_broadcast_gradients])
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_gradients(rank_pool, size, func):
    rank_pool(size).run(func, init=True)


def overwritten() -> None:
    weight = torch.ones(2, requires_grad=True)
    value = weight * 2
    loss = (value * value).sum()
    hvd.allreduce_(value.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_notices_what_was_overwritten(rank_pool):
    rank_pool(1).run(overwritten, init=True)


# -- wrong arguments --------------------------------------------------------------------------------------------------


def wrong_arguments() -> None:
    x, n = torch.ones(2 * hvd.size()), hvd.size()
    wrong = {
        "op parameter supersedes average": lambda: hvd.allreduce(x, average=True, op=hvd.Sum),
        "op must be": lambda: hvd.allreduce(x, op=17),
        "no reducescatter": lambda: hvd.reducescatter(x, op=hvd.Adasum),
        "process_set": lambda: hvd.allreduce(x, process_set=None),
        "complex64 is not supported": lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64)),
        "to_dense": lambda: hvd.allreduce(torch.ones(2, 2).to_sparse()),
        "torch.Tensor is needed": lambda: hvd.allreduce([1.0]),
        "must be one of the ranks": lambda: hvd.broadcast(x, n),
        "must be a rank": lambda: hvd.broadcast_(x, "0"),
        "divided equally": lambda: hvd.alltoall(torch.ones(n + 1)),
        f"splits must be {n} numbers": lambda: hvd.alltoall(x, [1] * (n + 1)),
        "add up to at most": lambda: hvd.alltoall(x, [2 * n + 1] * n),
        "int32": lambda: hvd.alltoall(x, torch.ones(n, dtype=torch.int64)),
        "at least one dimension, got a scalar": lambda: hvd.reducescatter(torch.tensor(1.0)),
        "alltoall needs": lambda: hvd.alltoall(torch.tensor(1.0)),
    }
    if n == 1:
        del wrong["divided equally"]
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.warns(DeprecationWarning, match="average"):
        assert torch.equal(hvd.allreduce(x, average=False), x * n)
    handle = hvd.allreduce_async(x, name="twice", op=hvd.Sum)
    if n > 1 and hvd.rank() == 0:
        hvd.synchronize(handle)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == n  # nothing was sent, so nothing is out of step


@pytest.mark.parametrize("size", [1, 2])
def test_wrong_arguments_raise_at_once_and_leave_no_trace(rank_pool, size):
    rank_pool(size).run(wrong_arguments, init=True)


def mismatches() -> None:
    with pytest.raises(hvd.HorovodInternalError, match=r"rank 0[\s\S]*rank 1"):
        hvd.allreduce(torch.ones(2 + hvd.rank()), name="shapes")
    with pytest.raises(hvd.HorovodInternalError):
        hvd.allreduce(torch.ones(2).to([torch.float32, torch.int32][hvd.rank()]), name="dtypes")
    with pytest.raises(hvd.HorovodInternalError):
        hvd.broadcast(torch.ones(2), hvd.rank(), name="roots")
    with pytest.raises(hvd.HorovodInternalError):
        [hvd.allreduce, hvd.allgather][hvd.rank()](torch.ones(2), name="kinds")
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]


def test_every_rank_learns_of_a_mismatch_and_the_job_carries_on(rank_pool):
    rank_pool(2).run(mismatches, init=True)


def uninitialised() -> None:
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.barrier, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"use hvd.init\(\)"):
            call()
    with pytest.raises(ValueError, match="process_sets"):
        hvd.init(process_sets="static")


def test_nothing_works_before_init(rank_pool):
    rank_pool(1).run(uninitialised)


def again_and_again() -> None:
    for round_number in range(5):
        hvd.init()
        hvd.init()
        assert hvd.allreduce(torch.tensor([round_number]), op=hvd.Sum).item() == round_number * hvd.size()
        hvd.shutdown()
        hvd.shutdown()


def test_init_and_shutdown_repeatedly(rank_pool):
    rank_pool(2).run(again_and_again, check_leaks=True)


def one_rank_fails() -> None:
    if hvd.rank() == 1:
        hvd.shutdown()
        return
    hvd.allreduce(torch.ones(2))


def test_a_rank_that_left_is_named(rank_pool):
    with pytest.raises(RankError, match="rank 1"):
        rank_pool(2).run(one_rank_fails, init=True)
