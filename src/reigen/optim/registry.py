"""Registry of optimizers: the names that a spec may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from reigen.errors import ConfigError
from reigen.optim.base import Optimizer
from reigen.optim.rules import LAMB, LARS, NAG, SGD, AdaGrad, Adam, AdamW, Ftrl, RMSProp, Signum, Test
from reigen.optim.schedules import SCHEDULES, Schedule

#: Every optimizer by its name in a spec. No other can be named: a spec is no way to run code.
OPTIMIZERS: dict[str, type[Optimizer]] = {
    kind.name: kind for kind in (AdaGrad, Adam, AdamW, Ftrl, LAMB, LARS, NAG, RMSProp, SGD, Signum, Test)
}
_Made = TypeVar("_Made", Optimizer, Schedule)
_PAIRS = ("lr_mult", "wd_mult", "param_idx2name")


def create(optimizer: str | Optimizer, **parameters: Any) -> Optimizer:
    """Make an optimizer by name, as in ``create("sgd", learning_rate=0.1, momentum=0.9)``.

    Args:
        optimizer: the name, upper or lower case; or an optimizer, which is returned.
        **parameters: of that optimizer.

    Raises:
        ConfigError: no such optimizer or parameter (the message lists those there are), a value that makes no sense, or
            parameters beside an optimizer that has its own.
    """
    if isinstance(optimizer, Optimizer):
        if parameters:
            raise ConfigError(
                f"{sorted(parameters)} are given with a {optimizer.name} optimizer; use its replace() instead"
            )
        return optimizer
    if not isinstance(optimizer, str):
        raise ConfigError(
            f"{optimizer!r} is no optimizer: servers take optimizers by name and numbers, never as code; "
            f"there are {', '.join(OPTIMIZERS)}"
        )
    return _make_by_name(OPTIMIZERS, "optimizer", optimizer, parameters)


def from_spec(spec: Mapping[str, Any]) -> Optimizer:
    """Make the optimizer of `Optimizer.to_spec`: ``name`` and any of the parameters; so, too, for a schedule.

    Raises:
        ConfigError: no such optimizer, schedule or parameter, or a value that makes no sense.
    """
    parameters = _plain_dict("an optimizer", spec)
    schedule = parameters.get("lr_scheduler")
    if schedule is not None and not isinstance(schedule, Schedule):
        described = _plain_dict("a schedule", schedule)
        parameters["lr_scheduler"] = _make_by_name(SCHEDULES, "schedule", described.pop("name", None), described)
    for name in _PAIRS:
        if name in parameters:
            parameters[name] = _mapping(name, parameters[name])
    return _make_by_name(OPTIMIZERS, "optimizer", parameters.pop("name", None), parameters)


def _make_by_name(known: Mapping[str, type[_Made]], what: str, name: object, parameters: dict[str, Any]) -> _Made:
    kind = known.get(name.lower()) if isinstance(name, str) else None
    if kind is None:
        raise ConfigError(f"no {what} is called {name!r}; there are {', '.join(known)}")
    names = {item.name for item in fields(kind)}
    if unknown := set(parameters) - names:
        raise ConfigError(
            f"{kind.name} has no parameter {', '.join(sorted(map(str, unknown)))}; it has {', '.join(sorted(names))}"
        )
    needed = {item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING}
    if missing := needed - set(parameters):
        raise ConfigError(f"{kind.name} needs {', '.join(sorted(missing))}")
    return kind(**parameters)


def _plain_dict(what: str, spec: Any) -> dict[str, Any]:
    if not isinstance(spec, Mapping) or not all(isinstance(name, str) for name in spec):
        raise ConfigError(f"the spec of {what} is a dict of names, not {type(spec).__name__}")
    return dict(spec)


def _mapping(name: str, pairs: Any) -> dict[Any, Any]:
    """Convert pairs, as specs have them because JSON knows no integer keys, or a mapping."""
    if isinstance(pairs, Mapping):
        return dict(pairs)
    if isinstance(pairs, (list, tuple)) and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        try:
            return {key: value for key, value in pairs}  # noqa: C416  pairs that are lists, too
        except TypeError:
            pass  # a key that is a list
    raise ConfigError(f"{name} must be a dict, or a list of pairs")
