"""These tests need Ray: `make test-engines` has it in the environment of the frameworks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Elsewhere the files are not even imported."""
    if importlib.util.find_spec("ray") is not None:
        return None
    return True if collection_path.suffix == ".py" and collection_path.parent == _HERE else None
