"""A job of one rank: everything completes at once, and arguments are checked as everywhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from msgspec.structs import replace

from reigen import context
from reigen.config import Config, load_config
from reigen.context import Context
from reigen.engine.messages import Operation, OperationKind, ResponseList, SubmitRequest
from reigen.engine_factory import create_coordinator
from reigen.errors import (
    ArgumentError,
    CollectiveError,
    ConfigError,
    NotInitializedError,
    UnsupportedError,
    UnsupportedTypeError,
)
from reigen.types import DTYPES, ReduceOp

FLOAT, BOOL = DTYPES["float32"], DTYPES["bool"]


@pytest.fixture
def alone() -> Iterator[Context]:
    job = Context(Config())
    yield job
    job.close()


def test_collectives_of_one_rank(alone: Context) -> None:
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    out = np.empty_like(x)
    handle = alone.allreduce(x, out, FLOAT, op=ReduceOp.AVERAGE, prescale=2.0, postscale=3.0)
    assert handle.poll()
    assert handle.wait().array is out
    np.testing.assert_array_equal(out, 6 * x)
    assert alone.broadcast(x, out, FLOAT, root_rank=0).wait().array is out
    np.testing.assert_array_equal(out, x)
    for outcome in (alone.allgather(x, FLOAT).wait(), alone.reducescatter(x, FLOAT, op=ReduceOp.SUM).wait()):
        np.testing.assert_array_equal(outcome.array, x)
    exchanged = alone.alltoall(x, FLOAT, splits=[2]).wait()
    np.testing.assert_array_equal(exchanged.array, x[:2])
    assert exchanged.received_splits == (2,)
    assert alone.barrier().wait().array is None


def test_the_output_is_made_by_the_caller_where_it_wants_to(alone: Context) -> None:
    made: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = []

    def make(shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        made.append(np.zeros(shape, np.float32))
        return made[-1]

    x = np.ones((3, 2), np.float32)
    for collective in (alone.allgather, alone.alltoall):
        assert collective(x, FLOAT, make_output=make).wait().array is made[-1]
        assert made[-1].shape == (3, 2)


def test_no_thread_is_needed_alone(alone: Context) -> None:
    assert not [t for t in threading.enumerate() if t.name.startswith("reigen")]


def test_regions(alone: Context) -> None:
    region = alone.allocate(100, name="r")
    assert (region.array.size, region.array.ctypes.data % 64, region.array.any()) == (100, 0, False)
    x = region.array[:40].view(np.float32)
    x[:] = 2
    alone.allreduce(x, x, FLOAT, op=ReduceOp.SUM, postscale=0.5, region=region).wait()
    assert (x == 1).all()
    alone.free(region)
    outside = np.ones(4, np.float32)
    with pytest.raises(ArgumentError, match="does not lie in the region"):
        alone.allreduce(outside, outside, FLOAT, region=region)
    with pytest.raises(ArgumentError, match="source must be target"):
        alone.allreduce(outside, x, FLOAT, region=region)


X = np.ones((3, 2), np.float32)


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (lambda c: c.broadcast(X, X, FLOAT, root_rank=1), ArgumentError, r"of the ranks \[0\], not 1"),
        (lambda c: c.broadcast(X, X, FLOAT, root_rank=-1), ArgumentError, "not -1"),
        (lambda c: c.allgather(X[0, 0].reshape(()), FLOAT), ArgumentError, "got a scalar"),
        (lambda c: c.alltoall(X[0, 0].reshape(()), FLOAT), ArgumentError, "got a scalar"),
        (lambda c: c.reducescatter(X[0, 0].reshape(()), FLOAT), UnsupportedError, "got a scalar"),
        (lambda c: c.alltoall(X, FLOAT, splits=[4]), ArgumentError, r"add up to at most 3, got \[4\]"),
        (lambda c: c.alltoall(X, FLOAT, splits=[1, 1]), ArgumentError, "splits must be 1 numbers"),
        (lambda c: c.alltoall(X, FLOAT, splits=[-1]), ArgumentError, r"at least 0 .* got \[-1\]"),
        (lambda c: c.allreduce(X, X, BOOL, op=ReduceOp.ADASUM), UnsupportedTypeError, "bool"),
        (lambda c: c.reducescatter(X, FLOAT, op=ReduceOp.ADASUM), ArgumentError, "ADASUM"),
        (lambda c: c.allreduce(X, X, BOOL, op=ReduceOp.AVERAGE), UnsupportedTypeError, "bool cannot be averaged"),
        (lambda c: c.barrier(name=""), ArgumentError, "1 to 512 bytes"),
        (lambda c: c.barrier(name="ä" * 257), ArgumentError, "1 to 512 bytes, got 514"),
        (lambda c: c.allocate(0, name="r"), ArgumentError, "at least 1 byte"),
    ],
)
def test_wrong_arguments(wrong: Callable[[Context], object], kind: type[Exception], text: str, alone: Context) -> None:
    with pytest.raises(kind, match=text):
        wrong(alone)
    alone.barrier().wait()


def test_after_close_nothing_is_taken(alone: Context) -> None:
    alone.close()
    alone.close()
    with pytest.raises(CollectiveError, match=r"b: Reigen has been shut down"):
        alone.barrier(name="b")


def test_the_one_context_of_a_process() -> None:
    assert not context.is_initialized()
    with pytest.raises(NotInitializedError, match=r"use hvd.init\(\)"):
        context.current()
    job = context.init({})
    try:
        assert context.init({}) is context.current() is job
        assert (job.rank, job.size, job.local_rank, job.local_size, job.cross_rank, job.cross_size) == (
            0,
            1,
            0,
            1,
            0,
            1,
        )
        assert job.backend == "null"
    finally:
        context.shutdown()
    assert not context.is_initialized()
    context.shutdown()


def test_a_wrong_environment_leaves_nothing() -> None:
    with pytest.raises(ConfigError, match="REIGEN_DEADLINE"):
        context.init({"REIGEN_DEADLINE": "never"})
    assert not context.is_initialized()


@pytest.mark.parametrize(
    ("knobs", "travelling"),
    [
        ({}, [["g", "x", "y"]]),
        ({"HOROVOD_DISABLE_GROUP_FUSION": "1"}, [["g"], ["x", "y"]]),
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, [["g"], ["x"], ["y"]]),
    ],
)
def test_what_travels_together_is_as_the_knobs_say(knobs: dict[str, str], travelling: list[list[str]]) -> None:
    coordinator = create_coordinator(load_config(knobs), 1)
    single = Operation(OperationKind.ALLREDUCE, "", "float32", (4,))
    group = Operation(OperationKind.ALLREDUCE, "g", members=(single, single))
    for operation in (group, replace(single, name="x"), replace(single, name="y")):
        coordinator.receive(0, [SubmitRequest(operation)], 0.0)
    (run,) = coordinator.announce(0.0)
    assert isinstance(run, ResponseList)
    assert [[response.name for response in batch] for batch in run.batches] == travelling
