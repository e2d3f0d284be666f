"""The collectives on NumPy arrays: what `import reigen` offers.

Arrays may be of any shape and layout; scalars and whatever ``numpy.asarray`` takes are accepted too, except by the
in-place forms. Element types: uint8, int8, uint16, int16, int32, int64, float16, float32, float64 and bool. The rules
and errors are those of `reigen.torch`; nothing here is differentiable.

Example, in a job of one rank:
    >>> import numpy as np
    >>> import reigen
    >>> _ = reigen.init()
    >>> reigen.allreduce(np.array([1.0, 2.0]), op=reigen.Sum)
    array([1., 2.])
    >>> reigen.shutdown()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from reigen.errors import UnsupportedTypeError
from reigen.frontends.collectives import Collectives, Pending, check_op, check_process_set, choose_op
from reigen.types import DTYPES, GLOBAL_PROCESS_SET, DType, ProcessSet

if TYPE_CHECKING:
    from reigen.context import Context

Average, Sum, Min, Max, Product = 0, 1, 3, 4, 5

#: All ranks of the job.
global_process_set = GLOBAL_PROCESS_SET

Array = NDArray[Any]
Handle = Pending[Any]
_T = TypeVar("_T")


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
        return contiguous, np.shares_memory(contiguous, tensor) if tensor.size else False

    def wrap(self, array: Array, like: Array) -> Array:
        """See `TensorAdapter.wrap`."""
        return array

    def write(self, tensor: Array, array: Array) -> None:
        """See `TensorAdapter.write`."""
        tensor[...] = array

    def modified(self, tensor: Array) -> None:
        """See `TensorAdapter.modified`."""


def init() -> Context:
    """Join the job that the launcher speaks of; alone if there is none. Does nothing when already in it.

    Raises:
        ConfigError: the environment is contradictory.
        DeadlineError: other ranks did not come; names them.
    """
    from reigen import context

    return context.init()


def shutdown() -> None:
    """Leave the job; `init` joins again. Does nothing outside one. Runs by itself when the process ends."""
    from reigen import context

    context.shutdown()


def is_initialized() -> bool:
    """Whether this process is in a job. Never raises."""
    from reigen import context

    return context.is_initialized()


def _current() -> Context:
    from reigen import context

    return context.current()


def rank() -> int:
    """Number of this process in the job, from 0. Before `init`: NotInitializedError, as from all that follow."""
    return _current().rank


def size() -> int:
    """Processes in the job."""
    return _current().size


def local_rank() -> int:
    """Number of this process among those of its host, from 0."""
    return _current().local_rank


def local_size() -> int:
    """Processes on this host."""
    return _current().local_size


def cross_rank() -> int:
    """Number of this host among the hosts that have this local rank."""
    return _current().cross_rank


def cross_size() -> int:
    """How many hosts have this local rank."""
    return _current().cross_size


_COLLECTIVES: Collectives[Array] = Collectives(_NumpyAdapter(), _current)


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
    return _sure(allreduce_async(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait())


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
    return _sure(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait())


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
    return _COLLECTIVES.allreduce(_array(tensor), chosen, name, prescale_factor, postscale_factor, in_place=True)


def allgather(tensor: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> Array:
    """All ranks' arrays, concatenated along dimension 0 in rank order; that dimension may differ between ranks."""
    return _sure(allgather_async(tensor, name, process_set).wait())


def allgather_async(tensor: ArrayLike, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Begin `allgather`."""
    check_process_set(process_set)
    return _COLLECTIVES.allgather(np.asarray(tensor), name)


def broadcast(
    tensor: ArrayLike, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """The root's array, as a new array on every rank; shape and dtype are the same on all."""
    return _sure(broadcast_async(tensor, root_rank, name, process_set).wait())


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
    return _sure(broadcast_async_(tensor, root_rank, name, process_set).wait())


def broadcast_async_(
    tensor: Array, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin `broadcast_`. The array must not be touched before `synchronize`."""
    check_process_set(process_set)
    return _COLLECTIVES.broadcast(_array(tensor), root_rank, name, in_place=True)


def alltoall(
    tensor: ArrayLike,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array | tuple[Array, Array]:
    """``splits[r]`` rows go to rank r. Returns what came; if ``splits`` were given, with the rows from each rank."""
    output, received = _sure(alltoall_async(tensor, splits, name, process_set).wait())
    return output if splits is None else (output, received)


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
    return _sure(reducescatter_async(tensor, name, op, process_set, prescale_factor, postscale_factor).wait())


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


def poll(handle: Handle) -> bool:
    """Whether ``synchronize(handle)`` would return without blocking."""
    return not isinstance(handle, Pending) or handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for an asynchronous collective and return its result; None for an unknown or already synchronized handle.

    Raises:
        CollectiveError: it failed.
    """
    return handle.wait() if isinstance(handle, Pending) else None


def _array(tensor: object) -> Array:
    if not isinstance(tensor, np.ndarray):
        raise UnsupportedTypeError(f"an in-place collective needs a NumPy array, got {type(tensor).__name__}")
    return tensor


def _sure(result: _T | None) -> _T:
    assert result is not None, "a handle's first wait gives its result"
    return result
