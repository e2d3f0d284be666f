"""What a caller asks for, checked and put as an `Operation`. Pure; wrong arguments raise on this rank alone."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from reigen.engine.messages import JOIN_NAME, Kind, Operation
from reigen.engine.team import reduction_of
from reigen.errors import ArgumentError, UnsupportedError
from reigen.planes.adasum import check_adasum
from reigen.planes.base import Region
from reigen.planes.device import DeviceArray, Memory
from reigen.types import DType, ReduceOp

_MAX_NAME_BYTES = 512
#: How names that travel tell of a process set.
_OF_A_SET = re.compile(r" \(process set \d+\)$")


def check_reduction(dtype: DType, op: ReduceOp, size: int, prescale: float, postscale: float, process_set: int) -> None:
    """Accept a reduction that there is.

    Raises:
        ArgumentError, UnsupportedTypeError, UnsupportedError: there is none like that.
    """
    if op is not ReduceOp.ADASUM:
        reduction_of(dtype.name, op, size, prescale, postscale)
        return
    if process_set:
        raise UnsupportedError("op=Adasum works on all ranks only, not in a process set")
    check_adasum(dtype, size)


def allgather_of(source: Memory, dtype: DType, process_set: int) -> Operation:
    """An allgather, without its name."""
    if not source.ndim:
        raise ArgumentError("allgather needs at least one dimension, got a scalar")
    return Operation(Kind.ALLGATHER, "", dtype.name, source.shape, process_set=process_set)


def reducescatter_of(
    source: Memory,
    dtype: DType,
    reduction: tuple[ReduceOp, float, float],
    size: int,
    process_set: int,
) -> Operation:
    """A reducescatter with ``(operator, prescale, postscale)``, without its name."""
    if not source.ndim:  # a RuntimeError in Horovod, whose core finds it
        raise UnsupportedError("reducescatter needs at least one dimension, got a scalar")
    reduction_of(dtype.name, reduction[0], size, *reduction[1:])
    return Operation(Kind.REDUCESCATTER, "", dtype.name, source.shape, *reduction, process_set=process_set)


def allocation_of(nbytes: int, process_set: int, *, shared: bool) -> Operation:
    """An allocation of registered memory, without its name; ``shared``: once for all ranks of a host."""
    if nbytes < 1:
        raise ArgumentError(f"a region must have at least 1 byte, not {nbytes}")
    kind = Kind.ALLOCATE_SHARED if shared else Kind.ALLOCATE
    return Operation(kind, "", shape=(nbytes,), process_set=process_set)


@dataclass(frozen=True, slots=True)
class Parts:
    """How registered memory is reduced to its owners.

    Attributes:
        region: in which the array lies; others read their owners' parts in its ``owned``.
        counts: for each owner, how many elements it gets; in their order, together all.
        op: operator; no Adasum.
        prescale: factor of each contribution.
        postscale: factor of the result.
    """

    region: Region
    counts: tuple[int, ...]
    op: ReduceOp = ReduceOp.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0


def reduction_to_owners(array: NDArray[Any], dtype: DType, parts: Parts, size: int, process_set: int) -> Operation:
    """A reduction of a part of registered memory to its owners, without its name.

    Raises:
        ArgumentError, UnsupportedTypeError: there is no such reduction, or the parts are none of the array.
    """
    reduction_of(dtype.name, parts.op, size, parts.prescale, parts.postscale)
    if len(parts.counts) != len(parts.region.owned) or sum(parts.counts) != array.size:
        raise ArgumentError(f"{list(parts.counts)}: not a part of {array.size} elements for each owner that there is")
    return Operation(
        Kind.REDUCE_TO_OWNERS,
        "",
        dtype.name,
        array.shape,
        parts.op,
        parts.prescale,
        parts.postscale,
        splits=parts.counts,
        offset=offset_in(parts.region, array),
        process_set=process_set,
    )


def members_of(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """The ranks of a process set in a job of ``size`` ranks, ascending."""
    members = tuple(sorted(map(int, ranks)))
    if not members or len(set(members)) < len(members) or not 0 <= members[0] <= members[-1] < size:
        raise ArgumentError(
            f"a process set needs different ranks from 0 to {size - 1}, at least one; got {list(ranks)}"
        )
    return members


def splits_of(source: Memory, splits: Sequence[int] | None, size: int) -> tuple[int, ...]:
    """The rows that go to each of ``size`` ranks; without ``splits``, equally many."""
    if not source.ndim:
        raise ArgumentError("alltoall needs at least one dimension, got a scalar")
    rows = source.shape[0]
    if splits is None:
        if rows % size:
            raise ArgumentError(f"alltoall without splits: {rows} rows cannot be divided equally among {size} ranks")
        return (rows // size,) * size
    if len(splits) != size or min(splits) < 0 or sum(splits) > rows:
        raise ArgumentError(
            f"splits must be {size} numbers of at least 0 that add up to at most {rows}, got {list(splits)}"
        )
    return tuple(map(int, splits))


def offset_in(region: Region, array: Memory) -> int:
    """Where an array that lies in a region begins, as an `Operation` tells it."""
    if isinstance(array, DeviceArray):
        raise ArgumentError("registered memory is the host's, this array lies in a device's")
    begin = array.ctypes.data - region.array.ctypes.data
    if not 0 <= begin <= region.nbytes - array.nbytes:
        raise ArgumentError("the array does not lie in the region")
    return region.offset + begin


def checked_name(name: object) -> str:
    """``name``, if a tensor may be called so; some scripts number their tensors."""
    return _checked(str(name))


@functools.lru_cache(maxsize=4096)
def _checked(name: str) -> str:
    if not 0 < len(name.encode()) <= _MAX_NAME_BYTES:
        raise ArgumentError(f"a name must have 1 to {_MAX_NAME_BYTES} bytes, got {len(name.encode())}")
    if name == JOIN_NAME or _OF_A_SET.search(name):
        raise ArgumentError(f"the name {name!r} could be taken for another's; leave out the parenthesis")
    return name


def in_set(name: str, process_set: int) -> str:
    """The name that travels: those of different process sets may be alike."""
    return f"{name} (process set {process_set})" if process_set else name
