"""A second optimizer of the user's class, for other parameters; and what such a class keeps for each parameter.

Where every rank updates a part of the parameters alone, it does so with an optimizer of the user's own class and
options, whose parameters are those parts. The user's object is not touched: its constructor's arguments are unknown, so
the second one is made as a copy of everything but parameters, state and hooks.
"""

from __future__ import annotations

import copy
import enum
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reigen.errors import ArgumentError
from reigen.torch.optimizers.optimizer_wrapper import check_not_wrapped

#: What an optimizer keeps for each of its parameters, under names.
OptimizerState = Mapping[Any, dict[str, Any]]

#: Elements of the parameter that is tried out; no state of an allowed class has this many elements by chance.
_NUM_ELEMENTS = 97
_NUM_STEPS = 2
#: Attributes that every optimizer has for itself. A scheduler puts a bound ``step`` of the first one into it.
_OWN = frozenset({"param_groups", "state", "step"})


class StateKind(enum.Enum):
    """Kind of state of a parameter under one name."""

    LIKE_PARAMETER = "like parameter"
    SOME_DIMENSIONS = "of some of the parameter's dimensions"
    SCALAR = "scalar tensor"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One entry of a parameter's state.

    ``dimensions`` are, for SOME_DIMENSIONS, those of the parameter that it has; None for one of size 1.
    """

    kind: StateKind
    dtype: torch.dtype | None
    dimensions: tuple[int | None, ...] = ()

    def shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """Of the entry for a parameter, if it is a tensor."""
        if self.kind is StateKind.LIKE_PARAMETER:
            return tuple(parameter.shape)
        return tuple(1 if number is None else parameter.shape[number] for number in self.dimensions)


def clone_optimizer(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], state: OptimizerState | None = None
) -> torch.optim.Optimizer:
    """An optimizer of the same class and options, without the first one's hooks; neither changes the other.

    Args:
        optimizer: a plain one.
        groups: all parameter groups of the new one, with all options; the dicts are its own from now on.
        state: what it keeps for its parameters already.

    Raises:
        ArgumentError: the optimizer has attributes that belong to its parameters: another optimizer, a module, a tensor
            of more than one element; or an attribute cannot be copied.
    """
    check_not_wrapped(optimizer)
    second: torch.optim.Optimizer = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name in _OWN:
            continue
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            second.__dict__[name] = type(value)()
            continue
        if (found := _describe_bound_value(value)) is not None:
            raise ArgumentError(
                f"{type(optimizer).__name__} has {found} in its attribute {name!r}: an optimizer for a part of the "
                "parameters cannot be made of it"
            )
        try:
            second.__dict__[name] = copy.deepcopy(value)
        except Exception as error:
            raise ArgumentError(
                f"{type(optimizer).__name__}: the attribute {name!r} cannot be copied: {error}"
            ) from error
    second.param_groups = list(groups)
    second.state = defaultdict(dict)
    second.state.update(state or {})
    return second


def _describe_bound_value(value: Any) -> str | None:
    """Describe values of an attribute that belong to certain parameters."""
    if isinstance(value, torch.optim.Optimizer):
        return "another optimizer"
    if isinstance(value, torch.nn.Module):
        return "a module"
    if isinstance(value, torch.Tensor):
        return "a tensor" if isinstance(value, torch.nn.Parameter) or value.numel() > 1 else None
    if isinstance(value, Mapping):
        return next((found for pair in value.items() for one in pair if (found := _describe_bound_value(one))), None)
    if isinstance(value, list | tuple | set | frozenset):
        return next((found for one in value if (found := _describe_bound_value(one))), None)
    return None


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without the keys that say which parameters it has."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def inner_step(optimizer: torch.optim.Optimizer) -> None:
    """One step of the optimizer's class, without the profiler's mark and the step hooks that torch puts around it."""
    step = type(optimizer).step
    # torch wraps the step of a class when its first object is made, and says so in this attribute.
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    step(optimizer)


def make_example_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """One of as many dimensions, small, in which every dimension has a size of its own; those of 0 and 1 keep theirs.

    Example:
        >>> example_shape((512, 1, 3, 3))
        (3, 1, 5, 6)
    """
    return tuple(3 + number if size > 1 else size for number, size in enumerate(shape))


def infer_state_layout(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    shape: tuple[int, ...] | None = None,
) -> dict[str, StateEntry]:
    """Infer the state that the optimizer's class keeps for a parameter of that dtype, by a trial of two steps.

    Where the optimizer, which is not changed, holds state for such a parameter already, the trial begins with the like.

    Args:
        optimizer: a plain one.
        group: one of its parameter groups: the options.
        dtype: of a parameter.
        shape: the `make_example_shape` of a parameter that is always updated whole; None if it may be cut.

    Raises:
        ArgumentError: it keeps something that is neither of the parameter's shape nor one number in a tensor; or it
            cannot step.
    """
    whole = (_NUM_ELEMENTS,) if shape is None else shape
    parameter = torch.nn.Parameter(torch.linspace(-1, 1, math.prod(whole)).to(dtype).reshape(whole))
    state = make_example_state(optimizer, group, parameter) if shape is None else None
    second = clone_optimizer(optimizer, [{**group, "params": [parameter]}], {parameter: state} if state else None)
    layout: dict[str, StateEntry] = {}
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        for _ in range(_NUM_STEPS):
            parameter.grad = torch.randn(whole, generator=generator).to(dtype)
            try:
                inner_step(second)
            except Exception as error:
                raise ArgumentError(
                    f"{type(optimizer).__name__} cannot step on a part of a parameter: {type(error).__name__}: {error}"
                ) from error
            for name, value in second.state[parameter].items():
                entry = _entry(optimizer, name, value, parameter, is_cut=shape is None)
                if layout.setdefault(name, entry).kind is StateKind.NONE:
                    layout[name] = entry
    return layout


def make_example_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """Make state for ``parameter``, like that of the others of its group and dtype; {} if they have none.

    Tensors of a parameter's shape are filled with their first element, so that values are such as occur.
    """
    for other in group["params"]:
        held = optimizer.state.get(other)
        if not held or other.dtype != parameter.dtype or not other.dim() or not other.numel():
            continue
        return {
            name: torch.full_like(parameter, value.reshape(-1)[0].item(), dtype=value.dtype, requires_grad=False)
            if isinstance(value, torch.Tensor) and value.shape == other.shape
            else copy.deepcopy(value)
            for name, value in held.items()
        }
    return {}


def _entry(
    optimizer: torch.optim.Optimizer, name: str, value: Any, parameter: torch.Tensor, *, is_cut: bool
) -> StateEntry:
    if value is None:
        return StateEntry(StateKind.NONE, None)
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu":
        if value.dim() == 0:
            return StateEntry(StateKind.SCALAR, value.dtype)
        if value.shape == parameter.shape:
            return StateEntry(StateKind.LIKE_PARAMETER, value.dtype)
        sizes = tuple(parameter.shape)
        if not is_cut and all(size == 1 or size in sizes for size in value.shape):
            dimensions = tuple(None if size == 1 else sizes.index(size) for size in value.shape)
            return StateEntry(StateKind.SOME_DIMENSIONS, value.dtype, dimensions)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise ArgumentError(
        f"{type(optimizer).__name__} keeps {what} under {name!r} for a parameter of {parameter.numel()} elements; its "
        "state can be divided only if it consists of tensors of the parameter's shape and of tensors without dimensions"
    )
