"""Options of submitted jobs that mean the same to every engine: sizes of memory, and names made of commands. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from reigen.errors import ConfigError

_MEMORY = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt])i?b?", re.IGNORECASE)
_UNITS = "kmgt"
_SCRIPTS = (".py", ".sh")


def parse_memory(option: str, text: str) -> int:
    """Parse a size of memory into bytes: ``4g``, ``512m``, ``1.5G``, ``4GiB``; units are powers of 1024.

    A number alone is refused: it would be megabytes to some, and bytes to others.

    Args:
        option: that has it, for the message.
        text: number and unit.

    Raises:
        ConfigError: it is none, or less than a megabyte.
    """
    match = _MEMORY.fullmatch(text.strip())
    num_bytes = float(match["number"]) * 1024.0 ** (1 + _UNITS.index(match["unit"].lower())) if match else 0.0
    if num_bytes < 1 << 20:
        raise ConfigError(f"{option} {text}: it is no size of memory like 4g or 512m, with a unit, and at least 1m")
    return int(num_bytes)


def name_of_command(command: Sequence[str]) -> str:
    """Return the file name of a command's script, else of its program, empty if it has none.

    What comes behind may be a secret, and names of jobs are for everybody to see.
    """
    pairs = zip(("", *command), command, strict=False)
    scripts = [word for before, word in pairs if word.endswith(_SCRIPTS) and "=" not in word and before != "-c"]
    words = scripts or list(command[:1])
    return PurePath(words[0]).name if words else ""
