"""Sizes in bytes: read, written; and the gradients of ResNet-50, a common yardstick."""

from __future__ import annotations

from math import prod

from benchmarks.harness.work import Case
from reigen.errors import ConfigError

_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_FLOAT32_BYTES = 4

#: (blocks, channels inside a block) of ResNet-50's four stages; He et al., "Deep Residual Learning for Image
#: Recognition" (2015), table 1.
_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
_EXPANSION = 4


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
    shapes = _convolution(64, 3, 7)
    inputs = 64
    for blocks, width in _STAGES:
        for block in range(blocks):
            outputs = width * _EXPANSION
            shapes += _convolution(width, inputs, 1) + _convolution(width, width, 3) + _convolution(outputs, width, 1)
            if block == 0:
                shapes += _convolution(outputs, inputs, 1)
            inputs = outputs
    return [*shapes, (1000, inputs), (1000,)]


def resnet50_counts() -> list[int]:
    """Elements of ResNet-50's gradients in the order in which backward produces them: the last layer's first."""
    return [prod(shape) for shape in reversed(resnet50_shapes())]


def element_counts(case: Case) -> list[int]:
    """Elements of each tensor of a case: so many of one size, or ResNet-50's gradients."""
    return [case.nbytes // _FLOAT32_BYTES] * case.count or resnet50_counts()


def _convolution(outputs: int, inputs: int, kernel: int) -> list[tuple[int, ...]]:
    """A convolution without bias, and the weight and bias of the batch normalization behind it."""
    return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]
