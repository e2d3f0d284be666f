"""From an agreed batch to calls of the device backend: `reigen.engine.execution` for what lies in a device's memory."""

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


def execute_on_device(team: ProcessSetGroup, batch: Sequence[BatchItem], deadline: float) -> list[CollectiveResult]:
    """Enqueue a batch, all of one kind and process set; one outcome per member.

    Raises:
        CollectiveError, DeviceError: see `reigen.backends.device.DeviceBackend`.
    """
    assert team.backend is not None, "only members of a process set hear of its operations"
    assert team.device is not None, "a front end lends no device's memory unless there is a backend for it"
    seat = _DeviceGroup(team.device, team.ranks, team.backend.rank, deadline)
    if batch[0][0].kind is OperationKind.ALLREDUCE:
        return _allreduce(seat, batch)
    return [_execute_single(seat, *member) for member in batch]


def make_neutral_device_buffers(team: ProcessSetGroup, operation: Operation) -> TensorTableEntry:
    """`reigen.engine.execution.make_neutral_buffers` for what lies in the memory of devices."""
    if team.device is None:
        raise CollectiveError("this rank has joined, and cannot stand in on devices: it has no backend for them")
    if operation.members:
        return TensorTableEntry(
            members=tuple(make_neutral_device_buffers(team, member) for member in operation.members)
        )
    array = team.device.neutral_array(operation.num_elements, DTYPES[operation.dtype], operation.op)
    return TensorTableEntry(array, array, array)


def _allreduce(seat: _DeviceGroup, batch: Sequence[BatchItem]) -> list[CollectiveResult]:
    """Tensors of one type and reduction go to the backend together, in their order."""
    runs: dict[tuple[str, ReduceOp, int, float, float], list[tuple[DeviceArray, DeviceArray]]] = {}
    for operation, response, task in batch:
        for part, piece in zip(operation.parts, task.parts, strict=True):
            active = response.num_active if part.divide_by_active else 0
            key = (part.dtype, part.op, active or len(seat.ranks), part.prescale, part.postscale)
            runs.setdefault(key, []).append((_as_device_array(piece.source), _as_device_array(piece.target)))
    events = [_reduce(seat, buffers, get_reduction(*key)) for key, buffers in runs.items()]
    outcomes = []
    for operation, _, task in batch:
        # One stream carries them all: the last to end is the last that was enqueued.
        parts = tuple(_device_result(piece.output, events[-1]) for piece in task.parts)
        outcomes.append(CollectiveResult(members=parts) if operation.members else parts[0])
    return outcomes


def _reduce(
    seat: _DeviceGroup, buffers: Sequence[tuple[DeviceArray, DeviceArray]], reduction: Reduction
) -> DeviceEvent:
    memory = [array for pair in buffers for array in pair]
    return seat.backend.launch(memory, lambda group: group.allreduce(buffers, reduction), seat.deadline)


def _execute_single(
    seat: _DeviceGroup, operation: Operation, response: Response, task: TensorTableEntry
) -> CollectiveResult:
    """An operation that travels alone; the members of a group one after the other."""
    if operation.members:
        parts = zip(operation.members, response.members, task.members, strict=True)
        return CollectiveResult(members=tuple(_execute_single(seat, *part) for part in parts))
    if operation.kind is OperationKind.BROADCAST:
        root = seat.ranks.index(operation.root)
        source, target = _as_device_array(task.source), _as_device_array(task.target)
        return seat.launch(source, target, task.output, lambda group: group.broadcast(source, target, root))
    return _execute_by_rows(seat, operation, response, task)


def _execute_by_rows(
    seat: _DeviceGroup, operation: Operation, response: Response, task: TensorTableEntry
) -> CollectiveResult:
    """Run what has a result of so many rows as have come from the ranks, or as this rank gets."""
    width = elements_per_row(operation)
    if operation.kind is OperationKind.ALLTOALL:
        received = tuple(row[seat.rank] for row in response.sizes)
        source, output = _make_output(task, (sum(received), *operation.shape[1:]))
        table = [[n * width for n in row] for row in response.sizes]
        result = seat.launch(source, output, output, lambda group: group.alltoall(source, table, output))
        return structs.replace(result, received_splits=received)
    if operation.kind is OperationKind.ALLGATHER:
        rows = response.sizes[0]
        source, output = _make_output(task, (sum(rows), *operation.shape[1:]))
        counts = [r * width for r in rows]
        return seat.launch(source, output, output, lambda group: group.allgather(source, counts, output))
    parts, size = split_rows(operation.shape[0], len(seat.ranks)), len(seat.ranks)
    source, output = _make_output(task, (parts[seat.rank], *operation.shape[1:]))
    reduction = get_reduction(operation.dtype, operation.op, size, operation.prescale, operation.postscale)
    counts = [r * width for r in parts]
    return seat.launch(source, output, output, lambda group: group.reduce_scatter(source, counts, output, reduction))


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
