"""Base of all wrapped optimizers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from reigen.errors import ArgumentError

#: Computes the loss anew, with its gradients.
Closure = Callable[[], Any]

WrapperType = TypeVar("WrapperType", bound="WrappedOptimizer")


class WrappedOptimizer(torch.optim.Optimizer):
    """Base of what stands in front of an optimizer's own class."""

    #: the attributes that it had
    _plain_names: frozenset[str]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups.

        GradScaler reads the gradients through this list before it calls ``step()``: see `_before_unscaling`.
        """
        if sys._getframe(1).f_code.co_name == "_unscale_grads_":
            self._before_unscaling()
        return cast("list[dict[str, Any]]", self.__dict__["param_groups"])

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    def _before_unscaling(self) -> None:
        """GradScaler is about to change the gradients in place, and to decide whether to call ``step()``.

        It must come to the same answer about infinities on all ranks.
        """

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.__dict__["param_groups"] for parameter in group["params"]]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are plain optimizers: what we add belongs to this process and this object."""
        plain = type(self).__bases__[1]
        return _new_instance, (plain,), self.__getstate__()


def check_not_wrapped(optimizer: torch.optim.Optimizer) -> None:
    """Accept an optimizer that is not wrapped.

    Raises:
        ArgumentError: it is.
    """
    if isinstance(optimizer, WrappedOptimizer):
        raise ArgumentError("this optimizer is a DistributedOptimizer already")


def wrap_optimizer(optimizer: torch.optim.Optimizer, front: type[WrapperType]) -> WrapperType:
    """An instance of a new subclass of ``front`` and the optimizer's class, with the optimizer's state."""
    _run_eagerly_in_compiled_code()
    base = type(optimizer)
    cls = type(base.__name__, (front, base), {"__module__": base.__module__, "__doc__": base.__doc__})
    wrapped: WrapperType = object.__new__(cls)
    # A scheduler made before has put a bound `step` of the plain optimizer here; it would bypass the front.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    wrapped._plain_names = frozenset(vars(wrapped))
    return wrapped


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
