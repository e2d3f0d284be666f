"""Sizes in bytes: read, written; and the gradients of ResNet-50, a common yardstick."""

from __future__ import annotations

from math import prod

from benchmarks.harness.work import Case
from reigen.errors import ConfigError
from reigen.planner.models import MODELS

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_FLOAT32_BYTES = 4


def parse_size(text: str) -> int:
    """Bytes of a size like ``4KiB``, ``25MiB`` or ``4096``.

    Raises:
        ConfigError: it is no size, or not a positive multiple of 4 (the elements are float32).

    Example:
        >>> parse_size("25MiB")
        26214400
    """
    number, unit = text.strip(), "B"
    for name in ("KiB", "MiB", "GiB", "B"):
        if number.endswith(name):
            number, unit = number.removesuffix(name).strip(), name
            break
    if not (number.isascii() and number.isdigit()):
        raise ConfigError(f"{text!r} is not a size; write 4096, 4KiB or 25MiB")
    nbytes = int(number) * _UNITS[unit]
    if nbytes < _FLOAT32_BYTES or nbytes % _FLOAT32_BYTES:
        raise ConfigError(f"a size must be a positive multiple of {_FLOAT32_BYTES} bytes, not {text}")
    return nbytes


def format_size(nbytes: int) -> str:
    """The inverse of `parse_size`.

    Example:
        >>> format_size(1 << 20), format_size(1000)
        ('1 MiB', '1000 B')
    """
    for name in ("GiB", "MiB", "KiB"):
        if nbytes >= _UNITS[name] and not nbytes % _UNITS[name]:
            return f"{nbytes // _UNITS[name]} {name}"
    return f"{nbytes} B"


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Shapes of the 161 parameters of ResNet-50 (25,557,032 elements), from the first layer to the last."""
    return [shape for layer in MODELS["resnet50"].layers for _, shape in layer.shapes]


def resnet50_counts() -> list[int]:
    """Elements of ResNet-50's gradients in the order in which backward produces them: the last layer's first."""
    return [prod(shape) for shape in reversed(resnet50_shapes())]


def element_counts(case: Case) -> list[int]:
    """Elements of each tensor of a case: so many of one size, or ResNet-50's gradients."""
    return [case.nbytes // _FLOAT32_BYTES] * case.count or resnet50_counts()
