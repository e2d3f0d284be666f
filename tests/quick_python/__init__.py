"""Environment of processes that import a framework, of whose start and end a third is spent on looking for garbage."""

from __future__ import annotations

import os
from pathlib import Path


def quick_environment() -> dict[str, str]:
    """Return this process's environment, with `sitecustomize.py` of this directory in the path of Python's modules."""
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
