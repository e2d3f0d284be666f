"""Every collective, for the tensors of any framework: adapter and context put together.

All of them submit and return a :class:`Pending` at once; ``blocking=True`` promises that the caller waits for it next,
which saves waking another thread. Wrong arguments raise :class:`~reigen.errors.ArgumentError` (or
:class:`~reigen.errors.UnsupportedTypeError`) on the calling rank alone, before anything is sent.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from reigen.errors import ArgumentError, UnsupportedError
from reigen.frontends.adapter import Tensor, TensorAdapter, as_rows
from reigen.frontends.lending import Given, give
from reigen.frontends.process_sets import ProcessSet, global_process_set, number_of
from reigen.planes.device import Memory
from reigen.types import ReduceOp

if TYPE_CHECKING:
    from reigen.context import Context, Handle, Outcome

#: The operators by Horovod's names and numbers.
Average, Sum, Adasum, Min, Max, Product = 0, 1, 2, 3, 4, 5

Result = TypeVar("Result")
Other = TypeVar("Other")


class Pending(Generic[Result]):
    """A collective that has been submitted: the handle of the asynchronous functions. No two of them are equal."""

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

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when `poll` is True: now, or on whichever thread completes it, which it must not keep."""
        self._handle.add_done_callback(callback)

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


class Reducing(NamedTuple):
    """How a reduction treats its elements: ``postscale * op(prescale * x)``."""

    op: ReduceOp
    prescale: float
    postscale: float


def reducing(average: bool | None, op: int | None, prescale: float, postscale: float) -> Reducing:
    """The reduction that the arguments of Horovod's functions ask for.

    Args:
        average: deprecated; use ``op``.
        op: an operator; Average if both are None.
        prescale: factor before the reduction.
        postscale: factor after it.

    Raises:
        ArgumentError: both are given, or ``op`` is not an operator that exists.
    """
    if average is None:
        return Reducing(check_op(ReduceOp.AVERAGE if op is None else op), float(prescale), float(postscale))
    if op is not None:
        raise ArgumentError("The op parameter supersedes average. Please provide only one of them.")
    warnings.warn("Parameter `average` is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
    return Reducing(ReduceOp.AVERAGE if average else ReduceOp.SUM, float(prescale), float(postscale))


def check_op(op: int) -> ReduceOp:
    """``op`` as an operator.

    Raises:
        ArgumentError: there is no such operator.
    """
    try:
        return ReduceOp(op)
    except ValueError:
        raise ArgumentError(f"op must be Average, Sum, Adasum, Min, Max or Product, got {op!r}") from None


class Collectives(Generic[Tensor]):
    """The collectives for one framework. What is no tensor is refused with UnsupportedTypeError.

    Args:
        adapter: how the framework's tensors look as arrays.
        current: gives the current context; raises NotInitializedError if there is none.
    """

    def __init__(self, adapter: TensorAdapter[Tensor], current: Callable[[], Context]) -> None:
        self._adapter = adapter
        self._current = current

    def allreduce(
        self,
        tensor: object,
        how: Reducing,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        *,
        in_place: bool = False,
        out: Tensor | None = None,
        blocking: bool = False,
    ) -> Pending[Tensor]:
        """The reduction over all ranks of the set, into the tensor itself, into ``out``, or into a new one."""
        context, members = self._current(), number_of(process_set)
        given = self._one(context, tensor, how, writable=in_place)
        target, deliver = self._receiver(context, given, in_place, out)
        handle = context.allreduce(
            given.source,
            target,
            given.dtype,
            op=how.op,
            name=name,
            prescale=how.prescale,
            postscale=how.postscale,
            process_set=members,
            blocking=blocking,
        )
        return Pending(handle, deliver)

    def grouped_allreduce(
        self,
        tensors: Iterable[object],
        how: Reducing,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        *,
        in_place: bool = False,
        outs: Sequence[Tensor] | None = None,
        blocking: bool = False,
    ) -> Pending[list[Tensor]]:
        """`allreduce` of several tensors, all or none of them; they may differ in dtype."""
        context, members = self._current(), number_of(process_set)
        group = self._group(context, tensors, how)
        receivers = [
            self._receiver(context, given, in_place, None if outs is None else outs[index])
            for index, given in enumerate(group)
        ]
        handle = context.grouped_allreduce(
            [given.source for given in group],
            [target for target, _ in receivers],
            [given.dtype for given in group],
            op=how.op,
            name=name,
            prescale=how.prescale,
            postscale=how.postscale,
            process_set=members,
            blocking=blocking,
        )
        return Pending(handle, _all_of([deliver for _, deliver in receivers]))

    def broadcast(
        self,
        tensor: object,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        *,
        in_place: bool = False,
        out: Tensor | None = None,
        blocking: bool = False,
    ) -> Pending[Tensor]:
        """The contents of the root (a rank of the job), into the tensor itself, into ``out``, or into a new one."""
        context, members = self._current(), number_of(process_set)
        given = self._one(context, tensor, writable=in_place)
        target, deliver = self._receiver(context, given, in_place, out)
        handle = context.broadcast(
            given.source,
            target,
            given.dtype,
            root_rank=as_root(root_rank),
            name=name,
            process_set=members,
            blocking=blocking,
        )
        return Pending(handle, deliver)

    def allgather(
        self,
        tensor: object,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        *,
        blocking: bool = False,
    ) -> Pending[Tensor]:
        """All tensors concatenated along dimension 0 in rank order; scalars become a vector of one element a rank."""
        context, members = self._current(), number_of(process_set)
        given = self._one(context, tensor)
        handle = context.allgather(
            as_rows(given.source), given.dtype, name=name, process_set=members, blocking=blocking
        )
        return Pending(handle, given.result)

    def grouped_allgather(
        self,
        tensors: Iterable[object],
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        *,
        blocking: bool = False,
    ) -> Pending[list[Tensor]]:
        """`allgather` of several tensors, all or none of them."""
        context, members = self._current(), number_of(process_set)
        group = self._group(context, tensors)
        handle = context.grouped_allgather(
            [as_rows(given.source) for given in group],
            [given.dtype for given in group],
            name=name,
            process_set=members,
            blocking=blocking,
        )
        return Pending(handle, _all_of([given.result for given in group]))

    def alltoall(
        self,
        tensor: object,
        splits: Sequence[int] | None = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        *,
        blocking: bool = False,
    ) -> Pending[tuple[Tensor, tuple[int, ...]]]:
        """Row block i goes to the set's i-th rank: what came, in rank order, and the rows that came from each rank."""
        context, members = self._current(), number_of(process_set)
        given = self._one(context, tensor)
        handle = context.alltoall(
            given.source, given.dtype, splits=splits, name=name, process_set=members, blocking=blocking
        )
        return Pending(handle, lambda outcome: (given.result(outcome), tuple(outcome.received_splits)))

    def reducescatter(
        self,
        tensor: object,
        how: Reducing,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        *,
        blocking: bool = False,
    ) -> Pending[Tensor]:
        """This rank's rows of the reduced tensor; the first ``rows % size`` ranks get one row more."""
        context, members = self._current(), number_of(process_set)
        given = self._one(context, tensor, how)
        handle = context.reducescatter(
            given.source,
            given.dtype,
            op=_row_wise(how.op),
            name=name,
            prescale=how.prescale,
            postscale=how.postscale,
            process_set=members,
            blocking=blocking,
        )
        return Pending(handle, given.result)

    def grouped_reducescatter(
        self,
        tensors: Iterable[object],
        how: Reducing,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        *,
        blocking: bool = False,
    ) -> Pending[list[Tensor]]:
        """`reducescatter` of several tensors, all or none of them."""
        context, members = self._current(), number_of(process_set)
        group = self._group(context, tensors, how)
        handle = context.grouped_reducescatter(
            [given.source for given in group],
            [given.dtype for given in group],
            op=_row_wise(how.op),
            name=name,
            prescale=how.prescale,
            postscale=how.postscale,
            process_set=members,
            blocking=blocking,
        )
        return Pending(handle, _all_of([given.result for given in group]))

    def _one(
        self, context: Context, tensor: object, how: Reducing | None = None, *, writable: bool = False
    ) -> Given[Tensor]:
        adapter = self._adapter
        accepted = adapter.given(tensor, writable=writable)
        if adapter.lender is None or adapter.lender.device(accepted) is None:
            return Given(adapter, accepted, adapter.dtype(accepted), *adapter.array(accepted))
        return give(adapter, context, [accepted], how)[0]

    def _receiver(
        self, context: Context, given: Given[Tensor], in_place: bool, out: Tensor | None
    ) -> tuple[Memory, Callable[[Outcome], Tensor]]:
        """The memory for a result of the shape of ``given``, and what makes a tensor of the outcome."""
        if out is not None:
            receiver = self._one(context, out, writable=True)
            return receiver.source, receiver.refilled
        return given.target(in_place), given.refilled if in_place else given.result

    def _group(self, context: Context, tensors: Iterable[object], how: Reducing | None = None) -> list[Given[Tensor]]:
        group = [self._adapter.given(tensor) for tensor in as_group(tensors)]
        devices = sorted({self._adapter.device(tensor) for tensor in group})
        if len(devices) > 1:
            raise UnsupportedError(f"the tensors of a group must be on one kind of device, got {', '.join(devices)}")
        return give(self._adapter, context, group, how)


def _all_of(deliver: Sequence[Callable[[Outcome], Tensor]]) -> Callable[[Outcome], list[Tensor]]:
    """The results of a group, each from its own outcome."""
    return lambda outcome: [one(member) for one, member in zip(deliver, outcome.members, strict=True)]


def as_group(tensors: Iterable[Other]) -> list[Other]:
    """What a user passed as a group, as a list.

    Raises:
        ArgumentError: it cannot be one.
    """
    if not isinstance(tensors, Iterable):
        raise ArgumentError(f"a group is a list of tensors, got {type(tensors).__name__}")
    return list(tensors)


def as_root(root_rank: object) -> int:
    """``root_rank`` as an integer.

    Raises:
        ArgumentError: it is none.
    """
    try:
        return operator.index(root_rank)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"root_rank must be a rank, got {root_rank!r}") from None


def check_root(root_rank: object, size: int) -> None:
    """Accept a rank of the job.

    Raises:
        ArgumentError: it is not one.
    """
    if not 0 <= as_root(root_rank) < size:
        raise ArgumentError(f"root_rank must be a rank of this job, 0 to {size - 1}, got {root_rank!r}")


def _row_wise(op: ReduceOp) -> ReduceOp:
    if op is ReduceOp.ADASUM:
        raise UnsupportedError("op=Adasum needs whole tensors: there is no reducescatter with it")
    return op
