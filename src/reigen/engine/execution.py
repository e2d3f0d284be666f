"""From an agreed batch to calls of the data plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reigen.engine.handles import Outcome, Task
from reigen.engine.messages import Kind, Operation, Response
from reigen.engine.on_device import execute_on_device, stand_in_on_device
from reigen.engine.team import Member, Team, reduction_of, row_elements, rows_of
from reigen.kernels.reduce import neutral_of
from reigen.planes.adasum import adasum
from reigen.planes.base import Array, Buffer, DataPlane
from reigen.types import DTYPES, ReduceOp


def execute(teams: dict[int, Team], batch: Sequence[Member], deadline: float) -> list[Outcome]:
    """Run a batch, all of one kind and process set; one outcome per member.

    Process sets that a batch makes or unmakes are entered into, or taken out of, ``teams``. Errors are those of
    `reigen.planes.base` and `reigen.planes.device`.
    """
    first, response, _ = batch[0]
    team = teams[first.process_set]
    if first.device:
        return execute_on_device(team, batch, deadline)
    if first.kind is Kind.ADD_SET:
        return [_add_set(teams, first, response, deadline)]
    if first.kind is Kind.REMOVE_SET:
        return [_remove_set(teams, first)]
    if first.kind is Kind.ALLREDUCE:
        return _allreduce(team, batch, deadline)
    return [_one(team, member, deadline) for member in batch]


def stand_in(team: Team, operation: Operation) -> Task:
    """Memory for an allreduce that this rank has joined out of: elements that leave the others' result as it is.

    Raises:
        CollectiveError: it takes place on devices, and this rank has used none so far.
    """
    if operation.device:
        return stand_in_on_device(team, operation)
    if operation.members:
        return Task(members=tuple(stand_in(team, member) for member in operation.members))
    neutral = neutral_of(DTYPES[operation.dtype], operation.op)
    array = np.full(operation.num_elements, neutral, DTYPES[operation.dtype].storage)
    return Task(array, array, array)


def _one(team: Team, member: Member, deadline: float) -> Outcome:
    """An operation that travels alone; the members of a group one after the other."""
    operation, response, task = member
    if not operation.members:
        return _SINGLE[operation.kind](team, operation, response, task, deadline)
    parts = zip(operation.members, response.members, task.members, strict=True)
    return Outcome(members=tuple(_one(team, part, deadline) for part in parts))


def _plane(team: Team) -> DataPlane:
    assert team.plane is not None, "only members of a process set hear of its operations"
    return team.plane


def _allreduce(team: Team, batch: Sequence[Member], deadline: float) -> list[Outcome]:
    """Tensors of one type and reduction go to the plane together, in their order."""
    runs: dict[tuple[str, ReduceOp, int, float, float, bool], list[Buffer]] = {}
    for operation, response, task in batch:
        for part, agreed, piece in zip(operation.parts, response.parts, task.parts, strict=True):
            assert isinstance(piece.source, np.ndarray)
            assert isinstance(piece.target, np.ndarray)
            buffer = Buffer(piece.source, piece.target, part.offset if agreed.in_place else -1)
            active = response.num_active if part.divide_by_active else 0
            key = (part.dtype, part.op, active or len(team.ranks), part.prescale, part.postscale, agreed.in_place)
            runs.setdefault(key, []).append(buffer)
    plane = _plane(team)
    for (dtype, op, count, prescale, postscale, _), buffers in runs.items():
        if op is ReduceOp.ADASUM:
            sources, targets = [b.source for b in buffers], [b.target for b in buffers]
            adasum(plane, sources, targets, DTYPES[dtype], prescale, postscale, deadline)
        else:
            plane.allreduce(buffers, reduction_of(dtype, op, count, prescale, postscale), deadline)
    return [_given(task) for _, _, task in batch]


def _given(task: Task) -> Outcome:
    """The outcome where the caller gave the output."""
    if task.members:
        return Outcome(members=tuple(Outcome(member.output) for member in task.members))
    return Outcome(task.output)


def _make(task: Task, shape: tuple[int, ...], operation: Operation) -> NDArray[Any]:
    if task.make_output is not None:
        output = task.make_output(shape)
        assert isinstance(output, np.ndarray)
        return output
    return np.empty(shape, DTYPES[operation.dtype].storage)


def _source(task: Task) -> Array:
    assert isinstance(task.source, np.ndarray)
    return task.source


def _allgather(team: Team, operation: Operation, response: Response, task: Task, deadline: float) -> Outcome:
    rows = response.sizes[0]
    width = row_elements(operation)
    output = _make(task, (sum(rows), *operation.shape[1:]), operation)
    _plane(team).allgather(_source(task), [r * width for r in rows], output.reshape(-1), deadline)
    return Outcome(output)


def _broadcast(team: Team, operation: Operation, response: Response, task: Task, deadline: float) -> Outcome:
    assert isinstance(task.target, np.ndarray)
    plane, root = _plane(team), team.ranks.index(operation.root)
    plane.broadcast(_source(task) if plane.rank == root else None, task.target, root, deadline)
    return Outcome(task.output)


def _alltoall(team: Team, operation: Operation, response: Response, task: Task, deadline: float) -> Outcome:
    width = row_elements(operation)
    plane = _plane(team)
    received = tuple(row[plane.rank] for row in response.sizes)
    output = _make(task, (sum(received), *operation.shape[1:]), operation)
    counts = [[n * width for n in row] for row in response.sizes]
    plane.alltoall(_source(task), counts, output.reshape(-1), deadline)
    return Outcome(output, received)


def _reducescatter(team: Team, operation: Operation, response: Response, task: Task, deadline: float) -> Outcome:
    plane = _plane(team)
    rows = rows_of(operation.shape[0], plane.size)
    width = row_elements(operation)
    output = _make(task, (rows[plane.rank], *operation.shape[1:]), operation)
    reduction = reduction_of(operation.dtype, operation.op, plane.size, operation.prescale, operation.postscale)
    plane.reducescatter(_source(task), [r * width for r in rows], output.reshape(-1), reduction, deadline)
    return Outcome(output)


def _reduce_to_owners(team: Team, operation: Operation, response: Response, task: Task, deadline: float) -> Outcome:
    plane, array = _plane(team), _source(task)
    reduction = reduction_of(operation.dtype, operation.op, plane.size, operation.prescale, operation.postscale)
    plane.reduce_to_owners(Buffer(array, array, operation.offset), operation.splits, reduction, deadline)
    return _given(task)


def _barrier(team: Team, operation: Operation, response: Response, task: Task, deadline: float) -> Outcome:
    """Nothing is left to do: it was announced because every rank has come."""
    return Outcome()


def _allocate(team: Team, operation: Operation, response: Response, task: Task, deadline: float) -> Outcome:
    return Outcome(region=_plane(team).allocate(operation.shape[0], deadline))


def _allocate_shared(team: Team, operation: Operation, response: Response, task: Task, deadline: float) -> Outcome:
    return Outcome(region=_plane(team).allocate_shared(operation.shape[0], deadline))


def _free(team: Team, operation: Operation, response: Response, task: Task, deadline: float) -> Outcome:
    _plane(team).free(operation.offset)
    return Outcome()


def _join(team: Team, operation: Operation, response: Response, task: Task, deadline: float) -> Outcome:
    """Every rank has joined."""
    return Outcome(value=response.value)


def _add_set(teams: dict[int, Team], operation: Operation, response: Response, deadline: float) -> Outcome:
    plane, device = _plane(teams[0]).split(operation.shape, deadline), teams[0].device
    beside = None if plane is None or device is None else device.beside(plane, operation.shape)
    teams[response.value] = Team(operation.shape, plane, beside)
    return Outcome(value=response.value)


def _remove_set(teams: dict[int, Team], operation: Operation) -> Outcome:
    teams.pop(operation.shape[0]).close()
    return Outcome()


_SINGLE = {
    Kind.ALLGATHER: _allgather,
    Kind.BROADCAST: _broadcast,
    Kind.ALLTOALL: _alltoall,
    Kind.REDUCESCATTER: _reducescatter,
    Kind.REDUCE_TO_OWNERS: _reduce_to_owners,
    Kind.BARRIER: _barrier,
    Kind.ALLOCATE: _allocate,
    Kind.ALLOCATE_SHARED: _allocate_shared,
    Kind.FREE: _free,
    Kind.JOIN: _join,
}
