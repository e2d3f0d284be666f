"""These tests need the real MXNet and the NumPy that it can be imported with: `make test-mxnet` has both."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Elsewhere the files are not even imported; one test is there to say so."""
    if importlib.util.find_spec("mxnet") is not None or collection_path.name == "test_environment.py":
        return None
    return True if collection_path.suffix == ".py" and collection_path.parent == _HERE else None


@pytest.fixture
def mx():
    """The module."""
    return pytest.importorskip("mxnet", reason="there is no MXNet here; `make test-mxnet` has one")
