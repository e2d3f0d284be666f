"""These tests need TensorFlow: `make test-frameworks` has it in an environment of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from reigen.testing import RankPool

_HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Elsewhere the files are not even imported."""
    if importlib.util.find_spec("tensorflow") is not None:
        return None
    return True if collection_path.suffix == ".py" and collection_path.parent == _HERE else None


@pytest.fixture(scope="session")
def legacy_pool() -> Iterator[RankPool]:
    """Two ranks whose TensorFlow has the legacy Keras: it looks at the variable when it is imported."""
    with RankPool(2, env={"TF_USE_LEGACY_KERAS": "1"}) as made:
        made.start()  # before a test is looked at for what it leaves
        yield made
