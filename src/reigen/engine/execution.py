"""From an agreed batch to calls of the backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.backends.adasum import adasum
from reigen.backends.base import Array, Backend, ReduceBuffer
from reigen.engine.device_execution import execute_on_device, make_neutral_device_buffers
from reigen.engine.handle import CollectiveResult, TensorTableEntry
from reigen.engine.messages import Operation, OperationKind, Response
from reigen.engine.process_set import BatchItem, ProcessSetGroup, elements_per_row, get_reduction, split_rows
from reigen.kernels.reduce import neutral_element
from reigen.types import DTYPES, ReduceOp


def execute(teams: dict[int, ProcessSetGroup], batch: Sequence[BatchItem], deadline: float) -> list[CollectiveResult]:
    """Run a batch, all of one kind and process set; one outcome per member. For allreduces: `execute_allreduce`.

    Process sets that a batch makes or unmakes are entered into, or taken out of, ``teams``. Errors are those of
    `reigen.backends.base` and `reigen.backends.device`.
    """
    first, response, _ = batch[0]
    team = teams[first.process_set]
    if first.device:
        return execute_on_device(team, batch, deadline)
    if first.kind is OperationKind.ADD_SET:
        return [_add_set(teams, first, response, deadline)]
    if first.kind is OperationKind.REMOVE_SET:
        return [_remove_set(teams, first)]
    return [_execute_single(team, member, deadline) for member in batch]


def make_neutral_buffers(team: ProcessSetGroup, operation: Operation) -> TensorTableEntry:
    """Memory for an allreduce that this rank has joined out of: elements that leave the others' result as it is.

    Raises:
        CollectiveError: it takes place on devices, and this rank has used none so far.
    """
    if operation.device:
        return make_neutral_device_buffers(team, operation)
    if operation.members:
        return TensorTableEntry(members=tuple(make_neutral_buffers(team, member) for member in operation.members))
    neutral = neutral_element(DTYPES[operation.dtype], operation.op)
    array = np.full(operation.num_elements, neutral, DTYPES[operation.dtype].storage)
    return TensorTableEntry(array, array, array)


def _execute_single(team: ProcessSetGroup, member: BatchItem, deadline: float) -> CollectiveResult:
    """An operation that travels alone; the members of a group one after the other."""
    operation, response, task = member
    if not operation.members:
        return _EXECUTORS[operation.kind](team, operation, response, task, deadline)
    parts = zip(operation.members, response.members, task.members, strict=True)
    return CollectiveResult(members=tuple(_execute_single(team, part, deadline) for part in parts))


def _backend(team: ProcessSetGroup) -> Backend:
    assert team.backend is not None, "only members of a process set hear of its operations"
    return team.backend


def execute_allreduce(
    teams: dict[int, ProcessSetGroup], batch: Sequence[BatchItem], deadline: float
) -> list[CollectiveResult]:
    """`execute` for allreduces in host memory: those of one type and reduction go to the backend together, in order."""
    team = teams[batch[0][0].process_set]
    runs: dict[tuple[str, ReduceOp, int, float, float, bool], list[ReduceBuffer]] = {}
    for operation, response, task in batch:
        parts: Iterable[BatchItem] = ((operation, response, task),)
        if operation.members:
            parts = zip(operation.members, response.members, task.members, strict=True)
        for part, agreed, piece in parts:
            assert isinstance(piece.source, np.ndarray)
            assert isinstance(piece.target, np.ndarray)
            buffer = ReduceBuffer(piece.source, piece.target, part.offset if agreed.in_place else -1)
            active = response.num_active if part.divide_by_active else 0
            key = (part.dtype, part.op, active or len(team.ranks), part.prescale, part.postscale, agreed.in_place)
            runs.setdefault(key, []).append(buffer)
    backend = team.backend
    assert backend is not None, "only members of a process set hear of its operations"
    for (dtype, op, count, prescale, postscale, _), buffers in runs.items():
        if op is ReduceOp.ADASUM:
            sources, targets = [b.source for b in buffers], [b.target for b in buffers]
            adasum(backend, sources, targets, DTYPES[dtype], prescale, postscale, deadline)
        else:
            backend.allreduce(buffers, get_reduction(dtype, op, count, prescale, postscale), deadline)
    results = []
    for _, _, task in batch:
        members = tuple(CollectiveResult(member.output) for member in task.members) if task.members else ()
        results.append(CollectiveResult(task.output, members=members))
    return results


def _make_output(task: TensorTableEntry, shape: tuple[int, ...], operation: Operation) -> NDArray[Any]:
    if task.make_output is not None:
        output = task.make_output(shape)
        assert isinstance(output, np.ndarray)
        return output
    return np.empty(shape, DTYPES[operation.dtype].storage)


def _source(task: TensorTableEntry) -> Array:
    assert isinstance(task.source, np.ndarray)
    return task.source


def _allgather(
    team: ProcessSetGroup, operation: Operation, response: Response, task: TensorTableEntry, deadline: float
) -> CollectiveResult:
    rows = response.sizes[0]
    width = elements_per_row(operation)
    output = _make_output(task, (sum(rows), *operation.shape[1:]), operation)
    _backend(team).allgather(_source(task), [r * width for r in rows], output.reshape(-1), deadline)
    return CollectiveResult(output)


def _broadcast(
    team: ProcessSetGroup, operation: Operation, response: Response, task: TensorTableEntry, deadline: float
) -> CollectiveResult:
    assert isinstance(task.target, np.ndarray)
    backend, root = _backend(team), team.ranks.index(operation.root)
    backend.broadcast(_source(task) if backend.rank == root else None, task.target, root, deadline)
    return CollectiveResult(task.output)


def _alltoall(
    team: ProcessSetGroup, operation: Operation, response: Response, task: TensorTableEntry, deadline: float
) -> CollectiveResult:
    width = elements_per_row(operation)
    backend = _backend(team)
    received = tuple(row[backend.rank] for row in response.sizes)
    output = _make_output(task, (sum(received), *operation.shape[1:]), operation)
    counts = [[n * width for n in row] for row in response.sizes]
    backend.alltoall(_source(task), counts, output.reshape(-1), deadline)
    return CollectiveResult(output, received)


def _reduce_scatter(
    team: ProcessSetGroup, operation: Operation, response: Response, task: TensorTableEntry, deadline: float
) -> CollectiveResult:
    backend = _backend(team)
    rows = split_rows(operation.shape[0], backend.size)
    width = elements_per_row(operation)
    output = _make_output(task, (rows[backend.rank], *operation.shape[1:]), operation)
    reduction = get_reduction(operation.dtype, operation.op, backend.size, operation.prescale, operation.postscale)
    backend.reduce_scatter(_source(task), [r * width for r in rows], output.reshape(-1), reduction, deadline)
    return CollectiveResult(output)


def _reduce_to_owners(
    team: ProcessSetGroup, operation: Operation, response: Response, task: TensorTableEntry, deadline: float
) -> CollectiveResult:
    backend, array = _backend(team), _source(task)
    reduction = get_reduction(operation.dtype, operation.op, backend.size, operation.prescale, operation.postscale)
    backend.reduce_to_owners(ReduceBuffer(array, array, operation.offset), operation.splits, reduction, deadline)
    return CollectiveResult(task.output)


def _barrier(
    team: ProcessSetGroup, operation: Operation, response: Response, task: TensorTableEntry, deadline: float
) -> CollectiveResult:
    """Nothing is left to do: it was announced because every rank has come."""
    return CollectiveResult()


def _exchange(
    team: ProcessSetGroup, operation: Operation, response: Response, task: TensorTableEntry, deadline: float
) -> CollectiveResult:
    """What everybody said came with the announcement."""
    return CollectiveResult(payloads=response.payloads)


def _allocate(
    team: ProcessSetGroup, operation: Operation, response: Response, task: TensorTableEntry, deadline: float
) -> CollectiveResult:
    return CollectiveResult(region=_backend(team).allocate(operation.shape[0], deadline))


def _allocate_shared(
    team: ProcessSetGroup, operation: Operation, response: Response, task: TensorTableEntry, deadline: float
) -> CollectiveResult:
    return CollectiveResult(region=_backend(team).allocate_shared(operation.shape[0], deadline))


def _free(
    team: ProcessSetGroup, operation: Operation, response: Response, task: TensorTableEntry, deadline: float
) -> CollectiveResult:
    _backend(team).free(operation.offset)
    return CollectiveResult()


def _join(
    team: ProcessSetGroup, operation: Operation, response: Response, task: TensorTableEntry, deadline: float
) -> CollectiveResult:
    """Every rank has joined."""
    return CollectiveResult(value=response.value)


def _add_set(
    teams: dict[int, ProcessSetGroup], operation: Operation, response: Response, deadline: float
) -> CollectiveResult:
    backend, device = _backend(teams[0]).split(operation.shape, deadline), teams[0].device
    beside = None if backend is None or device is None else device.make_subgroup(backend, operation.shape)
    teams[response.value] = ProcessSetGroup(operation.shape, backend, beside)
    return CollectiveResult(value=response.value)


def _remove_set(teams: dict[int, ProcessSetGroup], operation: Operation) -> CollectiveResult:
    teams.pop(operation.shape[0]).close()
    return CollectiveResult()


_EXECUTORS = {
    OperationKind.ALLGATHER: _allgather,
    OperationKind.BROADCAST: _broadcast,
    OperationKind.ALLTOALL: _alltoall,
    OperationKind.REDUCESCATTER: _reduce_scatter,
    OperationKind.REDUCE_TO_OWNERS: _reduce_to_owners,
    OperationKind.BARRIER: _barrier,
    OperationKind.EXCHANGE: _exchange,
    OperationKind.ALLOCATE: _allocate,
    OperationKind.ALLOCATE_SHARED: _allocate_shared,
    OperationKind.FREE: _free,
    OperationKind.JOIN: _join,
}
