"""Tests that need a library which only some environments have: elsewhere their files are not even imported."""

from __future__ import annotations

import importlib.util
from fnmatch import fnmatch
from pathlib import Path


def ignore_without(*modules: str, path: Path, conftest: str, pattern: str = "*.py") -> bool | None:
    """Return what ``pytest_ignore_collect`` of a directory returns for a path.

    Args:
        modules: that the directory's files need.
        path: what pytest asks about.
        conftest: the directory's ``conftest.py``.
        pattern: of the names of the files that need them.

    Returns:
        True for such a file where a module is missing; None, which leaves it to others, otherwise.
    """
    is_concerned = path.parent == Path(conftest).parent and fnmatch(path.name, pattern)
    return True if is_concerned and any(importlib.util.find_spec(each) is None for each in modules) else None
