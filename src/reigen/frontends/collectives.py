"""Every collective, for the tensors of any framework: argument rules, then adapter and context.

All of them submit and return a :class:`Pending` at once; ``blocking=True`` promises that the caller waits for it next,
which saves waking another thread. Wrong arguments raise :class:`~reigen.errors.ArgumentError` (or
:class:`~reigen.errors.UnsupportedTypeError`) on the calling rank alone, before anything is sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from reigen.errors import ArgumentError
from reigen.frontends.adapter import Array, Tensor, TensorAdapter, as_rows, empty_like
from reigen.types import GLOBAL_PROCESS_SET, ProcessSet, ReduceOp

if TYPE_CHECKING:
    from reigen.context import Context, Handle, Outcome

#: The operators by Horovod's names and numbers.
Average, Sum, Min, Max, Product = 0, 1, 3, 4, 5

Result = TypeVar("Result")
Other = TypeVar("Other")


class Pending(Generic[Result]):
    """A collective that has been submitted."""

    __slots__ = ("_deliver", "_handle")

    def __init__(self, handle: Handle, deliver: Callable[[Outcome], Result]) -> None:
        self._handle = handle
        self._deliver: Callable[[Outcome], Result] | None = deliver

    def poll(self) -> bool:
        """Whether :meth:`wait` would return without blocking."""
        return self._deliver is None or self._handle.poll()

    def wait(self) -> Result | None:
        """Wait and take the result. It is handed out once; later calls return None.

        Raises:
            CollectiveError: the operation failed.
        """
        deliver, self._deliver = self._deliver, None
        if deliver is None:
            return None
        return deliver(self._handle.wait())

    def take(self) -> Result:
        """`wait` for whoever submitted it himself and is therefore the first."""
        result = self.wait()
        assert result is not None, "the first to wait gets the result"
        return result

    def then(self, change: Callable[[Result], Other]) -> Pending[Other]:
        """The same collective with ``change`` applied to its result; this object gives no result any more."""
        deliver, self._deliver = self._deliver, None
        assert deliver is not None, "the result has not been taken"
        return Pending(self._handle, lambda outcome: change(deliver(outcome)))


def poll(handle: Pending[Any]) -> bool:
    """Whether ``synchronize(handle)`` would return without blocking."""
    return not isinstance(handle, Pending) or handle.poll()


def synchronize(handle: Pending[Any]) -> Any:
    """Wait for an asynchronous collective and return its result; None for an unknown or already synchronized handle.

    Raises:
        CollectiveError: it failed (also named HorovodInternalError).
    """
    return handle.wait() if isinstance(handle, Pending) else None


def choose_op(average: bool | None, op: int | None) -> ReduceOp:
    """The operator that the deprecated ``average`` and ``op`` mean together; Average if both are None.

    Raises:
        ArgumentError: both are given, or ``op`` is not an operator that exists.
    """
    if average is not None:
        if op is not None:
            raise ArgumentError("The op parameter supersedes average. Please provide only one of them.")
        warnings.warn("Parameter `average` is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    return check_op(ReduceOp.AVERAGE if op is None else op)


def check_op(op: int) -> ReduceOp:
    """``op`` as an operator.

    Raises:
        ArgumentError: there is no such operator, or it is Adasum.
    """
    try:
        chosen = ReduceOp(op)
    except ValueError:
        raise ArgumentError(f"op must be Average, Sum, Min, Max or Product, got {op!r}") from None
    if chosen is ReduceOp.ADASUM:
        raise ArgumentError("op=Adasum is not supported; use Average, Sum, Min, Max or Product")
    return chosen


def check_process_set(process_set: ProcessSet) -> None:
    """Accept the set of all ranks.

    Raises:
        ArgumentError: it is another one.
    """
    if process_set != GLOBAL_PROCESS_SET:
        raise ArgumentError(f"process_set must be global_process_set, got {process_set!r}")


class Collectives(Generic[Tensor]):
    """The collectives for one framework.

    Args:
        adapter: how the framework's tensors look as arrays.
        current: gives the current context; raises NotInitializedError if there is none.
    """

    def __init__(self, adapter: TensorAdapter[Tensor], current: Callable[[], Context]) -> None:
        self._adapter = adapter
        self._current = current

    def allreduce(
        self,
        tensor: Tensor,
        op: ReduceOp,
        name: str | None,
        prescale: float,
        postscale: float,
        *,
        in_place: bool = False,
        blocking: bool = False,
    ) -> Pending[Tensor]:
        """``postscale * op(prescale * tensor)`` over all ranks, into the tensor itself or a new one."""
        context, dtype = self._current(), self._adapter.dtype(tensor)
        source, aliases = self._adapter.array(tensor)
        # A private copy may as well receive the result.
        target = source if in_place or not aliases else empty_like(source)
        handle = context.allreduce(
            source,
            target,
            dtype,
            op=op,
            name=name,
            prescale=float(prescale),
            postscale=float(postscale),
            blocking=blocking,
        )
        if in_place:
            return Pending(handle, self._into(tensor, target, aliases))
        return Pending(handle, lambda _: self._adapter.wrap(target, tensor))

    def broadcast(
        self, tensor: Tensor, root_rank: int, name: str | None, *, in_place: bool = False, blocking: bool = False
    ) -> Pending[Tensor]:
        """The root's contents, into the tensor itself or a new one."""
        context, dtype = self._current(), self._adapter.dtype(tensor)
        check_root(root_rank, context.size)
        source, aliases = self._adapter.array(tensor)
        target = source if in_place or not aliases else empty_like(source)
        handle = context.broadcast(source, target, dtype, root_rank=root_rank, name=name, blocking=blocking)
        if in_place:
            return Pending(handle, self._into(tensor, target, aliases))
        return Pending(handle, lambda _: self._adapter.wrap(target, tensor))

    def allgather(self, tensor: Tensor, name: str | None, *, blocking: bool = False) -> Pending[Tensor]:
        """All tensors concatenated along dimension 0 in rank order; scalars become a vector of ``size`` elements."""
        context, dtype = self._current(), self._adapter.dtype(tensor)
        source, _ = self._adapter.array(tensor)
        handle = context.allgather(as_rows(source), dtype, name=name, blocking=blocking)
        return Pending(handle, lambda outcome: self._adapter.wrap(_array_of(outcome), tensor))

    def alltoall(
        self, tensor: Tensor, splits: Sequence[int] | None, name: str | None, *, blocking: bool = False
    ) -> Pending[tuple[Tensor, tuple[int, ...]]]:
        """Row block i goes to rank i: what this rank received in rank order, and the rows that came from each rank."""
        context, dtype = self._current(), self._adapter.dtype(tensor)
        rows = check_splits(splits, self._adapter.shape(tensor), context.size)
        source, _ = self._adapter.array(tensor)
        handle = context.alltoall(source[: sum(rows)], dtype, splits=rows, name=name, blocking=blocking)
        return Pending(
            handle, lambda outcome: (self._adapter.wrap(_array_of(outcome), tensor), tuple(outcome.received_splits))
        )

    def reducescatter(
        self,
        tensor: Tensor,
        op: ReduceOp,
        name: str | None,
        prescale: float,
        postscale: float,
        *,
        blocking: bool = False,
    ) -> Pending[Tensor]:
        """This rank's rows of the reduced tensor; the first ``rows % size`` ranks get one row more."""
        context, dtype = self._current(), self._adapter.dtype(tensor)
        if not self._adapter.shape(tensor):
            raise ArgumentError("reducescatter needs a tensor with at least one dimension, got a scalar")
        source, _ = self._adapter.array(tensor)
        handle = context.reducescatter(
            source, dtype, op=op, name=name, prescale=float(prescale), postscale=float(postscale), blocking=blocking
        )
        return Pending(handle, lambda outcome: self._adapter.wrap(_array_of(outcome), tensor))

    def barrier(self, name: str | None = None) -> None:
        """Return when every rank has come here."""
        self._current().barrier(name=name, blocking=True).wait()

    def _into(self, tensor: Tensor, array: Array, aliases: bool) -> Callable[[Outcome], Tensor]:
        def deliver(_: Outcome) -> Tensor:
            if aliases:
                self._adapter.modified(tensor)
            else:
                self._adapter.write(tensor, array)
            return tensor

        return deliver


def check_root(root_rank: object, size: int) -> None:
    """Accept a rank of the job.

    Raises:
        ArgumentError: it is not one.
    """
    if not isinstance(root_rank, (int, np.integer)) or not 0 <= root_rank < size:
        raise ArgumentError(f"root_rank must be a rank of this job, 0 to {size - 1}, got {root_rank!r}")


def check_splits(splits: Sequence[int] | None, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The rows that go to each rank.

    Args:
        splits: as the user gave them, or None for equal parts.
        shape: of the tensor that is to be split along dimension 0.
        size: number of ranks.

    Raises:
        ArgumentError: they do not fit the tensor or the number of ranks.
    """
    if not shape:
        raise ArgumentError("alltoall needs a tensor with at least one dimension, got a scalar")
    if splits is None:
        if shape[0] % size:
            raise ArgumentError(f"alltoall without splits: dimension 0 ({shape[0]}) must be divisible by {size} ranks")
        return (shape[0] // size,) * size
    rows = tuple(int(split) for split in splits)
    if len(rows) != size:
        raise ArgumentError(f"alltoall splits must have one entry a rank: {size}, got {len(rows)}")
    if min(rows) < 0 or sum(rows) > shape[0]:
        raise ArgumentError(
            f"alltoall splits must not be negative, nor add up to more than dimension 0 ({shape[0]}), got {rows}"
        )
    return rows


def _array_of(outcome: Outcome) -> Array:
    assert outcome.array is not None, "the operation has a result"
    return outcome.array
