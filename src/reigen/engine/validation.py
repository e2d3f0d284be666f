"""Validation of operations: of one rank's by itself, and of all ranks' under one name against each other. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from reigen.engine.messages import JOIN_NAME, MAX_NOTE_BYTES, Operation, OperationKind, Response
from reigen.types import DTYPES

#: ``(what is wrong, what to show of each rank's operation)``
Mismatch = tuple[str, Callable[[Operation], str]]

_ALL = tuple(OperationKind)
_SAME_SHAPE = (
    OperationKind.ALLREDUCE,
    OperationKind.BROADCAST,
    OperationKind.REDUCESCATTER,
    OperationKind.ALLOCATE,
    OperationKind.REDUCE_TO_OWNERS,
    OperationKind.ALLOCATE_SHARED,
)
_REDUCE_KINDS = (OperationKind.ALLREDUCE, OperationKind.REDUCESCATTER, OperationKind.REDUCE_TO_OWNERS)
_SAME_REGION = (OperationKind.FREE, OperationKind.REDUCE_TO_OWNERS)
_GATHER_KINDS = (OperationKind.ALLGATHER, OperationKind.ALLTOALL)
_PROCESS_SET_KINDS = (OperationKind.ADD_SET, OperationKind.REMOVE_SET)


@dataclass(frozen=True, slots=True)
class _Check:
    """Rule of validation: what must be equal among operations of some kinds, the error otherwise, and its text."""

    kinds: tuple[OperationKind, ...]
    value: Callable[[Operation], object]
    what: str
    show: Callable[[Operation], str]


#: How a tensor without a device of its own is shown.
_HOST = "cpu (or staged there: see `reigen check`)"

#: Horovod's order, after the groups, which have no dtype of their own.
_CHECKS = (
    _Check(_ALL, lambda o: o.process_set, "the process sets differ", lambda o: f"process set {o.process_set}"),
    _Check(
        _ALL,
        lambda o: len(o.members),
        "the groups differ",
        lambda o: f"{len(o.members)} tensors" if o.members else "no group",
    ),
    _Check(_ALL, lambda o: o.dtype, "the data types differ", lambda o: o.dtype or "no elements"),
    _Check(_ALL, lambda o: o.kind, "the operations differ", lambda o: o.kind.name.lower()),
    _Check(_ALL, lambda o: o.device, "the devices differ", lambda o: o.device or _HOST),
    _Check(_SAME_SHAPE, lambda o: o.shape, "the shapes differ", lambda o: str(list(o.shape))),
    _Check(
        _REDUCE_KINDS,
        lambda o: (str(o.prescale), str(o.postscale)),  # a NaN is the same everywhere
        "the scale factors differ",
        lambda o: f"prescale {o.prescale}, postscale {o.postscale}",
    ),
    _Check(_REDUCE_KINDS, lambda o: o.op, "the reduction operators differ", lambda o: o.op.name.lower()),
    _Check(
        (OperationKind.ALLREDUCE,),
        lambda o: o.divide_by_active,
        "the divisors differ",
        lambda o: "ranks that have data" if o.divide_by_active else "all ranks",
    ),
    _Check(
        _GATHER_KINDS,
        lambda o: o.shape[1:],
        "the shapes differ in more than the first dimension",
        lambda o: str(list(o.shape)),
    ),
    _Check((OperationKind.BROADCAST,), lambda o: o.root, "the root ranks differ", lambda o: f"root_rank {o.root}"),
    _Check(
        (OperationKind.EXCHANGE,),
        lambda o: o.root,
        "the root ranks differ",
        lambda o: "no root_rank" if o.root < 0 else f"root_rank {o.root}",
    ),
    _Check(_SAME_REGION, lambda o: o.offset, "the regions differ", lambda o: f"offset {o.offset}"),
    _Check(
        (OperationKind.REDUCE_TO_OWNERS,),
        lambda o: o.splits,
        "the owners' parts differ",
        lambda o: f"{list(o.splits)} elements",
    ),
    _Check(_PROCESS_SET_KINDS, lambda o: o.shape, "the process sets differ", lambda o: str(list(o.shape))),
)


_TYPED_KINDS = (
    OperationKind.ALLREDUCE,
    OperationKind.ALLGATHER,
    OperationKind.BROADCAST,
    OperationKind.ALLTOALL,
    OperationKind.REDUCESCATTER,
    OperationKind.REDUCE_TO_OWNERS,
)
_GROUPABLE_KINDS = (OperationKind.ALLREDUCE, OperationKind.ALLGATHER, OperationKind.REDUCESCATTER)
_ROWWISE_KINDS = (
    OperationKind.ALLGATHER,
    OperationKind.ALLTOALL,
    OperationKind.REDUCESCATTER,
    OperationKind.ALLOCATE,
    OperationKind.ALLOCATE_SHARED,
)
_GLOBAL_KINDS = (OperationKind.JOIN, *_PROCESS_SET_KINDS)


def validate_operation(operation: Operation, rank: int, ranks: Sequence[int]) -> str | None:
    """Return the error in an operation of ``rank`` by itself; None where there is none.

    What a front end submits has been checked there; this is for what it has overlooked, so that no rank fails in the
    middle of a collective.

    Args:
        operation: what was submitted.
        rank: who submitted it.
        ranks: the ranks of its process set.
    """
    kind = operation.kind
    if rank not in ranks:
        return f"rank {rank} is not in process set {operation.process_set}, whose ranks are {list(ranks)}"
    if kind in _GLOBAL_KINDS and operation.process_set:
        return f"{kind.name.lower()} is for all ranks, not for a process set"
    if (kind is OperationKind.JOIN) != (operation.name == JOIN_NAME):
        return f"only a join can be called {JOIN_NAME!r}"
    if not operation.members:
        return _validate_single(operation, ranks)
    if kind not in _GROUPABLE_KINDS:
        return f"there are no groups of {kind.name.lower()}"
    for member in operation.members:
        if member.members or (member.kind, member.process_set) != (kind, operation.process_set):
            return "the members of a group must be of its kind and process set, and no groups themselves"
    return next(filter(None, (_validate_single(member, ranks) for member in operation.members)), None)


def _validate_single(operation: Operation, ranks: Sequence[int]) -> str | None:
    kind, shape = operation.kind, operation.shape
    if kind in _TYPED_KINDS and operation.dtype not in DTYPES:
        return f"there is no data type {operation.dtype!r}"
    if min(shape, default=0) < 0 or (kind in _ROWWISE_KINDS and not shape):
        return f"{kind.name.lower()} of shape {list(shape)}"
    if kind is OperationKind.EXCHANGE and len(operation.payload) > MAX_NOTE_BYTES:
        return f"an exchange of {len(operation.payload)} bytes; at most {MAX_NOTE_BYTES} are allowed"
    if kind is OperationKind.BROADCAST and operation.root not in ranks:
        return f"the root rank {operation.root} is not one of the ranks {list(ranks)}"
    if kind is OperationKind.ALLTOALL:
        splits = operation.splits
        if len(splits) != len(ranks) or min(splits) < 0 or sum(splits) > shape[0]:
            return f"splits {list(splits)} of {shape[0]} rows among {len(ranks)} ranks"
    if kind is OperationKind.REDUCE_TO_OWNERS and (
        operation.offset < 0 or min(operation.splits, default=-1) < 0 or sum(operation.splits) != operation.num_elements
    ):
        return f"parts of {list(operation.splits)} elements, at offset {operation.offset}, of {operation.num_elements}"
    if kind is OperationKind.ADD_SET and (not shape or shape[-1] >= len(ranks) or sorted(set(shape)) != list(shape)):
        return f"a process set of the ranks {list(shape)} out of {len(ranks)}"
    if kind is OperationKind.REMOVE_SET and (len(shape) != 1 or not shape[0]):
        return f"the process set {list(shape)} cannot be removed"
    return None


def find_mismatch(operations: Mapping[int, Operation]) -> Mismatch | None:
    """The first thing in which the ranks' operations differ, in Horovod's order of checks; None when they agree."""
    first, *rest = (operations[rank] for rank in sorted(operations))
    labels = [[member.name for member in operation.members] for operation in operations.values()]
    for index, column in enumerate(itertools.zip_longest(*labels, fillvalue="")):
        if len(set(column)) > 1:
            return f"the tensors differ in member {index} of the group", _show_label(index)
    for check in _CHECKS:
        if first.kind in check.kinds and any(check.value(other) != check.value(first) for other in rest):
            return check.what, check.show
    return _find_member_mismatch(operations) if first.members else None


def _find_member_mismatch(operations: Mapping[int, Operation]) -> Mismatch | None:
    """The first thing in which the members of groups of equal length differ."""
    for index in range(len(operations[min(operations)].members)):
        differing = find_mismatch({rank: operation.members[index] for rank, operation in operations.items()})
        if differing is not None:
            what, show = differing
            return f"{what} in member {index} of the group", _show_member(show, index)
    return None


def _show_label(index: int) -> Callable[[Operation], str]:
    return lambda o: o.members[index].name or "a tensor without a name" if index < len(o.members) else "no tensor"


def _show_member(show: Callable[[Operation], str], index: int) -> Callable[[Operation], str]:
    return lambda operation: show(operation.members[index])


def build_response(operations: Mapping[int, Operation], slot: int) -> Response:
    """Return the agreement of operations that fit each other."""
    ordered = [operations[rank] for rank in sorted(operations)]
    first = ordered[0]
    if first.members:
        columns = zip(*(operation.members for operation in ordered), strict=True)
        members = tuple(build_response(dict(enumerate(column)), -1) for column in columns)
        return Response(first.name, slot, process_set=first.process_set, members=members)
    sizes: tuple[tuple[int, ...], ...] = ()
    if first.kind is OperationKind.ALLGATHER:
        sizes = (tuple(o.shape[0] for o in ordered),)
    elif first.kind is OperationKind.ALLTOALL:
        sizes = tuple(o.splits for o in ordered)
    in_place = first.offset >= 0 and all(o.offset == first.offset for o in ordered)
    payloads = tuple(o.payload for o in ordered) if first.kind is OperationKind.EXCHANGE else ()
    return Response(first.name, slot, sizes, in_place, first.process_set, payloads=payloads)
