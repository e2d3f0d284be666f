"""From an agreed batch to calls of the data plane."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.engine.handles import Handle, Outcome
from reigen.engine.messages import Kind, Operation, Response
from reigen.kernels.reduce import Reduction
from reigen.planes.base import Array, Buffer, DataPlane
from reigen.types import DTYPES, ReduceOp

#: One member of a batch: what this rank submitted, what was agreed, and where its memory is.
Member = tuple[Operation, Response, Handle]


@functools.lru_cache(maxsize=256)
def reduction_of(dtype: str, op: ReduceOp, count: int, prescale: float, postscale: float) -> Reduction:
    """The reduction of these parameters; made once, since the checks take longer than a small collective.

    Raises:
        ArgumentError, UnsupportedTypeError: there is no such reduction.
    """
    return Reduction(DTYPES[dtype], op, count, prescale, postscale)


def rows_of(num_rows: int, size: int) -> list[int]:
    """How reducescatter divides rows: the first ``num_rows % size`` ranks get one more."""
    return [num_rows // size + (rank < num_rows % size) for rank in range(size)]


def execute(plane: DataPlane, batch: Sequence[Member], deadline: float) -> list[Outcome]:
    """Run a batch, all of one kind; one outcome per member. Errors are those of `reigen.planes.base`."""
    kind = batch[0][0].kind
    if kind is Kind.ALLREDUCE:
        return _allreduce(plane, batch, deadline)
    return [_SINGLE[kind](plane, operation, response, handle, deadline) for operation, response, handle in batch]


def _allreduce(plane: DataPlane, batch: Sequence[Member], deadline: float) -> list[Outcome]:
    first = batch[0][0]
    reduction = reduction_of(first.dtype, first.op, plane.size, first.prescale, first.postscale)
    buffers = []
    for operation, response, handle in batch:
        source, target = handle.task.source, handle.task.target
        assert source is not None
        assert target is not None
        buffers.append(Buffer(source, target, operation.offset if response.in_place else -1))
    plane.allreduce(buffers, reduction, deadline)
    return [Outcome(handle.output) for _, _, handle in batch]


def _make(handle: Handle, shape: tuple[int, ...], operation: Operation) -> NDArray[Any]:
    if handle.task.make_output is not None:
        return handle.task.make_output(shape)
    return np.empty(shape, DTYPES[operation.dtype].storage)


def _source(handle: Handle) -> Array:
    assert handle.task.source is not None
    return handle.task.source


def _row_elements(operation: Operation) -> int:
    return int(np.prod(operation.shape[1:], dtype=np.int64))


def _allgather(plane: DataPlane, operation: Operation, response: Response, handle: Handle, deadline: float) -> Outcome:
    rows = response.sizes[0]
    width = _row_elements(operation)
    output = _make(handle, (sum(rows), *operation.shape[1:]), operation)
    plane.allgather(_source(handle), [r * width for r in rows], output.reshape(-1), deadline)
    return Outcome(output)


def _broadcast(plane: DataPlane, operation: Operation, response: Response, handle: Handle, deadline: float) -> Outcome:
    target = handle.task.target
    assert target is not None
    plane.broadcast(handle.task.source if plane.rank == operation.root else None, target, operation.root, deadline)
    return Outcome(handle.output)


def _alltoall(plane: DataPlane, operation: Operation, response: Response, handle: Handle, deadline: float) -> Outcome:
    width = _row_elements(operation)
    received = tuple(row[plane.rank] for row in response.sizes)
    output = _make(handle, (sum(received), *operation.shape[1:]), operation)
    counts = [[n * width for n in row] for row in response.sizes]
    plane.alltoall(_source(handle), counts, output.reshape(-1), deadline)
    return Outcome(output, received)


def _reducescatter(
    plane: DataPlane, operation: Operation, response: Response, handle: Handle, deadline: float
) -> Outcome:
    rows = rows_of(operation.shape[0], plane.size)
    width = _row_elements(operation)
    output = _make(handle, (rows[plane.rank], *operation.shape[1:]), operation)
    reduction = reduction_of(operation.dtype, operation.op, plane.size, operation.prescale, operation.postscale)
    plane.reducescatter(_source(handle), [r * width for r in rows], output.reshape(-1), reduction, deadline)
    return Outcome(output)


def _barrier(plane: DataPlane, operation: Operation, response: Response, handle: Handle, deadline: float) -> Outcome:
    """Nothing is left to do: it was announced because every rank has come."""
    return Outcome()


def _allocate(plane: DataPlane, operation: Operation, response: Response, handle: Handle, deadline: float) -> Outcome:
    return Outcome(region=plane.allocate(operation.shape[0], deadline))


def _free(plane: DataPlane, operation: Operation, response: Response, handle: Handle, deadline: float) -> Outcome:
    plane.free(operation.offset)
    return Outcome()


_SINGLE = {
    Kind.ALLGATHER: _allgather,
    Kind.BROADCAST: _broadcast,
    Kind.ALLTOALL: _alltoall,
    Kind.REDUCESCATTER: _reducescatter,
    Kind.BARRIER: _barrier,
    Kind.ALLOCATE: _allocate,
    Kind.FREE: _free,
}
