"""These tests need the real MXNet and the NumPy that it can be imported with: `make test-mxnet` has both."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.needed_libraries import ignore_without


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Elsewhere the files are not even imported; one test is there to say so."""
    is_free = collection_path.name == "test_environment.py"
    return None if is_free else ignore_without("mxnet", path=collection_path, conftest=__file__)


@pytest.fixture
def mx():
    """The module."""
    return pytest.importorskip("mxnet", reason="there is no MXNet here; `make test-mxnet` has one")
