"""Names of a module that are imported when they are used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def make_lazy_names(module: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a module's ``__getattr__`` and ``__dir__`` (PEP 562).

    Args:
        module: its name.
        names: of each, the module that defines it, or that it is.
    """

    def getattribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = import_module(names[name])
        value = found if names[name] == f"{module}.{name}" else getattr(found, name)
        setattr(sys.modules[module], name, value)
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[module]), *names})

    return getattribute, directory
