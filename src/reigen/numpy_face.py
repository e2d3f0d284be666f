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

import numpy as np
from numpy.typing import ArrayLike

from reigen.context import current
from reigen.frontends.adapter import Array
from reigen.frontends.arrays import NumpyAdapter
from reigen.frontends.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from reigen.frontends.collectives import (
    Adasum,
    Average,
    Collectives,
    Max,
    Min,
    Product,
    Sum,
    poll,
    reducing,
    synchronize,
)
from reigen.frontends.functions import Handle, SharedFunctions, allgather_object, barrier, broadcast_object, join
from reigen.frontends.job import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from reigen.frontends.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

# The one list of what `import reigen` offers, but for __version__.
__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
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
    "broadcast_object",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

_COLLECTIVES: Collectives[Array] = Collectives(NumpyAdapter(), current)
_SHARED: SharedFunctions[ArrayLike, Array] = SharedFunctions(_COLLECTIVES)

allgather_async = _SHARED.allgather_async
allreduce_ = _SHARED.allreduce_
allreduce_async = _SHARED.allreduce_async
allreduce_async_ = _SHARED.allreduce_async_
broadcast_ = _SHARED.broadcast_
broadcast_async = _SHARED.broadcast_async
broadcast_async_ = _SHARED.broadcast_async_
grouped_allgather_async = _SHARED.grouped_allgather_async
grouped_allreduce_ = _SHARED.grouped_allreduce_
grouped_allreduce_async = _SHARED.grouped_allreduce_async
grouped_allreduce_async_ = _SHARED.grouped_allreduce_async_
grouped_reducescatter_async = _SHARED.grouped_reducescatter_async
reducescatter_async = _SHARED.reducescatter_async


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
        op: Average (the default), Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplied in before the reduction.
        postscale_factor: multiplied in after it.
        process_set: whose ranks take part; "all ranks" are its ranks then.

    Raises:
        ArgumentError, UnsupportedTypeError: an argument is wrong here; nothing was sent.
        CollectiveError: see `reigen.errors` for its kinds.
    """
    how = reducing(average, op, prescale_factor, postscale_factor)
    return _COLLECTIVES.allreduce(tensor, how, name, process_set, blocking=True).take()


def grouped_allreduce(
    tensors: Sequence[ArrayLike],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """`allreduce` of several arrays, which may differ in shape and dtype: all or none of them."""
    how = reducing(average, op, prescale_factor, postscale_factor)
    return _COLLECTIVES.grouped_allreduce(tensors, how, name, process_set, blocking=True).take()


def allgather(tensor: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """All ranks' arrays, concatenated along dimension 0 in rank order; that dimension may differ between ranks."""
    return _COLLECTIVES.allgather(tensor, name, process_set, blocking=True).take()


def grouped_allgather(
    tensors: Sequence[ArrayLike], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """`allgather` of several arrays: all or none of them."""
    return _COLLECTIVES.grouped_allgather(tensors, name, process_set, blocking=True).take()


def broadcast(
    tensor: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """The array of the root (a rank of the job), as a new array on every rank; shape and dtype are the same on all."""
    return _COLLECTIVES.broadcast(tensor, root_rank, name, process_set, blocking=True).take()


def alltoall(
    tensor: ArrayLike,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array | tuple[Array, Array]:
    """``splits[i]`` rows go to the i-th rank. Returns what came; if ``splits`` were given, with the rows from each."""
    output, received = _alltoall(tensor, splits, name, process_set, blocking=True).take()
    return output if splits is None else (output, received)


def alltoall_async(
    tensor: ArrayLike,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin `alltoall`; `synchronize` always gives the pair."""
    return _alltoall(tensor, splits, name, process_set, blocking=False)


def reducescatter(
    tensor: ArrayLike,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduce over all ranks and keep this rank's rows: the first ``rows % size`` ranks get one more. No Adasum."""
    how = reducing(None, op, prescale_factor, postscale_factor)
    return _COLLECTIVES.reducescatter(tensor, how, name, process_set, blocking=True).take()


def grouped_reducescatter(
    tensors: Sequence[ArrayLike],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """`reducescatter` of several arrays: all or none of them."""
    how = reducing(None, op, prescale_factor, postscale_factor)
    return _COLLECTIVES.grouped_reducescatter(tensors, how, name, process_set, blocking=True).take()


def _alltoall(
    tensor: ArrayLike, splits: Sequence[int] | None, name: str | None, process_set: ProcessSet, *, blocking: bool
) -> Handle:
    rows = None if splits is None else [int(rows) for rows in splits]
    pending = _COLLECTIVES.alltoall(tensor, rows, name, process_set, blocking=blocking)
    return pending.then(lambda result: (result[0], np.array(result[1], np.int32)))
