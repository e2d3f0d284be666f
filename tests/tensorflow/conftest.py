"""These tests need TensorFlow: `make test-frameworks` has it in an environment of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from reigen.testing import RankPool
from tests.needed_libraries import ignore_without


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Elsewhere the files are not even imported."""
    return ignore_without("tensorflow", path=collection_path, conftest=__file__)


@pytest.fixture(scope="session")
def legacy_pool() -> Iterator[RankPool]:
    """Two ranks whose TensorFlow has the legacy Keras: it looks at the variable when it is imported."""
    with RankPool(2, env={"TF_USE_LEGACY_KERAS": "1"}) as made:
        made.start()  # before a test is looked at for what it leaves
        yield made
