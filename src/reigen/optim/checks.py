"""Checks of the numbers in a frozen dataclass, by its annotations: specs of other processes go through them, too."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any

from reigen.errors import ConfigError


def check_fields(instance: Any) -> None:
    """Check every field that is annotated as a plain number, flag or text, and turn integers into floats.

    A field's metadata may hold its limits: "least" and "most" belong to what is allowed, "below" does not.

    Raises:
        ConfigError: a value of the wrong type, infinite, NaN, or outside its limits; it names class and field.
    """
    for field in fields(instance):
        kind, _, optional = str(field.type).partition(" | ")
        value = getattr(instance, field.name)
        if kind in _KINDS and not (optional and value is None):
            object.__setattr__(instance, field.name, _check_value(type(instance).__name__, field, kind, value))


def _check_value(owner: str, field: Field[Any], kind: str, given: object) -> Any:
    name = f"{owner}: {field.name}={given!r}"
    value: Any = given
    accepted, plain, description = _KINDS[kind]
    if not isinstance(given, accepted) or (isinstance(given, bool) and kind != "bool"):
        raise ConfigError(f"{name} must be {description}")
    if kind in {"int", "float"} and abs(value) > _LARGEST:
        raise ConfigError(f"{name} is too large")
    value = plain(value)  # a NumPy number is none that a message could carry
    if kind == "float" and not math.isfinite(value):
        raise ConfigError(f"{name} must be finite")
    limits = field.metadata
    if "least" in limits and value < limits["least"]:
        raise ConfigError(f"{name} must be at least {limits['least']}")
    if "most" in limits and value > limits["most"]:
        raise ConfigError(f"{name} must be at most {limits['most']}")
    if "below" in limits and value >= limits["below"]:
        raise ConfigError(f"{name} must be below {limits['below']}")
    return value


#: Limit of integers in a message. Beyond, Python's integers would overflow in a product with a float.
_LARGEST = 2**63 - 1
#: By annotation: the types that are accepted, the plain type, and its description.
_KINDS: Mapping[str, tuple[type, Callable[[Any], Any], str]] = {
    "float": (numbers.Real, float, "a number"),
    "int": (numbers.Integral, int, "a whole number"),
    "bool": (bool, bool, "True or False"),
    "str": (str, str, "text"),
}
