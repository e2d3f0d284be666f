"""The collectives on NumPy arrays: what `import reigen` offers.

Arrays may be of any shape and layout; scalars and whatever ``numpy.asarray`` takes are accepted too, except by the
in-place forms. Element types: uint8, int8, uint16, int16, int32, int64, float16, float32, float64 and bool. The rules
and errors are those of `reigen.torch`; nothing here is differentiable.

Example, in a job of one rank:
    >>> import numpy as np
    >>> import reigen
    >>> reigen.init()
    >>> reigen.allreduce(np.array([1.0, 2.0]), op=reigen.Sum)
    array([1., 2.])
    >>> reigen.shutdown()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reigen.context import current
from reigen.errors import ArgumentError, UnsupportedTypeError
from reigen.frontends.collectives import (
    Average,
    Collectives,
    Max,
    Min,
    Pending,
    Product,
    Sum,
    check_op,
    check_process_set,
    choose_op,
    poll,
    synchronize,
)
from reigen.frontends.job import (
    cross_rank,
    cross_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from reigen.types import DTYPES, GLOBAL_PROCESS_SET, DType, ProcessSet

__all__ = [
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "size",
    "synchronize",
]

#: All ranks of the job.
global_process_set = GLOBAL_PROCESS_SET

Array = NDArray[Any]
Handle = Pending[Any]


class _NumpyAdapter:
    """NumPy arrays, seen as themselves."""

    def dtype(self, tensor: Array) -> DType:
        """See `TensorAdapter.dtype`."""
        found = DTYPES.get(tensor.dtype.name)
        if found is None or found.storage != tensor.dtype:
            raise UnsupportedTypeError(f"Tensor type {tensor.dtype} is not supported.")
        return found

    def shape(self, tensor: Array) -> tuple[int, ...]:
        """See `TensorAdapter.shape`."""
        return tensor.shape

    def array(self, tensor: Array) -> tuple[Array, bool]:
        """See `TensorAdapter.array`."""
        contiguous = np.ascontiguousarray(tensor).reshape(tensor.shape)
        return contiguous, np.may_share_memory(contiguous, tensor)

    def wrap(self, array: Array, like: Array) -> Array:
        """See `TensorAdapter.wrap`."""
        return array

    def write(self, tensor: Array, array: Array) -> None:
        """See `TensorAdapter.write`."""
        tensor[...] = array

    def modified(self, tensor: Array) -> None:
        """See `TensorAdapter.modified`."""


_COLLECTIVES: Collectives[Array] = Collectives(_NumpyAdapter(), current)


def allreduce(
    tensor: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """``postscale * op(prescale * tensor)`` over all ranks, as a new array of the same shape and dtype.

    Args:
        tensor: the same shape and dtype on every rank.
        average: deprecated; use ``op``.
        name: matches the ranks' calls; without one they match in the order of submission.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor: multiplied in before the reduction.
        postscale_factor: multiplied in after it.
        process_set: only ``global_process_set``.

    Raises:
        ArgumentError, UnsupportedTypeError: an argument is wrong here; nothing was sent.
        CollectiveError: see `reigen.errors` for its kinds.
    """
    check_process_set(process_set)
    array, chosen = np.asarray(tensor), choose_op(average, op)
    return _COLLECTIVES.allreduce(array, chosen, name, prescale_factor, postscale_factor, blocking=True).take()


def allreduce_async(
    tensor: ArrayLike,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin `allreduce`; `synchronize` gives the result."""
    check_process_set(process_set)
    chosen = choose_op(average, op)
    return _COLLECTIVES.allreduce(np.asarray(tensor), chosen, name, prescale_factor, postscale_factor)


def allreduce_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """`allreduce` in place: the result is written into ``tensor``, which is returned."""
    check_process_set(process_set)
    chosen = choose_op(average, op)
    return _COLLECTIVES.allreduce(
        _writable(tensor), chosen, name, prescale_factor, postscale_factor, in_place=True, blocking=True
    ).take()


def allreduce_async_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin `allreduce_`. The array must not be touched before `synchronize`."""
    check_process_set(process_set)
    chosen = choose_op(average, op)
    return _COLLECTIVES.allreduce(_writable(tensor), chosen, name, prescale_factor, postscale_factor, in_place=True)


def allgather(tensor: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """All ranks' arrays, concatenated along dimension 0 in rank order; that dimension may differ between ranks."""
    check_process_set(process_set)
    return _COLLECTIVES.allgather(np.asarray(tensor), name, blocking=True).take()


def allgather_async(tensor: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Begin `allgather`."""
    check_process_set(process_set)
    return _COLLECTIVES.allgather(np.asarray(tensor), name)


def broadcast(
    tensor: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """The root's array, as a new array on every rank; shape and dtype are the same on all."""
    check_process_set(process_set)
    return _COLLECTIVES.broadcast(np.asarray(tensor), root_rank, name, blocking=True).take()


def broadcast_async(
    tensor: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin `broadcast`."""
    check_process_set(process_set)
    return _COLLECTIVES.broadcast(np.asarray(tensor), root_rank, name)


def broadcast_(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """`broadcast` in place: the root's contents are written into ``tensor``, which is returned."""
    check_process_set(process_set)
    return _COLLECTIVES.broadcast(_writable(tensor), root_rank, name, in_place=True, blocking=True).take()


def broadcast_async_(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin `broadcast_`. The array must not be touched before `synchronize`."""
    check_process_set(process_set)
    return _COLLECTIVES.broadcast(_writable(tensor), root_rank, name, in_place=True)


def alltoall(
    tensor: ArrayLike,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array | tuple[Array, Array]:
    """``splits[r]`` rows go to rank r. Returns what came; if ``splits`` were given, with the rows from each rank."""
    check_process_set(process_set)
    output, received = _COLLECTIVES.alltoall(np.asarray(tensor), splits, name, blocking=True).take()
    return output if splits is None else (output, np.array(received, np.int32))


def alltoall_async(
    tensor: ArrayLike,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin `alltoall`; `synchronize` always gives the pair."""
    check_process_set(process_set)
    pending = _COLLECTIVES.alltoall(np.asarray(tensor), splits, name)
    return pending.then(lambda result: (result[0], np.array(result[1], np.int32)))


def reducescatter(
    tensor: ArrayLike,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduce over all ranks and keep this rank's rows: the first ``rows % size()`` ranks get one more."""
    check_process_set(process_set)
    array, chosen = np.asarray(tensor), check_op(op)
    return _COLLECTIVES.reducescatter(array, chosen, name, prescale_factor, postscale_factor, blocking=True).take()


def reducescatter_async(
    tensor: ArrayLike,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin `reducescatter`."""
    check_process_set(process_set)
    return _COLLECTIVES.reducescatter(np.asarray(tensor), check_op(op), name, prescale_factor, postscale_factor)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has come here."""
    check_process_set(process_set)
    _COLLECTIVES.barrier()


def _writable(tensor: object) -> Array:
    if not isinstance(tensor, np.ndarray):
        raise UnsupportedTypeError(f"an in-place collective needs a NumPy array, got {type(tensor).__name__}")
    if not tensor.flags.writeable:
        raise ArgumentError("an in-place collective needs an array that may be written, and this one is read-only")
    return tensor
