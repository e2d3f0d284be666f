"""Variables of nodes: numbers that must be in order, and devices of this node that they speak of."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from reigen.errors import ConfigError


def read_number(environ: Mapping[str, str], name: str, least: int = 0) -> int:
    """Read a variable that must be there and be a number.

    Raises:
        ConfigError: it is not there, no number, or less than ``least``.
    """
    text = environ.get(name)
    if text is None:
        raise ConfigError(f"{name} is not set")
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(f"{name} is {text!r}, not a number")
    if int(text) < least:
        raise ConfigError(f"{name} is {text}, but must be at least {least}")
    return int(text)


def check_index(index: tuple[str, int], count: tuple[str, int]) -> None:
    """Raise ConfigError unless the number of this node, given with its variable's name, is less than that of all."""
    if index[1] >= count[1]:
        raise ConfigError(f"{index[0]} is {index[1]}, but must be less than {count[0]}, {count[1]}")


def count_gpus(environ: Mapping[str, str], device_directory: str = "/dev") -> int:
    """Count the GPUs that this process may use, without a library of theirs."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() and entry.strip() != "-1"])
    try:
        return sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir(device_directory))  # noqa: PTH208
    except OSError:
        return 0
