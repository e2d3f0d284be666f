"""Examples for PyTorch need torchvision and Jupyter: `make test-integrations` has them in a separate environment."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Elsewhere the files of PyTorch's examples are not even imported."""
    if all(importlib.util.find_spec(each) is not None for each in ("torchvision", "nbclient")):
        return None
    is_one = collection_path.name.startswith("test_torch_") and collection_path.parent == _HERE
    return True if is_one else None
