"""The collectives of the table (`reigen.api.operations`), run on the tensors of any framework by its adapter.

All of them submit and return a `Handle` at once; ``blocking=True`` promises that the caller waits for it next, which
saves waking another thread. Wrong arguments raise :class:`~reigen.errors.ArgumentError` (or
:class:`~reigen.errors.UnsupportedTypeError`) on the calling rank alone, before anything is sent.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from reigen import context
from reigen.api.adapter import Tensor, TensorAdapter, as_rows
from reigen.api.device_tensors import InputTensor, prepare_inputs
from reigen.api.operations import Collective, DifferentiableCall, as_group
from reigen.api.process_sets import ProcessSet, global_process_set, process_set_number
from reigen.backends.device import HostOrDeviceArray
from reigen.context import CollectiveResult, Context
from reigen.engine.handle import Handle
from reigen.engine.operation_builders import ReductionSpec
from reigen.errors import ArgumentError, UnsupportedError
from reigen.types import ReduceOp

Result = TypeVar("Result")

#: Runs one form of a collective: given the tensor or tensors, the argument of the collective's own, the name and the
#: process set, and what else its framework's function has.
Implementation = Callable[..., Any]


class Form(NamedTuple):
    """Form of a function: its result is written into the tensor or not, given by a handle or when it is there."""

    in_place: bool = False
    is_async: bool = False


def poll(handle: Handle[Any]) -> bool:
    """Return whether ``synchronize(handle)`` would return without blocking."""
    return not isinstance(handle, Handle) or handle.poll()


def synchronize(handle: Handle[Result]) -> Result:
    """Wait for an asynchronous collective and return its result; None for an unknown or already synchronized handle.

    Raises:
        CollectiveError: it failed (also named HorovodInternalError).
    """
    return handle.wait() if isinstance(handle, Handle) else None


def resolve_reduction(average: bool | None, op: int | None, prescale: float, postscale: float) -> ReductionSpec:
    """The reduction that the arguments of Horovod's functions ask for; Average if ``average`` and ``op`` are None.

    Raises:
        ArgumentError: both are given, or ``op`` is not an operator that exists.
    """
    if average is None:
        if op is None:
            op = 0
        if type(op) is int and type(prescale) is type(postscale) is float:
            return _known_reduction(op, prescale, postscale)
        return ReductionSpec(parse_op(op), float(prescale), float(postscale))
    if op is not None:
        raise ArgumentError("The op parameter supersedes average. Please provide only one of them.")
    warnings.warn("Parameter `average` is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
    return ReductionSpec(ReduceOp.AVERAGE if average else ReduceOp.SUM, float(prescale), float(postscale))


@functools.lru_cache(maxsize=256)
def _known_reduction(op: int, prescale: float, postscale: float) -> ReductionSpec:
    return ReductionSpec(parse_op(op), prescale, postscale)


def parse_op(op: int) -> ReduceOp:
    """``op`` as an operator; raises ArgumentError if there is no such operator."""
    try:
        return ReduceOp(op)
    except ValueError:
        raise ArgumentError(f"op must be Average, Sum, Adasum, Min, Max or Product, got {op!r}") from None


class Collectives(Generic[Tensor]):
    """Collectives of one framework. A value that is no tensor is refused with UnsupportedTypeError.

    Args:
        adapter: how the framework's tensors look as arrays.
    """

    #: whether the functions that work in place wait
    in_place_waits = True

    def __init__(self, adapter: TensorAdapter[Tensor]) -> None:
        self.adapter = adapter

    def start(
        self,
        collective: Collective,
        tensor: object,
        argument: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        *,
        in_place: bool = False,
        out: Tensor | None = None,
        blocking: bool = False,
    ) -> Handle[Any]:
        """Begin a collective of one tensor.

        Args:
            collective: of the table.
            tensor: the tensor.
            argument: of the collective's own: a `ReductionSpec`, the root, the splits.
            name: matches the ranks' calls.
            process_set: whose ranks take part.
            in_place: the result is written into the tensor.
            out: the tensor that gets the result; None: a new one.
            blocking: see the module.

        Returns:
            Whose result is the tensor; for collectives that return splits, a pair of it and of a tensor of them.
        """
        job = context.current()
        number = 0 if process_set is global_process_set else process_set_number(process_set)
        if collective.parse is not None:
            argument = collective.parse(self.adapter, argument)
        adapter = self.adapter
        accepted = adapter.as_tensor(tensor, writable=in_place)
        if adapter.lender is None or job.device is None:
            given = InputTensor(adapter, accepted, adapter.dtype(accepted), *adapter.array(accepted))
        else:
            given = prepare_inputs(adapter, job, [accepted], argument if collective.reduces else None)[0]
        source, target = given.source, None
        deliver: Callable[[CollectiveResult], Any] = given.result
        if in_place:
            target, deliver = source, given.write_back
        elif collective.in_place:
            target, deliver = self._receiver(job, given, out)
        elif collective.takes_scalars:
            source = as_rows(source)
        elif collective.returns_splits:
            deliver = functools.partial(self._with_splits, given)
        return job.start(
            collective.build,
            source,
            given.dtype,
            argument,
            target=target,
            name=name,
            process_set=number,
            blocking=blocking,
            deliver=deliver,
        )

    def start_group(
        self,
        collective: Collective,
        tensors: Iterable[object],
        argument: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        *,
        in_place: bool = False,
        outs: Sequence[Tensor] | None = None,
        labels: Sequence[str] = (),
        blocking: bool = False,
    ) -> Handle[list[Tensor]]:
        """Begin a collective of several tensors, all or none of them; see `start`. They may differ in dtype.

        ``labels`` are those of `Context.start_group`.
        """
        job, number = context.current(), process_set_number(process_set)
        accepted = [self.adapter.as_tensor(tensor, writable=in_place) for tensor in as_group(tensors)]
        devices = sorted({self.adapter.device(tensor) for tensor in accepted})
        if len(devices) > 1:
            raise UnsupportedError(f"the tensors of a group must be on one kind of device, got {', '.join(devices)}")
        group = prepare_inputs(self.adapter, job, accepted, argument if collective.reduces else None)
        sources, targets = [each.source for each in group], None
        deliver: list[Callable[[CollectiveResult], Tensor]] = [each.result for each in group]
        if in_place:
            targets, deliver = sources, [each.write_back for each in group]
        elif collective.in_place:
            receivers = [
                self._receiver(job, each, None if outs is None else outs[index]) for index, each in enumerate(group)
            ]
            targets, deliver = [target for target, _ in receivers], [each for _, each in receivers]
        elif collective.takes_scalars:
            sources = list(map(as_rows, sources))
        return job.start_group(
            collective.build,
            sources,
            [each.dtype for each in group],
            argument,
            targets=targets,
            name=name,
            labels=labels,
            process_set=number,
            blocking=blocking,
        ).then(lambda outcome: [one(part) for one, part in zip(deliver, outcome.members, strict=True)])

    def implementation(self, collective: Collective, grouped: bool, form: Form) -> Implementation:
        """Return what runs one form of a collective; a framework with arguments of its own changes it.

        In place it returns the handle, for which the function waits, unless `in_place_waits` is False.
        """
        start: Callable[..., Handle[Any]] = self.start_group if grouped else self.start
        if form.is_async:
            return functools.partial(start, collective, in_place=form.in_place)
        if form.in_place:
            return functools.partial(start, collective, in_place=True, blocking=True)
        return functools.partial(self.run, collective, grouped)

    def run(
        self,
        collective: Collective,
        grouped: bool,
        value: Any,
        argument: Any,
        name: str | None,
        process_set: ProcessSet,
    ) -> Any:
        """Run a collective to its end, as a function that the framework can differentiate; the result is new."""
        tensors = as_group(value) if grouped else (value,)
        if self.adapter.needs_gradient(tensors):
            start: Callable[..., Handle[Any]] = self.start_group if grouped else self.start
            call = DifferentiableCall(start, self.adapter, collective, grouped, argument, name, process_set)
            results = call.apply(tensors)
            result: Any = results if grouped else (results[0], call.splits) if collective.returns_splits else results[0]
        elif grouped:
            return self.start_group(collective, tensors, argument, name, process_set, blocking=True).wait()
        else:
            result = self.start(collective, value, argument, name, process_set, blocking=True).wait()
        return result[0] if collective.returns_splits and argument is None else result

    def _with_splits(self, given: InputTensor[Tensor], outcome: CollectiveResult) -> tuple[Tensor, Tensor]:
        return given.result(outcome), self.adapter.wrap(np.array(outcome.received_splits, np.int32), None)

    def _receiver(
        self, job: Context, given: InputTensor[Tensor], out: Tensor | None
    ) -> tuple[HostOrDeviceArray, Callable[[CollectiveResult], Tensor]]:
        """The memory for a result of the shape of ``given``, and what makes a tensor of the outcome."""
        if out is not None:
            receiver = prepare_inputs(self.adapter, job, [self.adapter.as_tensor(out, writable=True)])[0]
            return receiver.source, receiver.write_back
        return given.target(False), given.result
