"""Execution of agreed batches of operations by calls of the backend for host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from reigen.backends.adasum import adasum
from reigen.backends.base import Backend, ReduceBuffer
from reigen.engine.device_execution import execute_on_device, make_neutral_device_buffers
from reigen.engine.handle import CollectiveResult, TensorTableEntry
from reigen.engine.messages import Operation, OperationKind, Response
from reigen.engine.process_set import BatchItem, ProcessSetGroup, elements_per_row, get_reduction, split_rows
from reigen.kernels.reduce import neutral_element
from reigen.types import DTYPES, ReduceOp


def execute(
    process_set_groups: dict[int, ProcessSetGroup], batch: Sequence[BatchItem], deadline: float
) -> list[CollectiveResult]:
    """Run a batch, all of one kind and process set, but allreduces in host memory; return an outcome for each member.

    Process sets that a batch makes or unmakes are added to ``process_set_groups``, or removed. Errors are those of
    `reigen.backends.base` and `reigen.backends.device`.
    """
    first, response, _ = batch[0]
    process_set_group = process_set_groups[first.process_set]
    if first.device:
        return execute_on_device(process_set_group, batch, deadline)
    if first.kind is OperationKind.ADD_SET:
        return [_add_set(process_set_groups, first, response, deadline)]
    if first.kind is OperationKind.REMOVE_SET:
        process_set_groups.pop(first.shape[0]).close()
        return [CollectiveResult()]
    return [_execute_single(process_set_group, member, deadline) for member in batch]


def make_neutral_buffers(process_set_group: ProcessSetGroup, operation: Operation) -> TensorTableEntry:
    """Memory for an allreduce that this rank has joined out of: elements that leave the others' result as it is.

    Raises:
        CollectiveError: it takes place on devices, and this rank has used none so far.
    """
    if operation.device:
        return make_neutral_device_buffers(process_set_group, operation)
    if operation.members:
        return TensorTableEntry(
            members=tuple(make_neutral_buffers(process_set_group, member) for member in operation.members)
        )
    neutral = neutral_element(DTYPES[operation.dtype], operation.op)
    array = np.full(operation.num_elements, neutral, DTYPES[operation.dtype].storage)
    return TensorTableEntry(array, array, array)


def _backend(process_set_group: ProcessSetGroup) -> Backend:
    assert process_set_group.backend is not None, "only members of a process set receive its operations"
    return process_set_group.backend


def execute_allreduce(
    process_set_group: ProcessSetGroup, batch: Sequence[BatchItem], deadline: float
) -> list[CollectiveResult]:
    """`execute` for allreduces in host memory: those of one type and reduction go to the backend together, in order."""
    runs: dict[tuple[str, ReduceOp, int, float, float, bool], list[ReduceBuffer]] = {}
    results, num_ranks = [], len(process_set_group.ranks)
    for operation, response, task in batch:
        parts: Iterable[BatchItem] = ((operation, response, task),)
        if operation.members:
            parts = zip(operation.members, response.members, task.members, strict=True)
        for part, agreed, piece in parts:
            assert isinstance(piece.source, np.ndarray)
            assert isinstance(piece.target, np.ndarray)
            buffer = ReduceBuffer(piece.source, piece.target, part.offset if agreed.in_place else -1, piece.journal)
            count = (response.num_active if part.divide_by_active else 0) or num_ranks
            key = (part.dtype, part.op, count, part.prescale, part.postscale, agreed.in_place)
            runs.setdefault(key, []).append(buffer)
        members = tuple(CollectiveResult(member.output) for member in task.members) if task.members else ()
        results.append(CollectiveResult(task.output, members=members))
    backend = process_set_group.backend
    assert backend is not None, "only members of a process set receive its operations"
    for (dtype, op, count, prescale, postscale, _), buffers in runs.items():
        if op is ReduceOp.ADASUM:
            sources, targets = [b.source for b in buffers], [b.target for b in buffers]
            adasum(backend, sources, targets, DTYPES[dtype], prescale, postscale, deadline)
        else:
            backend.allreduce(buffers, get_reduction(dtype, op, count, prescale, postscale), deadline)
    return results


def _execute_single(process_set_group: ProcessSetGroup, member: BatchItem, deadline: float) -> CollectiveResult:
    """Run an operation that travels alone; the members of a group one after the other."""
    operation, response, task = member
    if operation.members:
        parts = zip(operation.members, response.members, task.members, strict=True)
        return CollectiveResult(members=tuple(_execute_single(process_set_group, part, deadline) for part in parts))
    backend = _backend(process_set_group)
    match operation.kind:
        case OperationKind.ALLOCATE:
            return CollectiveResult(region=backend.allocate(operation.shape[0], deadline))
        case OperationKind.ALLOCATE_SHARED:
            return CollectiveResult(region=backend.allocate_shared(operation.shape[0], deadline))
        case OperationKind.FREE:
            backend.free(operation.offset)
        case OperationKind.BROADCAST | OperationKind.REDUCE_TO_OWNERS:
            return _execute_in_place(process_set_group, operation, task, deadline)
        case OperationKind.ALLGATHER | OperationKind.ALLTOALL | OperationKind.REDUCESCATTER:
            return _execute_by_rows(backend, operation, response, task, deadline)
        case OperationKind.BARRIER | OperationKind.EXCHANGE | OperationKind.JOIN:
            pass  # it was announced because every rank has come: nothing is left to do
        case _:
            raise AssertionError(f"nothing executes {operation.kind.name}")
    return CollectiveResult(value=response.value, payloads=response.payloads)


def _execute_in_place(
    process_set_group: ProcessSetGroup, operation: Operation, task: TensorTableEntry, deadline: float
) -> CollectiveResult:
    """Run what has a result of the shape of its tensor."""
    backend, array, target = _backend(process_set_group), task.source, task.target
    assert isinstance(array, np.ndarray)
    if operation.kind is OperationKind.BROADCAST:
        assert isinstance(target, np.ndarray)
        root = process_set_group.ranks.index(operation.root)
        backend.broadcast(array if backend.rank == root else None, target, root, deadline)
    else:
        reduction = get_reduction(operation.dtype, operation.op, backend.size, operation.prescale, operation.postscale)
        buffer = ReduceBuffer(array, array, operation.offset)
        backend.reduce_to_owners(buffer, operation.splits, reduction, deadline)
    return CollectiveResult(task.output)


def _execute_by_rows(
    backend: Backend, operation: Operation, response: Response, task: TensorTableEntry, deadline: float
) -> CollectiveResult:
    """Run what has a result of so many rows as have come from the ranks, or as this rank gets."""
    received: tuple[int, ...] = ()
    width, source = elements_per_row(operation), task.source
    assert isinstance(source, np.ndarray)
    if operation.kind is OperationKind.ALLGATHER:
        rows = list(response.sizes[0])
        num_rows = sum(rows)
    elif operation.kind is OperationKind.ALLTOALL:
        received = tuple(row[backend.rank] for row in response.sizes)
        num_rows = sum(received)
    else:
        rows = split_rows(operation.shape[0], backend.size)
        num_rows = rows[backend.rank]
    shape = (num_rows, *operation.shape[1:])
    output = np.empty(shape, DTYPES[operation.dtype].storage) if task.make_output is None else task.make_output(shape)
    assert isinstance(output, np.ndarray)
    target = output.reshape(-1)
    if operation.kind is OperationKind.ALLGATHER:
        backend.allgather(source, [r * width for r in rows], target, deadline)
    elif operation.kind is OperationKind.ALLTOALL:
        backend.alltoall(source, [[n * width for n in row] for row in response.sizes], target, deadline)
    else:
        reduction = get_reduction(operation.dtype, operation.op, backend.size, operation.prescale, operation.postscale)
        backend.reduce_scatter(source, [r * width for r in rows], target, reduction, deadline)
    return CollectiveResult(output, received)


def _add_set(
    process_set_groups: dict[int, ProcessSetGroup], operation: Operation, response: Response, deadline: float
) -> CollectiveResult:
    backend, device = _backend(process_set_groups[0]).split(operation.shape, deadline), process_set_groups[0].device
    subgroup = None if backend is None or device is None else device.make_subgroup(backend, operation.shape)
    process_set_groups[response.value] = ProcessSetGroup(operation.shape, backend, subgroup)
    return CollectiveResult(value=response.value)
