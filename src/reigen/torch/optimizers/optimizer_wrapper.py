"""Base of all wrapped optimizers, and of what reduces their gradients or updates."""

from __future__ import annotations

import functools
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

import torch

from reigen import context as contexts
from reigen.api.gradients.replica_check import ReplicaCheckSchedule
from reigen.api.gradients.tracker import GradientTracker, check_passes
from reigen.elastic import membership
from reigen.errors import ArgumentError

#: Computes the loss anew, with its gradients.
Closure = Callable[[], Any]

WrapperType = TypeVar("WrapperType", bound="WrappedOptimizer")


class OptimizerReducer(ABC):
    """Base of what reduces gradients, or updates, over the ranks for one optimizer.

    Args:
        named: names and parameters, in the same order on every rank.
        passes: gradients that are summed up locally before they are communicated.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], passes: int) -> None:
        self.names = {parameter: name for name, parameter in named}
        self.backward_passes_per_step = check_passes(passes)
        #: by id, which is faster to look up than a tensor; holding the tensor keeps its id its own
        self._known: dict[int, torch.Tensor] = {}
        self._begin_job()
        self.adopt([parameter for _, parameter in named])

    @property
    @abstractmethod
    def trackers(self) -> Sequence[GradientTracker]:
        """One for each lot of parameters that was adopted together."""

    @abstractmethod
    def check_dtype(self, parameter: torch.Tensor) -> None:
        """Raise UnsupportedTypeError unless the parameter's dtype can be communicated."""

    @abstractmethod
    def watch(self, parameters: list[torch.Tensor]) -> None:
        """Count the gradients of these parameters from now on."""

    @abstractmethod
    def check_not_outstanding(self, action: str) -> None:
        """Raise StepOrderError if complete gradients wait: ``action`` came too early."""

    @abstractmethod
    def release(self) -> None:
        """Take the hooks off and free all memory: the optimizer is gone."""

    def adopt(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let these parameters take part from now on, unless they do, or need no gradient.

        Raises:
            UnsupportedTypeError: the dtype of one cannot be communicated.
        """
        unknown = {id(p): p for p in parameters if id(p) not in self._known}
        new = {number: p for number, p in unknown.items() if p.requires_grad}
        for parameter in new.values():
            self.check_dtype(parameter)
        for parameter in unknown.values():  # also those that may come to need a gradient: they are looked for by name
            self.names.setdefault(parameter, f"parameter.{len(self.names)}")
        self._known.update(new)
        if new:
            self.watch([*new.values()])

    @property
    def outstanding(self) -> bool:
        """Return whether complete gradients wait for a step, or are on their way."""
        return any(tracker.outstanding for tracker in self.trackers)

    @property
    def is_unfinished(self) -> bool:
        """Return whether gradients have come that no step has used."""
        return any(tracker.num_arrived for tracker in self.trackers)

    @property
    def is_job_over(self) -> bool:
        """Return whether the job to which the gradients belong can do nothing more."""
        return not self._context.is_operational

    def abandon(self) -> None:
        """Forget the step that is under way, if any, with its gradients: parts of them may be sums, parts not.

        No communication. For when the job is over, or nobody will finish the step: all ranks have to do it.
        """
        if self.is_unfinished:
            for parameter in self._known.values():
                parameter.grad = None
        for tracker in self.trackers:
            tracker.reset()

    def renew(self, parameters: Iterable[torch.Tensor]) -> None:
        """Begin in the current job like an optimizer that is made now for these parameters, in this order.

        Names and options stay. So the members of a job agree, whichever of them had parameters from the beginning.
        """
        self.abandon()
        self.release()
        self._known.clear()
        self._begin_job()
        self.adopt(parameters)

    def named(self, parameters: Iterable[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """The parameters with their names."""
        return [(self.names.get(p, f"parameter {index}"), p) for index, p in enumerate(parameters)]

    def discard(self) -> None:
        """The gradients are about to be cleared; raises StepOrderError if complete ones wait, or are on their way."""
        if self.is_job_over:
            self.abandon()
        self.check_not_outstanding("optimizer.zero_grad()")
        for tracker in self.trackers:
            if tracker.num_arrived:
                tracker.reset()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many gradients are summed up locally.

        Raises:
            ArgumentError: not a positive integer.
            StepOrderError: complete gradients wait for a step, or are on their way.
        """
        passes = check_passes(passes)
        for tracker in sorted(self.trackers, key=lambda each: not each.outstanding):  # one that refuses comes first
            tracker.set_backward_passes_per_step(passes)
        self.backward_passes_per_step = passes

    def _begin_job(self) -> None:
        """Belong to the current job, and compare its replicas from the beginning."""
        self._context = contexts.current()
        self._context.when_closed(self.abandon)
        self._comparisons = ReplicaCheckSchedule()
        #: whether the parameters with which the ranks began have been compared
        self._is_compared = False
        #: who has joined before its first step would be the only one to compare
        self._num_joins = self._context.num_joins
        #: a step has been taken in this job
        self._has_joined = False

    def _join(self) -> None:
        """At the first step: become a member of the elastic job, if the program has not come to its training before.

        Raises:
            ArgumentError: the job has warm spares, and this is no step of a `reigen.torch.elastic.Job`.
        """
        if not self._has_joined:
            membership.check_plain_step()
            membership.join()
            self._has_joined = True

    def _is_first_step(self) -> bool:
        """Return whether the ranks' parameters are to be compared now; once in a job."""
        is_first = not self._is_compared and self._context.num_joins == self._num_joins
        self._is_compared = True
        return is_first

    def _is_check_due(self) -> bool:
        """One more step was taken: whether REIGEN_CHECK_REPLICAS asks for a comparison."""
        return self._comparisons.due(self._context.config.check_replicas, self._context.num_joins)


class WrappedOptimizer(torch.optim.Optimizer):
    """Base of what stands in front of an optimizer's own class.

    Attributes:
        update_context: entered while the parameters are changed, when all sums are there; see `reigen.elastic.job`.
    """

    update_context: AbstractContextManager[None] = nullcontext()
    #: the attributes that it had
    _plain_names: frozenset[str]
    _reducer: OptimizerReducer

    def abandon(self) -> None:
        """Drop an unfinished step, with its gradients: no communication; on all ranks.

        After an error that ends the job it is done by ``shutdown()``; before that, for who goes back to saved weights.
        """
        self._reducer.abandon()

    def renew(self) -> None:
        """Begin in the current job like an optimizer that is made now: all members of an elastic job do it together.

        Parameters, options and state stay.
        """
        self._reducer.renew(self._parameters())

    def attach(self, reducer: OptimizerReducer) -> None:
        """Use this reducer from now on, and release it with this object."""
        self._reducer = reducer
        weakref.finalize(self, reducer.release).atexit = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups.

        GradScaler reads the gradients through this list before it calls ``step()``: see `_before_unscaling`.
        """
        groups = self.__dict__.get("param_groups")
        if groups is None:  # Lightning's class of our class asks the optimizer that it wraps, by __getattr__
            raise AttributeError("param_groups")
        if sys._getframe(1).f_code.co_name == "_unscale_grads_":
            self._before_unscaling()
        return cast("list[dict[str, Any]]", groups)

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        """Take other groups, whose parameters take part from the next step on; on all ranks at the same step.

        Lightning does that where a training goes on from a checkpoint: its callbacks may have added groups before.
        """
        self.__dict__["param_groups"] = groups
        self._adopt_groups()

    def __setstate__(self, state: dict[str, Any]) -> None:
        before = {id(each) for each in self._parameters()} if "param_groups" in self.__dict__ else set()
        super().__setstate__(state)
        if not before.issuperset(map(id, self._parameters())):
            self._adopt_groups()

    def _adopt_groups(self) -> None:
        if (reducer := self.__dict__.get("_reducer")) is not None:
            reducer.adopt(self._parameters())

    def _before_unscaling(self) -> None:
        """GradScaler is about to change the gradients in place, and to decide whether to call ``step()``.

        It must come to the same answer about infinities on all ranks.
        """

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """The names by parameter: as in Horovod, for programs that look them up."""
        return dict(self._reducer.names)

    @property
    def backward_passes_per_step(self) -> int:
        """Gradients that are summed up locally before a step, or before they are communicated."""
        return self._reducer.backward_passes_per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many gradients are summed up locally; not between ``backward()`` and ``step()``."""
        self._reducer.set_backward_passes_per_step(passes)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            StepOrderError: complete gradients wait for ``step()``, or are on their way (an AssertionError, as in
                Horovod).
        """
        self._reducer.discard()
        super().zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; they take part from the next step on. All ranks must do it at the same step."""
        super().add_param_group(param_group)
        self._reducer.adopt(param_group["params"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are plain optimizers: what we add belongs to this process and this object."""
        plain = type(self).__bases__[1]
        return _new_instance, (plain,), self.__getstate__()


def check_not_wrapped(optimizer: torch.optim.Optimizer) -> None:
    """Raise ArgumentError if an optimizer is wrapped already."""
    if isinstance(optimizer, WrappedOptimizer):
        raise ArgumentError("this optimizer is a DistributedOptimizer already")


def wrap_optimizer(
    optimizer: torch.optim.Optimizer, front: type[WrapperType], reducer: OptimizerReducer
) -> WrapperType:
    """An instance of a new subclass of ``front`` and the optimizer's class, with the optimizer's state."""
    wrapped: WrapperType = object.__new__(_make_front_class(type(optimizer), front))
    # A scheduler made before has put a bound `step` of the plain optimizer here; it would bypass the front.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    wrapped._plain_names = frozenset(vars(wrapped))
    wrapped.attach(reducer)
    return wrapped


def wrap_in_place(optimizer: torch.optim.Optimizer, front: type[WrappedOptimizer], reducer: OptimizerReducer) -> None:
    """Make an optimizer an instance of what `wrap_optimizer` returns: who has it, a scheduler say, has that then."""
    step = optimizer.__dict__.pop("step", None)  # of a scheduler, around the plain class's
    optimizer.__class__ = _make_front_class(type(optimizer), front)
    assert isinstance(optimizer, front)
    optimizer._plain_names = frozenset(vars(optimizer))
    optimizer.attach(reducer)
    if step is not None:
        optimizer.__dict__["step"] = _track_calls(optimizer)


def unwrap_in_place(optimizer: WrappedOptimizer) -> None:
    """Undo `wrap_in_place`: the class is the one that was wrapped, and nothing is hooked any more."""
    optimizer._reducer.release()
    tracked = optimizer.__dict__.pop("step", None)  # of a scheduler, around the front's
    plain = type(optimizer).__bases__[1]
    for name in ("_plain_names", "_reducer"):
        optimizer.__dict__.pop(name, None)
    optimizer.__class__ = plain
    if tracked is not None:
        optimizer.__dict__["step"] = _track_calls(optimizer)


def _track_calls(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return a ``step`` for schedulers that were made before: they look if it was called."""
    owner = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        known = owner()
        assert known is not None
        known.__dict__["_opt_called"] = True
        return type(known).step(known, *args, **kwargs)

    step.__dict__["_wrapped_by_lr_sched"] = True
    return step


def _make_front_class(base: type[torch.optim.Optimizer], front: type[WrapperType]) -> type[WrapperType]:
    _run_eagerly_in_compiled_code()
    return type(base.__name__, (front, base), {"__module__": base.__module__, "__doc__": base.__doc__})


@functools.cache
def _run_eagerly_in_compiled_code() -> None:
    """Let torch.compile leave this package alone where a compiled function calls it, or backward the hooks.

    `torch.compiler.disable` around each entry would cost microseconds for every gradient, compiled or not. Whoever has
    made an optimizer has paid for the import.
    """
    from torch._dynamo import trace_rules

    trace_rules.add("reigen")


def unwrap_optimizer(optimizer: WrappedOptimizer) -> torch.optim.Optimizer:
    """A plain optimizer of the class that was wrapped, with the same groups and state: not a copy of them."""
    plain: torch.optim.Optimizer = _new_instance(type(optimizer).__bases__[1])
    plain.__dict__.update({key: vars(optimizer)[key] for key in optimizer._plain_names})
    return plain


def _new_instance(cls: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return cls.__new__(cls)
