"""These tests need Ray: `make test-engines` has it in the environment of the frameworks."""

from __future__ import annotations

from pathlib import Path

from tests.needed_libraries import ignore_without


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Elsewhere the files are not even imported."""
    return ignore_without("ray", path=collection_path, conftest=__file__)
