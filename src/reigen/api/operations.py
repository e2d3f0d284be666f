"""The table of collectives: everything about each of them that is the same in every framework.

A row says what a collective is called, which arguments it has, in which forms it exists (of one tensor or of a group,
in place), how its `Operation` is built, and what its gradient is, as a rule in terms of collectives.
`reigen.api.functions` makes the functions of a framework of it, `reigen.api.collectives` runs them.

The gradients are Horovod's, so that those of existing models stay the same: backward of allgather and broadcast
*averages* over the ranks. Each is itself a collective, in the process set of forward, and can be differentiated again.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reigen import context
from reigen.api.adapter import TensorAdapter
from reigen.api.process_sets import ProcessSet, global_process_set, process_set_number
from reigen.engine import operation_builders
from reigen.engine.handle import Handle
from reigen.engine.messages import Operation
from reigen.engine.operation_builders import ReductionSpec
from reigen.errors import ArgumentError
from reigen.types import DTYPES, ReduceOp

#: The operators by Horovod's names and numbers.
Average, Sum, Adasum, Min, Max, Product = 0, 1, 2, 3, 4, 5

_REQUIRED = object()
_LINEAR = (ReduceOp.AVERAGE, ReduceOp.SUM)
_MEAN = ReductionSpec(ReduceOp.AVERAGE, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parameter of a function: its name, its type as text, its description, and its default if it has one."""

    name: str
    annotation: str
    doc: str
    default: Any = _REQUIRED

    @property
    def is_required(self) -> bool:
        """Return whether there is no default."""
        return self.default is _REQUIRED


class DifferentiableCall:
    """A call of a collective that a framework may differentiate; the rules of gradients know it.

    ``start`` submits a collective of one tensor or, if this is one of a group, of several. The collectives of backward
    are called ``name.grad``, and run in the process set of forward.

    Attributes:
        function: what was called, by its name.
        shapes: of its tensors of floating point.
        splits: of an alltoall, how many rows came from each rank, as a tensor; ``received_splits`` as numbers.
    """

    def __init__(
        self,
        start: Callable[..., Handle[Any]],
        adapter: TensorAdapter[Any],
        collective: Collective,
        grouped: bool,
        argument: Any,
        name: str | None,
        process_set: ProcessSet,
    ) -> None:
        self._start, self._collective, self._grouped, self._name = start, collective, grouped, name
        self.adapter, self.argument, self.process_set = adapter, argument, process_set
        self.function = f"grouped_{collective.name}" if grouped else collective.name
        self.gradient_name = None if name is None else f"{name}.grad"
        self.shapes: list[tuple[int, ...]] = []
        self.received_splits: tuple[int, ...] = ()
        self.splits: Any = None
        self._floating: list[bool] = []

    def apply(self, tensors: Sequence[Any]) -> list[Any]:
        """Run the collective, so that the framework can differentiate it where it wants to."""
        if self.adapter.needs_gradient(tensors):
            differentiate = self.adapter.differentiate_in_both_modes
            return differentiate(self._forward, self._backward, self._tangents, tensors)
        return self._forward(tensors)

    def run(self, collective: Collective, tensors: Sequence[Any], argument: Any) -> list[Any]:
        """Run a collective on gradients: of one tensor or of a group, as the call was."""
        return self._run(collective, tensors, argument, self.gradient_name)

    def _run(self, collective: Collective, tensors: Sequence[Any], argument: Any, name: str | None) -> list[Any]:
        start, adapter, grouped = self._start, self.adapter, self._grouped
        return DifferentiableCall(start, adapter, collective, grouped, argument, name, self.process_set).apply(tensors)

    def _forward(self, tensors: Sequence[Any]) -> list[Any]:
        value, adapter = tensors if self._grouped else tensors[0], self.adapter
        if self._collective.parse is not None:  # once: it may be an iterator
            self.argument = self._collective.parse(adapter, self.argument)
        result = self._start(self._collective, value, self.argument, self._name, self.process_set, blocking=True).wait()
        if self._collective.returns_splits:
            result, self.splits = result
            self.received_splits = tuple(adapter.array(self.splits)[0].tolist())
        accepted = [adapter.as_tensor(tensor) for tensor in tensors]
        self._floating = [adapter.dtype(tensor).is_floating for tensor in accepted]
        self.shapes = [tuple(tensor.shape) for tensor in itertools.compress(accepted, self._floating)]
        return list(result) if self._grouped else [result]

    def _backward(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients in the places of the tensors; None for those that are no floating-point numbers."""
        made = iter(self._collective.gradient(self, [*itertools.compress(gradients, self._floating)]))
        return [next(made) if is_floating else None for is_floating in self._floating]

    def _tangents(self, tangents: Sequence[Any]) -> list[Any]:
        """The tangents of the results: the collective of those of the tensors, with None in the same places."""
        if self._collective.reduces:
            _check_linear(self)
        name = None if self._name is None else f"{self._name}.jvp"
        floating = [*itertools.compress(tangents, self._floating)]
        made = iter(self._run(self._collective, floating, self.argument, name))
        return [next(made) if is_floating else None for is_floating in self._floating]


@dataclass(frozen=True, slots=True, eq=False)
class Collective:
    """One collective: a row of the table, from which every framework's functions are made.

    Attributes:
        name: of the function of one tensor that waits and returns a new one.
        summary: its docstring's first line, without the full stop.
        notes: more of its docstring.
        tensor: what its tensor is.
        parameters: what it takes besides the tensor, in Horovod's order.
        build: makes its `Operation`: one of `reigen.engine.operation_builders`.
        gradient: of the gradients of the results makes those of the tensors; of floating-point ones alone.
        reduces: its own argument is a `ReductionSpec`; then it has ``prescale_factor`` and ``postscale_factor``, too.
        grouped: there are functions of several tensors.
        in_place: the result has the tensor's shape, and there are functions that write it into the tensor.
        parse: makes of what the user gave as its own argument what ``build`` takes.
        takes_scalars: of which it makes one row.
        returns_splits: the result is a pair: the tensor, and how many rows of it came from each rank.
        returns: what its function returns, with the shape, as a noun phrase: for the docstring.
    """

    name: str
    summary: str
    tensor: str
    parameters: tuple[Parameter, ...]
    build: Callable[..., Operation]
    gradient: Callable[[DifferentiableCall, list[Any]], list[Any]]
    returns: str
    reduces: bool = False
    grouped: bool = False
    in_place: bool = False
    parse: Callable[[TensorAdapter[Any], Any], Any] | None = None
    takes_scalars: bool = False
    returns_splits: bool = False
    notes: str = ""

    def __post_init__(self) -> None:
        missing = {"prescale_factor", "postscale_factor"} - {parameter.name for parameter in self.parameters}
        if self.reduces and missing:
            raise AssertionError(f"{self.name} reduces, and so has the parameters {', '.join(sorted(missing))}")


# -- arguments --------------------------------------------------------------------------------------------------------


def as_group(tensors: Iterable[Any]) -> list[Any]:
    """Return a user's group of tensors as a list; raises ArgumentError if it cannot be one."""
    if not isinstance(tensors, Iterable):
        raise ArgumentError(f"a group is a list of tensors, got {type(tensors).__name__}")
    return list(tensors)


def as_root(root_rank: object) -> int:
    """``root_rank`` as an integer; raises ArgumentError if it is none."""
    try:
        return operator.index(root_rank)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"root_rank must be a rank, got {root_rank!r}") from None


def check_root(root_rank: object, size: int) -> None:
    """Raise ArgumentError unless ``root_rank`` is a rank of a job of so many."""
    if not 0 <= as_root(root_rank) < size:
        raise ArgumentError(f"root_rank must be a rank of this job, 0 to {size - 1}, got {root_rank!r}")


def as_splits(adapter: TensorAdapter[Any], splits: Any) -> tuple[int, ...] | None:
    """The rows for each rank: of a list, or of a vector of the framework's.

    Raises:
        ArgumentError: it is a tensor of another shape or element type, or not of whole numbers.
    """
    if splits is None:
        return None
    if not isinstance(splits, Sequence | Iterator | np.ndarray):
        tensor = adapter.as_tensor(splits)
        if len(tensor.shape) != 1 or adapter.dtype(tensor).name != "int32":
            raise ArgumentError(f"splits must be a 1-D int32 tensor, got {len(tensor.shape)}-D {tensor.dtype}")
        splits = adapter.array(tensor)[0]
    if isinstance(splits, np.ndarray) and splits.ndim != 1:
        raise ArgumentError(f"splits must be a list or a vector, got an array of {splits.ndim} dimensions")
    try:
        return tuple(map(operator.index, splits))
    except TypeError:
        raise ArgumentError(f"splits must be whole numbers, got {splits!r}") from None


# -- gradients --------------------------------------------------------------------------------------------------------


def _allreduce_gradient(call: DifferentiableCall, gradients: list[Any]) -> list[Any]:
    """The same reduction of the gradients."""
    _check_linear(call)
    return call.run(ALLREDUCE, gradients, call.argument)


def _allgather_gradient(call: DifferentiableCall, gradients: list[Any]) -> list[Any]:
    """Their average, and of it the rows that came from this rank, which cannot know without asking where they begin."""
    averaged = call.run(ALLREDUCE, gradients, _MEAN)
    rows = np.array([[shape[0] if shape else 1 for shape in call.shapes]])
    name = None if call.gradient_name is None else f"{call.gradient_name}.rows"
    number = process_set_number(call.process_set)
    asked = context.current().allgather(rows, DTYPES[rows.dtype.name], name=name, process_set=number, blocking=True)
    begins = asked.wait().on_host[: call.process_set.rank()].sum(0).tolist()
    take = call.adapter.take_rows
    return [take(tensor, begin, shape) for tensor, begin, shape in zip(averaged, begins, call.shapes, strict=True)]


def _broadcast_gradient(call: DifferentiableCall, gradients: list[Any]) -> list[Any]:
    """Their average on the root, zeros elsewhere."""
    averaged = call.run(ALLREDUCE, gradients, _MEAN)
    if context.current().rank == call.argument:
        return averaged
    # made of the average: all ranks have to run its gradient, if the root does
    return list(map(call.adapter.zeros_like, averaged))


def _alltoall_gradient(call: DifferentiableCall, gradients: list[Any]) -> list[Any]:
    """They go back to where the rows came from; rows that were not sent get zeros."""
    returned = call.run(ALLTOALL, gradients, call.received_splits)
    return [call.adapter.take_rows(each, 0, shape) for each, shape in zip(returned, call.shapes, strict=True)]


def _reducescatter_gradient(call: DifferentiableCall, gradients: list[Any]) -> list[Any]:
    """All ranks' gradients, times the number of ranks for Sum, and times the factors."""
    _check_linear(call)
    op, prescale, postscale = call.argument
    scale = prescale * postscale * (call.process_set.size() or 1 if op is ReduceOp.SUM else 1)
    gathered = call.run(ALLGATHER, gradients, None)
    return gathered if scale == 1 else [gradient * scale for gradient in gathered]


def _check_linear(call: DifferentiableCall) -> None:
    op = call.argument[0]
    if op not in _LINEAR:
        raise ArgumentError(f"{call.function} with op={op.name.title()} has no gradient; {call.adapter.stop_gradient}")


# -- the table --------------------------------------------------------------------------------------------------------

_NAME = Parameter(
    "name", "str | None", "matches the ranks' calls; without one they match in the order of the calls.", None
)
_PRESCALE = Parameter("prescale_factor", "float", "multiplied in before the reduction.", 1.0)
_POSTSCALE = Parameter("postscale_factor", "float", "multiplied in after it.", 1.0)
_SAME = "the same shape and dtype on every rank."
_PROCESS_SET = Parameter(
    "process_set", "ProcessSet", 'whose ranks take part; "all ranks" are its ranks then.', global_process_set
)

ALLREDUCE = Collective(
    "allreduce",
    "Return ``postscale * op(prescale * tensor)`` over all ranks, of the tensor's shape and dtype",
    _SAME,
    (
        Parameter("average", "bool | None", "deprecated; use ``op``.", None),
        _NAME,
        Parameter("op", "int | None", "Average (the default), Sum, Adasum, Min, Max or Product.", None),
        _PRESCALE,
        _POSTSCALE,
        _PROCESS_SET,
    ),
    operation_builders.build_allreduce,
    _allreduce_gradient,
    returns="a tensor of the same shape and dtype",
    reduces=True,
    grouped=True,
    in_place=True,
    notes="Integers are averaged and scaled in float64 and truncated toward zero; float16 and bfloat16 are scaled in\n"
    "float32 and rounded before they are added.",
)
ALLGATHER = Collective(
    "allgather",
    "Return all ranks' tensors, concatenated along dimension 0 in rank order",
    "dimension 0 may differ between ranks, the others not. Scalars give a vector of one element a rank.",
    (_NAME, _PROCESS_SET),
    operation_builders.build_allgather,
    _allgather_gradient,
    returns="a tensor of shape ``(rows of all ranks, *shape[1:])`` and the same dtype",
    grouped=True,
    takes_scalars=True,
)
BROADCAST = Collective(
    "broadcast",
    "Return the root's tensor, on every rank",
    _SAME,
    (
        Parameter("root_rank", "int", "whose contents all get; its rank in the job, also in a process set."),
        _NAME,
        _PROCESS_SET,
    ),
    operation_builders.build_broadcast,
    _broadcast_gradient,
    returns="a tensor of the same shape and dtype",
    in_place=True,
    parse=lambda adapter, root_rank: as_root(root_rank),
)
ALLTOALL = Collective(
    "alltoall",
    "Send row block i of every rank's tensor to the i-th rank",
    "all dimensions but the first are the same on every rank.",
    (
        Parameter(
            "splits",
            "Sequence[int] | {tensor} | None",
            "rows for each rank, a list or an int32 vector; None for equal parts, which must come out even.",
            None,
        ),
        _NAME,
        _PROCESS_SET,
    ),
    operation_builders.build_alltoall,
    _alltoall_gradient,
    parse=as_splits,
    returns_splits=True,
    returns="a tensor of shape ``(rows received, *shape[1:])`` and the same dtype, in rank order; if ``splits`` were "
    "given, a pair of it and the rows received from each rank (int32, shape ``(ranks,)``)",
)
REDUCESCATTER = Collective(
    "reducescatter",
    "Reduce over all ranks and return this rank's rows: the first ``rows % size`` ranks get one more",
    "the same shape and dtype on every rank; no scalar.",
    (_NAME, Parameter("op", "int", "Average, Sum, Min, Max or Product.", Average), _PROCESS_SET, _PRESCALE, _POSTSCALE),
    operation_builders.build_reducescatter,
    _reducescatter_gradient,
    returns="a tensor of shape ``(rows of this rank, *shape[1:])`` and the same dtype",
    reduces=True,
    grouped=True,
)

#: Every collective that has functions of its own in every framework.
COLLECTIVES = (ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER)
