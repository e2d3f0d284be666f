"""Execution of agreed batches of operations on tensors in a device's memory, by calls of the backend for devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from msgspec import structs

from reigen.backends.device import (
    DeviceArray,
    DeviceBackend,
    DeviceEvent,
    DeviceGroup,
    DeviceWork,
    HostOrDeviceArray,
)
from reigen.engine.handle import CollectiveResult, TensorTableEntry
from reigen.engine.messages import Operation, OperationKind, Response
from reigen.engine.process_set import BatchItem, ProcessSetGroup, elements_per_row, get_reduction, split_rows
from reigen.errors import CollectiveError
from reigen.kernels.reduce import Reduction
from reigen.types import DTYPES, ReduceOp


class _DeviceGroup(NamedTuple):
    """A process set as one of its ranks, number ``rank`` of them, sees it; and until when it waits."""

    backend: DeviceBackend
    ranks: tuple[int, ...]
    rank: int
    deadline: float

    def launch(
        self,
        source: DeviceArray,
        target: DeviceArray,
        output: HostOrDeviceArray | None,
        work: Callable[[DeviceGroup], Sequence[DeviceWork]],
    ) -> CollectiveResult:
        """Enqueue an operation on two arrays; ``output`` is complete when it has ended."""
        return _device_result(output, self.backend.launch([source, target], work, self.deadline))


def execute_on_device(
    process_set_group: ProcessSetGroup, batch: Sequence[BatchItem], deadline: float
) -> list[CollectiveResult]:
    """Enqueue a batch, all of one kind and process set; one outcome per member.

    Raises:
        CollectiveError, DeviceError: see `reigen.backends.device.DeviceBackend`.
    """
    assert process_set_group.backend is not None, "only members of a process set receive its operations"
    assert process_set_group.device is not None, "a front end lends no device's memory unless there is a backend for it"
    device_group = _DeviceGroup(
        process_set_group.device, process_set_group.ranks, process_set_group.backend.rank, deadline
    )
    if batch[0][0].kind is OperationKind.ALLREDUCE:
        return _allreduce(device_group, batch)
    return [_execute_single(device_group, *member) for member in batch]


def make_neutral_device_buffers(process_set_group: ProcessSetGroup, operation: Operation) -> TensorTableEntry:
    """`reigen.engine.execution.make_neutral_buffers` for what lies in the memory of devices."""
    if process_set_group.device is None:
        raise CollectiveError("this rank has joined, and cannot stand in on devices: it has no backend for them")
    if operation.members:
        return TensorTableEntry(
            members=tuple(make_neutral_device_buffers(process_set_group, member) for member in operation.members)
        )
    array = process_set_group.device.neutral_array(operation.num_elements, DTYPES[operation.dtype], operation.op)
    return TensorTableEntry(array, array, array)


def _allreduce(device_group: _DeviceGroup, batch: Sequence[BatchItem]) -> list[CollectiveResult]:
    """Tensors of one type and reduction go to the backend together, in their order."""
    runs: dict[tuple[str, ReduceOp, int, float, float], list[tuple[DeviceArray, DeviceArray]]] = {}
    for operation, response, task in batch:
        for part, piece in zip(operation.parts, task.parts, strict=True):
            active = response.num_active if part.divide_by_active else 0
            key = (part.dtype, part.op, active or len(device_group.ranks), part.prescale, part.postscale)
            runs.setdefault(key, []).append((_as_device_array(piece.source), _as_device_array(piece.target)))
    events = [_reduce(device_group, buffers, get_reduction(*key)) for key, buffers in runs.items()]
    outcomes = []
    for operation, _, task in batch:
        # One stream carries them all: the last to end is the last that was enqueued.
        parts = tuple(_device_result(piece.output, events[-1]) for piece in task.parts)
        outcomes.append(CollectiveResult(members=parts) if operation.members else parts[0])
    return outcomes


def _reduce(
    device_group: _DeviceGroup, buffers: Sequence[tuple[DeviceArray, DeviceArray]], reduction: Reduction
) -> DeviceEvent:
    memory = [array for pair in buffers for array in pair]
    return device_group.backend.launch(memory, lambda group: group.allreduce(buffers, reduction), device_group.deadline)


def _execute_single(
    device_group: _DeviceGroup, operation: Operation, response: Response, task: TensorTableEntry
) -> CollectiveResult:
    """An operation that travels alone; the members of a group one after the other."""
    if operation.members:
        parts = zip(operation.members, response.members, task.members, strict=True)
        return CollectiveResult(members=tuple(_execute_single(device_group, *part) for part in parts))
    match operation.kind:
        case OperationKind.BROADCAST:
            root = device_group.ranks.index(operation.root)
            source, target = _as_device_array(task.source), _as_device_array(task.target)
            return device_group.launch(source, target, task.output, lambda group: group.broadcast(source, target, root))
        case OperationKind.ALLGATHER | OperationKind.ALLTOALL | OperationKind.REDUCESCATTER:
            return _execute_by_rows(device_group, operation, response, task)
    raise AssertionError(f"there is no {operation.kind.name} on devices")


def _execute_by_rows(
    device_group: _DeviceGroup, operation: Operation, response: Response, task: TensorTableEntry
) -> CollectiveResult:
    """Run what has a result of so many rows as have come from the ranks, or as this rank gets."""
    width = elements_per_row(operation)
    if operation.kind is OperationKind.ALLTOALL:
        received = tuple(row[device_group.rank] for row in response.sizes)
        source, output = _make_output(task, (sum(received), *operation.shape[1:]))
        table = [[n * width for n in row] for row in response.sizes]
        result = device_group.launch(source, output, output, lambda group: group.alltoall(source, table, output))
        return structs.replace(result, received_splits=received)
    if operation.kind is OperationKind.ALLGATHER:
        rows = response.sizes[0]
        source, output = _make_output(task, (sum(rows), *operation.shape[1:]))
        counts = [r * width for r in rows]
        return device_group.launch(source, output, output, lambda group: group.allgather(source, counts, output))
    parts, size = split_rows(operation.shape[0], len(device_group.ranks)), len(device_group.ranks)
    source, output = _make_output(task, (parts[device_group.rank], *operation.shape[1:]))
    reduction = get_reduction(operation.dtype, operation.op, size, operation.prescale, operation.postscale)
    counts = [r * width for r in parts]
    return device_group.launch(
        source, output, output, lambda group: group.reduce_scatter(source, counts, output, reduction)
    )


def _make_output(task: TensorTableEntry, shape: tuple[int, ...]) -> tuple[DeviceArray, DeviceArray]:
    """The input, and new memory for an output of that shape: belonging to the side stream, which uses it first."""
    source = _as_device_array(task.source)
    with source.device.aside():
        return source, source.device.empty(shape, source.dtype)


def _as_device_array(memory: HostOrDeviceArray | None) -> DeviceArray:
    assert isinstance(memory, DeviceArray), "an operation on devices has no array in host memory"
    return memory


def _device_result(output: HostOrDeviceArray | None, ended: DeviceEvent) -> CollectiveResult:
    """The outcome whose array is complete when ``ended`` has passed."""
    return CollectiveResult(replace(_as_device_array(output), ready=ended))
