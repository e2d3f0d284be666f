"""These tests need Keras: `make test-frameworks` has it in an environment of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reigen.testing import RankPool
from tests.needed_libraries import ignore_without


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Elsewhere the files are not even imported."""
    return ignore_without("keras", path=collection_path, conftest=__file__)


#: Keras runs on those that are installed.
BACKENDS = [name for name in ("torch", "tensorflow", "jax") if importlib.util.find_spec(name) is not None]


def backend_environment(backend: str) -> dict[str, str]:
    """Variables of rank processes whose Keras runs on a backend."""
    return {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="session", params=BACKENDS)
def keras_pools(request: pytest.FixtureRequest) -> Iterator[Callable[[int], RankPool]]:
    """``keras_pools(size)``: rank processes that all tests of one backend share; the largest pool has three."""
    processes: list[Any] = []
    environment = backend_environment(request.param)
    made = {size: RankPool(size, env=environment, processes=processes) for size in (1, 2, 3)}
    made[3].start()  # before a test is looked at for what it leaves
    yield made.__getitem__
    made[3].close(kill=True)


@pytest.fixture
def keras_backend(request: pytest.FixtureRequest, keras_pools: object) -> str:
    """Name of the backend."""
    name: str = request.node.callspec.params["keras_pools"]
    return name
