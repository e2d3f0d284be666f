"""From an agreed batch to calls of the device plane: `reigen.engine.execution` for what lies in a device's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from reigen.engine.handles import Outcome, Task
from reigen.engine.messages import Kind, Operation, Response
from reigen.engine.team import Member, Team, reduction_of, row_elements, rows_of
from reigen.errors import CollectiveError
from reigen.planes.device import DeviceArray, DevicePlane, Event, Memory
from reigen.types import DTYPES, ReduceOp


class _Seat(NamedTuple):
    """A process set as one of its ranks, number ``rank`` of them, sees it; and until when it waits."""

    plane: DevicePlane
    ranks: tuple[int, ...]
    rank: int
    deadline: float


def execute_on_device(team: Team, batch: Sequence[Member], deadline: float) -> list[Outcome]:
    """Enqueue a batch, all of one kind and process set; one outcome per member.

    Raises:
        CollectiveError, DeviceError: see `reigen.planes.device.DevicePlane`.
    """
    assert team.plane is not None, "only members of a process set hear of its operations"
    assert team.device is not None, "a front end lends no device's memory unless there is a plane for it"
    seat = _Seat(team.device, team.ranks, team.plane.rank, deadline)
    if batch[0][0].kind is Kind.ALLREDUCE:
        return _allreduce(seat, batch)
    return [_one(seat, *member) for member in batch]


def stand_in_on_device(team: Team, operation: Operation) -> Task:
    """`reigen.engine.execution.stand_in` for what lies in the memory of devices."""
    if team.device is None:
        raise CollectiveError("this rank has joined, and cannot stand in on devices: it has no plane for them")
    if operation.members:
        return Task(members=tuple(stand_in_on_device(team, member) for member in operation.members))
    array = team.device.stand_in(operation.num_elements, DTYPES[operation.dtype], operation.op)
    return Task(array, array, array)


def _allreduce(seat: _Seat, batch: Sequence[Member]) -> list[Outcome]:
    """Tensors of one type and reduction go to the plane together, in their order."""
    runs: dict[tuple[str, ReduceOp, int, float, float], list[tuple[DeviceArray, DeviceArray]]] = {}
    for operation, response, task in batch:
        for part, piece in zip(operation.parts, task.parts, strict=True):
            active = response.num_active if part.divide_by_active else 0
            key = (part.dtype, part.op, active or len(seat.ranks), part.prescale, part.postscale)
            runs.setdefault(key, []).append((_lent(piece.source), _lent(piece.target)))
    events = [seat.plane.allreduce(buffers, reduction_of(*key), seat.deadline) for key, buffers in runs.items()]
    outcomes = []
    for operation, _, task in batch:
        # One stream carries them all: the last to end is the last that was enqueued.
        parts = tuple(_complete(piece.output, events[-1]) for piece in task.parts)
        outcomes.append(Outcome(members=parts) if operation.members else parts[0])
    return outcomes


def _one(seat: _Seat, operation: Operation, response: Response, task: Task) -> Outcome:
    """An operation that travels alone; the members of a group one after the other."""
    if operation.members:
        parts = zip(operation.members, response.members, task.members, strict=True)
        return Outcome(members=tuple(_one(seat, *part) for part in parts))
    return _SINGLE[operation.kind](seat, operation, response, task)


def _broadcast(seat: _Seat, operation: Operation, response: Response, task: Task) -> Outcome:
    root = seat.ranks.index(operation.root)
    ended = seat.plane.broadcast(_lent(task.source), _lent(task.target), root, seat.deadline)
    return _complete(task.output, ended)


def _allgather(seat: _Seat, operation: Operation, response: Response, task: Task) -> Outcome:
    rows, width = response.sizes[0], row_elements(operation)
    source, output = _make(task, (sum(rows), *operation.shape[1:]))
    return _complete(output, seat.plane.allgather(source, [r * width for r in rows], _flat(output), seat.deadline))


def _alltoall(seat: _Seat, operation: Operation, response: Response, task: Task) -> Outcome:
    width = row_elements(operation)
    received = tuple(row[seat.rank] for row in response.sizes)
    source, output = _make(task, (sum(received), *operation.shape[1:]))
    counts = [[n * width for n in row] for row in response.sizes]
    return replace(
        _complete(output, seat.plane.alltoall(source, counts, _flat(output), seat.deadline)), received_splits=received
    )


def _reducescatter(seat: _Seat, operation: Operation, response: Response, task: Task) -> Outcome:
    rows, width = rows_of(operation.shape[0], len(seat.ranks)), row_elements(operation)
    source, output = _make(task, (rows[seat.rank], *operation.shape[1:]))
    reduction = reduction_of(operation.dtype, operation.op, len(seat.ranks), operation.prescale, operation.postscale)
    counts = [r * width for r in rows]
    return _complete(output, seat.plane.reducescatter(source, counts, _flat(output), reduction, seat.deadline))


def _make(task: Task, shape: tuple[int, ...]) -> tuple[DeviceArray, DeviceArray]:
    """The input, and new memory for an output of that shape: belonging to the side stream, which uses it first."""
    source = _lent(task.source)
    with source.device.aside():
        return source, source.device.empty(shape, source.dtype)


def _lent(memory: Memory | None) -> DeviceArray:
    assert isinstance(memory, DeviceArray), "an operation on devices has no array in host memory"
    return memory


def _flat(array: DeviceArray) -> DeviceArray:
    return array.reshape(-1)


def _complete(output: Memory | None, ended: Event) -> Outcome:
    """The outcome whose array is complete when ``ended`` has passed."""
    return Outcome(replace(_lent(output), ready=ended))


_SINGLE = {
    Kind.ALLGATHER: _allgather,
    Kind.BROADCAST: _broadcast,
    Kind.ALLTOALL: _alltoall,
    Kind.REDUCESCATTER: _reducescatter,
}
