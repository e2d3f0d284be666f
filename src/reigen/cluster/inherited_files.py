"""Files that a process inherits from its launcher: a variable says by which descriptor, and which file that must be.

A script between the two may close descriptors, whose numbers other files get then. So a descriptor is used only if the
file behind it is the launcher's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from reigen.errors import ConfigError


def describe_inherited(descriptor: int) -> str:
    """Return the value of a variable for `find_inherited`: the descriptor, and the file that it is now."""
    found = os.fstat(descriptor)
    return f"{descriptor}:{found.st_dev}:{found.st_ino}"


def find_inherited(environ: Mapping[str, str], variable: str, purpose: str) -> int:
    """Return the descriptor of a file that the launcher has passed; -1: it has passed none, or that is closed.

    Args:
        environ: has the variable.
        variable: its name.
        purpose: of the file, for the error.

    Raises:
        ConfigError: the descriptor is another file's now; nothing was done with that.
    """
    text = environ.get(variable, "")
    if not text:
        return -1
    try:
        descriptor = int(text.partition(":")[0])
        present = describe_inherited(descriptor)
    except (OSError, ValueError):
        return -1
    if present == text:
        return descriptor
    file = "another file"
    with suppress(OSError):  # there is no /proc
        file = os.readlink(f"/proc/self/fd/{descriptor}")
    raise ConfigError(
        f"{variable}={text}: this descriptor is not {purpose}, but {file}: a script that starts this process must "
        "leave descriptors open"
    )
