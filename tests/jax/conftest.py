"""These tests need JAX: `make test-frameworks` has it in an environment of its own."""

from __future__ import annotations

from pathlib import Path

from tests.needed_libraries import ignore_without


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Elsewhere the files are not even imported."""
    return ignore_without("jax", path=collection_path, conftest=__file__)
