"""What goes wrong in a collective, on which ranks it is told, with which class; and that the next one works.

The classes are those that scripts and test suites written for Horovod catch: RuntimeError (HorovodInternalError) where
the ranks disagree, ValueError where one rank's own argument is wrong.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import reigen.torch as hvd
from reigen.errors import DuplicateNameError, JoinedError, MismatchError
from reigen.testing import RankError

Call = Callable[[], Any]


def works() -> None:
    """Nothing is out of step: unnamed operations match by their numbers."""
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
    assert hvd.allgather(torch.ones(1)).tolist() == [1] * hvd.size()


# -- (A) the ranks disagree: all who submitted get the same error -----------------------------------------------------


def disagreements() -> None:
    rank, n = hvd.rank(), hvd.size()
    even = rank % 2 == 0
    plain = torch.ones(n)
    ints = torch.ones(n, dtype=torch.int32) if even else plain
    table = torch.ones(n, 6) if even else torch.ones(n, 2, 3)
    columns, rows = torch.ones(n, 3 + even), torch.ones(n + n * rank)

    cases: list[tuple[str, str, Call]] = []
    for call in (hvd.allreduce, hvd.allreduce_, hvd.reducescatter, hvd.allgather, hvd.alltoall):
        cases += [
            (f"{call.__name__}.dtype", "data types", partial(call, ints)),
            (f"{call.__name__}.dimensions", "shapes", partial(call, table)),
            (f"{call.__name__}.columns", "shapes", partial(call, columns)),
        ]
    for call in (hvd.allreduce, hvd.reducescatter):
        cases += [
            (f"{call.__name__}.rows", "shapes", partial(call, rows)),
            (f"{call.__name__}.prescale", "scale factors", partial(call, plain, prescale_factor=1.0 + rank)),
            (f"{call.__name__}.postscale", "scale factors", partial(call, plain, postscale_factor=1.0 + rank)),
            (f"{call.__name__}.op", "operators", partial(call, plain, op=hvd.Sum if even else hvd.Min)),
        ]
    cases += [
        ("broadcast.dtype", "data types", partial(hvd.broadcast, ints, 0)),
        ("broadcast.shape", "shapes", partial(hvd.broadcast_, rows, 0)),
        ("broadcast.elements", "shapes", partial(hvd.broadcast, table, 0)),  # as many elements
        ("broadcast.root", "root ranks", partial(hvd.broadcast, plain, rank)),
        ("kinds", "operations", partial(hvd.allreduce if even else hvd.allgather, plain)),
        ("kinds too", "operations", partial(hvd.broadcast_, plain, 0) if even else partial(hvd.alltoall, plain)),
    ]
    for name, what, call in cases:
        with pytest.raises(hvd.HorovodInternalError, match=f"{what} differ") as caught:
            call(name=name)
        assert isinstance(caught.value, MismatchError)
        assert caught.value.tensor == name
        assert set(caught.value.details) == set(range(n))
    assert hvd.allreduce(torch.ones(3), name="allreduce.rows", op=hvd.Sum).tolist() == [n] * 3  # now they agree
    works()


def disagreement_of_outstanding_operations() -> None:
    """Errors come from synchronize, of the operation at fault alone; a result that is there stays."""
    rank = hvd.rank()
    target = torch.full((2,), float(rank))
    handles = {
        "fine": hvd.allreduce_async(torch.ones(2), name="fine", op=hvd.Sum),
        "wrong": hvd.allreduce_async_(target if rank else target[:1], name="wrong", op=hvd.Sum),
        "fine too": hvd.allgather_async(torch.ones(1 + rank), name="fine too"),
    }
    with pytest.raises(hvd.HorovodInternalError, match="wrong: the shapes differ"):
        hvd.synchronize(handles["wrong"])
    assert target.tolist() == [float(rank)] * 2
    assert hvd.synchronize(handles["fine"]).tolist() == [hvd.size()] * 2
    assert len(hvd.synchronize(handles["fine too"])) == sum(range(1, hvd.size() + 1))
    works()


@pytest.mark.parametrize("func", [disagreements, disagreement_of_outstanding_operations])
@pytest.mark.parametrize("size", [2, 3])
def test_the_ranks_disagree(rank_pool, size, func):
    rank_pool(size).run(func, init=True)


# -- (B) one rank's own argument is wrong: that rank alone, at once ---------------------------------------------------


def duplicate_names() -> None:
    """The first operation still completes, and a barrier works meanwhile."""
    rank = hvd.rank()
    x = torch.full((17, 17), float(rank + 1))
    for turn in range(hvd.size()):
        name = f"duplicate {turn}"
        if rank == turn:
            first = hvd.allreduce_async(x, name=name, op=hvd.Sum)
            for again in (
                partial(hvd.allreduce_async, x),
                partial(hvd.allreduce_async_, x),
                partial(hvd.allgather_async, x),
                partial(hvd.broadcast_async, x, 0),
                partial(hvd.alltoall_async, x, [17] + [0] * (hvd.size() - 1)),
                partial(hvd.reducescatter_async, x),
                partial(hvd.grouped_allreduce_async, [x]),
            ):
                with pytest.raises(ValueError, match=f"'{name}' is still being processed") as caught:
                    again(name=name)
                assert isinstance(caught.value, DuplicateNameError)
        hvd.barrier()
        if rank != turn:
            first = hvd.allreduce_async(x, name=name, op=hvd.Sum)
        assert hvd.synchronize(first).unique().tolist() == [sum(range(1, hvd.size() + 1))]
        works()


def wrong_here() -> None:
    """Only one rank makes the mistake; nothing is sent, and it can do it right afterwards."""
    n = hvd.size()
    x = torch.arange(2.0 * n)
    calls: dict[str, Call] = {
        "divided equally": lambda: hvd.alltoall(torch.ones(n + 1)),
        "splits must be": lambda: hvd.alltoall(x, [1] * (n + 1)),
        "at most": lambda: hvd.alltoall(x, [n + 1] * n),
        "at least 0": lambda: hvd.alltoall(x, torch.tensor([-1] + [1] * (n - 1), dtype=torch.int32)),
        "int32 tensor, got 1-D torch.float32": lambda: hvd.alltoall(x, torch.ones(n)),
        "int32 tensor, got 1-D torch.int64": lambda: hvd.alltoall_async(x, torch.ones(n, dtype=torch.int64)),
        "int32 tensor, got 2-D": lambda: hvd.alltoall(x, torch.ones(n, 1, dtype=torch.int32)),
        "one of the ranks": lambda: hvd.broadcast(x, n),
        "must be a rank": lambda: hvd.broadcast_async(x, None),  # type: ignore[arg-type]
        "supersedes": lambda: hvd.allreduce_async_(x, average=True, op=hvd.Sum),
        "op must be": lambda: hvd.grouped_allreduce([x], op=6),
        "complex64 is not supported": lambda: hvd.allreduce(x.to(torch.complex64)),
        "float8_e5m2 is not supported": lambda: hvd.allgather(x.to(torch.float8_e5m2)),
        "one dimension, got a scalar": lambda: hvd.reducescatter(torch.tensor(1.0)),
        "got a scalar": lambda: hvd.grouped_reducescatter([x, torch.tensor(1.0)]),
        "1 to 512 bytes": lambda: hvd.allreduce(x, name="n" * 513),
    }
    if hvd.rank() == n - 1:
        for message, call in calls.items():
            with pytest.raises(ValueError, match=message):
                call()
    works()
    assert hvd.alltoall(x, [1] * n)[0].tolist() == [float(hvd.rank())] * n


@pytest.mark.parametrize("func", [duplicate_names, wrong_here])
def test_an_argument_of_one_rank_is_wrong(rank_pool, func):
    rank_pool(2).run(func, init=True)


# -- (C) what there is not --------------------------------------------------------------------------------------------


def unsupported() -> None:
    x = torch.ones(4)
    for call in (
        lambda: hvd.reducescatter(x, op=hvd.Adasum),
        lambda: hvd.reducescatter_async(x, op=hvd.Adasum),
        lambda: hvd.grouped_reducescatter([x], op=hvd.Adasum),
    ):
        with pytest.raises(RuntimeError, match="Adasum"):
            call()
    with pytest.raises(ValueError, match="int32 is not supported by op=Adasum"):
        hvd.allreduce(x.int(), op=hvd.Adasum)
    if hvd.size() == 2:
        assert hvd.allreduce(x, op=hvd.Adasum).tolist() == [1.0] * 4  # the same everywhere: the mean
    else:
        with pytest.raises(NotImplementedError, match="Adasum"):
            hvd.allreduce(x, op=hvd.Adasum)
    works()


@pytest.mark.parametrize("size", [2, 3])
def test_what_there_is_not(rank_pool, size):
    rank_pool(size).run(unsupported, init=True)


# -- join -------------------------------------------------------------------------------------------------------------


def joined() -> None:
    """Rank 0 has no more data: the others go on with allreduces, and with nothing else."""
    rank, n = hvd.rank(), hvd.size()
    x = torch.arange(1.0, 4.0) * rank
    if rank == 0:
        last = hvd.join()
    else:
        others = torch.arange(1.0, 4.0) * sum(range(1, n))
        for _ in range(3):
            assert hvd.allreduce(x, op=hvd.Sum, name="sum").tolist() == others.tolist()
        assert torch.allclose(hvd.allreduce(x), others / n)  # by all ranks, as in Horovod
        assert hvd.allreduce(x, op=hvd.Min).tolist() == [1.0, 2.0, 3.0]  # the joined one does not take part
        assert hvd.allreduce(x.int(), op=hvd.Product).tolist() == (torch.arange(1, 4) ** (n - 1) * (n - 1)).tolist()
        summed = hvd.grouped_allreduce([x, torch.tensor([rank])], op=hvd.Sum)
        assert [each.tolist() for each in summed] == [others.tolist(), [sum(range(1, n))]]
        refused: list[Call] = [
            lambda: hvd.allgather(x),
            lambda: hvd.broadcast(x, 1),
            lambda: hvd.broadcast_(x, 0),
            lambda: hvd.alltoall(torch.ones(n)),
            lambda: hvd.reducescatter(torch.ones(n)),
            lambda: hvd.grouped_allgather([x]),
            hvd.barrier,
        ]
        for call in refused:
            with pytest.raises(hvd.HorovodInternalError, match=r"rank\(s\) 0 have joined") as caught:
                call()
            assert isinstance(caught.value, JoinedError)
        last = hvd.join(-1) if rank == 1 else hvd.join(device=0)
    assert last != 0
    assert hvd.allgather_object(last) == [last] * n
    works()


@pytest.mark.parametrize("size", [2, 3])
def test_join(rank_pool, size):
    rank_pool(size).run(joined, init=True)


def joined_alone() -> int:
    return hvd.join()


def test_join_alone(rank_pool):
    assert rank_pool(1).run(joined_alone, init=True) == [0]


# -- (D), (E) a rank leaves or dies -----------------------------------------------------------------------------------


def one_shuts_down() -> None:
    if hvd.rank() == 1:
        hvd.barrier()
        hvd.shutdown()
        return
    waiting = hvd.allreduce_async(torch.ones(2), name="waits")
    hvd.barrier()
    for call in (
        lambda: hvd.synchronize(waiting),
        lambda: hvd.allreduce(torch.ones(2)),
        lambda: hvd.grouped_allgather([torch.ones(2)]),
        hvd.barrier,
        hvd.join,
    ):
        with pytest.raises(hvd.HorovodInternalError, match=r"rank(\(s\))? 1"):
            call()


def test_a_rank_shuts_down_while_others_wait(rank_pool):
    rank_pool(2).run(one_shuts_down, init=True)


def own_shutdown() -> None:
    waiting = hvd.allreduce_async(torch.ones(2), name=f"waits for rank {hvd.rank()}")
    hvd.barrier()
    hvd.shutdown()
    with pytest.raises(hvd.HorovodInternalError, match="shut"):
        hvd.synchronize(waiting)
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.allreduce(torch.ones(2))


def test_what_is_outstanding_fails_with_the_own_shutdown(rank_pool):
    rank_pool(2).run(own_shutdown, init=True)


def one_dies() -> None:
    hvd.barrier()
    if hvd.rank() == 1:
        os._exit(3)
    handles = [hvd.allreduce_async(torch.ones(2), name=f"{number}") for number in range(3)]
    for handle in handles:
        with pytest.raises(hvd.HorovodInternalError, match="1"):
            hvd.synchronize(handle)
    raise hvd.HorovodInternalError("told")


def test_a_rank_dies(rank_pool):
    with pytest.raises(RankError, match="told"):
        rank_pool(2).run(one_dies, init=True)


# -- numbers ----------------------------------------------------------------------------------------------------------


def numbers() -> None:
    """Factors of integers count in float64 and are truncated; those of float16 are rounded before the sum."""
    rank, n = hvd.rank(), hvd.size()
    generator = torch.Generator().manual_seed(1234)
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        x = torch.randint(-30 if dtype.is_signed else 0, 30, (17, 5), generator=generator).to(dtype)
        scaled = (x.double() * 0.3).trunc()
        assert torch.equal(hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.3).double(), scaled * n)
        after = (x.double() * n * 0.7).trunc()
        assert torch.equal(hvd.allreduce(x, op=hvd.Sum, postscale_factor=0.7).double(), after)
        (grouped,) = hvd.grouped_allreduce([x], op=hvd.Sum, prescale_factor=0.3)
        assert torch.equal(grouped.double(), scaled * n)
    mean = hvd.allreduce(torch.tensor([-1, 1, -3, 3]) * (rank == 0))
    assert mean.tolist() == {1: [-1, 1, -3, 3], 2: [0, 0, -1, 1]}[n]
    big = torch.tensor([2**53 - 1])
    assert hvd.allreduce(big, op=hvd.Max, prescale_factor=1.0).item() == 2**53 - 1
    for dtype, wide in ((torch.float16, torch.float32), (torch.bfloat16, torch.float32)):
        x = torch.rand(1000, generator=generator).to(dtype)
        rounded = (x.to(wide) * 0.3).to(dtype).double()
        expected = torch.zeros_like(rounded) + sum(rounded for _ in range(n))
        result = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.3)
        assert torch.equal(result, expected.to(dtype))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_numbers(rank_pool, size):
    rank_pool(size).run(numbers, init=True)


def many_names() -> None:
    """Numbers as names, and a deprecated argument, as old scripts have them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert hvd.allreduce(torch.ones(1), average=False, name=7).item() == hvd.size()  # type: ignore[arg-type]
        assert hvd.allreduce(torch.ones(1), True, "positional").item() == 1
    assert hvd.allreduce(torch.ones(1), None, "x", hvd.Compression.none, hvd.Sum, 2.0, 3.0).item() == 6 * hvd.size()


def test_arguments_by_position(rank_pool):
    rank_pool(2).run(many_names, init=True)
