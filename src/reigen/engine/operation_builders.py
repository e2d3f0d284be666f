"""Builders of `Operation`: a caller's arguments, checked. Pure; wrong arguments raise on this rank alone."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec import structs
from numpy.typing import NDArray

from reigen.backends.adasum import check_adasum
from reigen.backends.base import MemoryRegion
from reigen.backends.device import DeviceArray, HostOrDeviceArray
from reigen.engine.messages import JOIN_NAME, Operation, OperationKind
from reigen.engine.process_set import get_reduction
from reigen.errors import ArgumentError, UnsupportedError
from reigen.types import DTYPES, DType, ReduceOp

_MAX_NAME_BYTES = 512
#: How names that travel tell of a process set.
_SET_SUFFIX = re.compile(r" \(process set \d+\)$")


class ReductionSpec(NamedTuple):
    """Arithmetic of a reduction: ``postscale * op(prescale * x)``."""

    op: ReduceOp
    prescale: float
    postscale: float


AllreduceSpec = tuple[ReduceOp, float, float] | tuple[ReduceOp, float, float, int, bool]
#: Builds one collective's operation, without a name: of the tensor's shape and element type, the argument of the
#: collective's own (how it is reduced, the root, the splits), the ranks of the process set and its number.
OperationBuilder = Callable[[tuple[int, ...], str, Any, tuple[int, ...], int], Operation]


@functools.lru_cache(maxsize=4096)
def build_operation(
    build: OperationBuilder,
    shape: tuple[int, ...],
    dtype: str,
    argument: Any,
    ranks: tuple[int, ...],
    process_set: int,
    name: str | None,
    device: str,
) -> Operation:
    """Return a builder's operation, named, if it has a name. The same object again for the same call: training repeats.

    Raises:
        ArgumentError, UnsupportedTypeError, UnsupportedError: there is no such operation, or no such name.
    """
    operation = build(shape, dtype, argument, ranks, process_set)
    return structs.replace(operation, name="" if name is None else travelling_name(name, process_set), device=device)


@functools.lru_cache(maxsize=128)
def build_members(
    build: OperationBuilder,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[str, ...],
    argument: Any,
    ranks: tuple[int, ...],
    process_set: int,
    labels: tuple[str, ...],
) -> tuple[Operation, ...]:
    """`build_operation` for each tensor of a group, which may have labels. The same tuple again for the same call.

    Raises:
        ArgumentError, UnsupportedTypeError, UnsupportedError: likewise.
    """
    return tuple(
        build_operation(build, shape, dtype, argument, ranks, process_set, label, "")
        for shape, dtype, label in zip(shapes, dtypes, labels or (None,) * len(shapes), strict=True)
    )


def build_allreduce(
    shape: tuple[int, ...], dtype: str, reduction: AllreduceSpec, ranks: Sequence[int], process_set: int
) -> Operation:
    """Build an allreduce by ``(operator, prescale, postscale)``, perhaps with ``(offset, divide_by_active)`` behind."""
    op, prescale, postscale = reduction[:3]
    offset, divide_by_active = reduction[3:] or (-1, False)
    if op is not ReduceOp.ADASUM:
        get_reduction(dtype, op, len(ranks), prescale, postscale)
    elif process_set:
        raise UnsupportedError("op=Adasum works on all ranks only, not in a process set")
    else:
        check_adasum(DTYPES[dtype], len(ranks))
    return Operation(
        OperationKind.ALLREDUCE,
        "",
        dtype,
        shape,
        op,
        prescale,
        postscale,
        offset=offset,
        process_set=process_set,
        divide_by_active=divide_by_active,
    )


def build_broadcast(
    shape: tuple[int, ...], dtype: str, root_rank: int, ranks: Sequence[int], process_set: int
) -> Operation:
    """Build a broadcast from a rank of the set."""
    root = check_root(root_rank, ranks)
    return Operation(OperationKind.BROADCAST, "", dtype, shape, root=root, process_set=process_set)


def build_allgather(
    shape: tuple[int, ...], dtype: str, nothing: None, ranks: Sequence[int], process_set: int
) -> Operation:
    """Build an allgather."""
    if not shape:
        raise ArgumentError("allgather needs at least one dimension, got a scalar")
    return Operation(OperationKind.ALLGATHER, "", dtype, shape, process_set=process_set)


def build_alltoall(
    shape: tuple[int, ...], dtype: str, splits: Sequence[int] | None, ranks: Sequence[int], process_set: int
) -> Operation:
    """Build an alltoall with the rows for each rank of the set; None: equally many."""
    rows = resolve_splits(shape, splits, len(ranks))
    return Operation(OperationKind.ALLTOALL, "", dtype, shape, splits=rows, process_set=process_set)


def build_reducescatter(
    shape: tuple[int, ...], dtype: str, reduction: ReductionSpec, ranks: Sequence[int], process_set: int
) -> Operation:
    """Build a reducescatter by ``(operator, prescale, postscale)``."""
    op, prescale, postscale = reduction
    if op is ReduceOp.ADASUM:
        raise UnsupportedError("op=Adasum needs whole tensors: there is no reducescatter with ReduceOp.ADASUM")
    if not shape:  # a RuntimeError in Horovod, whose core finds it
        raise UnsupportedError("reducescatter needs at least one dimension, got a scalar")
    get_reduction(dtype, op, len(ranks), prescale, postscale)
    return Operation(OperationKind.REDUCESCATTER, "", dtype, shape, op, prescale, postscale, process_set=process_set)


def check_root(root_rank: int, ranks: Sequence[int]) -> int:
    """Accept a rank of the process set, and return it.

    Raises:
        ArgumentError: it is none.
    """
    if root_rank not in ranks:
        raise ArgumentError(f"root_rank must be one of the ranks {list(ranks)}, not {root_rank}")
    return root_rank


def build_allocation(nbytes: int, process_set: int, *, shared: bool) -> Operation:
    """An allocation of registered memory, without its name; ``shared``: once for all ranks of a host."""
    if nbytes < 1:
        raise ArgumentError(f"a region must have at least 1 byte, not {nbytes}")
    kind = OperationKind.ALLOCATE_SHARED if shared else OperationKind.ALLOCATE
    return Operation(kind, "", shape=(nbytes,), process_set=process_set)


@dataclass(frozen=True, slots=True)
class OwnerReduction:
    """Division of registered memory that is reduced to its owners.

    Attributes:
        region: in which the array lies; others read their owners' parts in its ``owned``.
        counts: for each owner, how many elements it gets; in their order, together all.
        op: operator; no Adasum.
        prescale: factor of each contribution.
        postscale: factor of the result.
    """

    region: MemoryRegion
    counts: tuple[int, ...]
    op: ReduceOp = ReduceOp.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0


def build_reduce_to_owners(
    array: NDArray[Any], dtype: DType, parts: OwnerReduction, size: int, process_set: int
) -> Operation:
    """A reduction of a part of registered memory to its owners, without its name.

    Raises:
        ArgumentError, UnsupportedTypeError: there is no such reduction, or the parts are none of the array.
    """
    get_reduction(dtype.name, parts.op, size, parts.prescale, parts.postscale)
    if len(parts.counts) != len(parts.region.owned) or sum(parts.counts) != array.size:
        raise ArgumentError(f"{list(parts.counts)}: not a part of {array.size} elements for each owner that there is")
    return Operation(
        OperationKind.REDUCE_TO_OWNERS,
        "",
        dtype.name,
        array.shape,
        parts.op,
        parts.prescale,
        parts.postscale,
        splits=parts.counts,
        offset=region_offset(parts.region, array),
        process_set=process_set,
    )


def validate_ranks(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """The ranks of a process set in a job of ``size`` ranks, ascending."""
    members = tuple(sorted(map(int, ranks)))
    if not members or len(set(members)) < len(members) or not 0 <= members[0] <= members[-1] < size:
        raise ArgumentError(
            f"a process set needs different ranks from 0 to {size - 1}, at least one; got {list(ranks)}"
        )
    return members


def resolve_splits(shape: tuple[int, ...], splits: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """The rows that go to each of ``size`` ranks; without ``splits``, equally many."""
    if not shape:
        raise ArgumentError("alltoall needs at least one dimension, got a scalar")
    rows = shape[0]
    if splits is None:
        if rows % size:
            raise ArgumentError(f"alltoall without splits: {rows} rows cannot be divided equally among {size} ranks")
        return (rows // size,) * size
    if len(splits) != size or min(splits) < 0 or sum(splits) > rows:
        raise ArgumentError(
            f"splits must be {size} numbers of at least 0 that add up to at most {rows}, got {list(splits)}"
        )
    return tuple(map(int, splits))


def region_offset(region: MemoryRegion, array: HostOrDeviceArray) -> int:
    """Return where in its region an array begins, as an `Operation` holds it."""
    if isinstance(array, DeviceArray):
        raise ArgumentError("registered memory is the host's, this array lies in a device's")
    begin = array.ctypes.data - region.array.ctypes.data
    if not 0 <= begin <= region.nbytes - array.nbytes:
        raise ArgumentError("the array does not lie in the region")
    return region.offset + begin


@functools.lru_cache(maxsize=4096)
def travelling_name(name: str, process_set: int) -> str:
    """Return the name that travels: those of different process sets may be alike.

    Raises:
        ArgumentError: no tensor may be called so.
    """
    if not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
        raise ArgumentError(f"a name must have 1 to {_MAX_NAME_BYTES} bytes, got {len(name.encode())}")
    if name == JOIN_NAME or _SET_SUFFIX.search(name):
        raise ArgumentError(f"the name {name!r} could be taken for another's; leave out the parenthesis")
    return qualify_name(name, process_set)


def qualify_name(name: str, process_set: int) -> str:
    """Return a name that has been checked, with its process set."""
    return f"{name} (process set {process_set})" if process_set else name
