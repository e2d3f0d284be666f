"""These tests need Lightning, transformers and others: `make test-integrations` has them in a separate environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reigen.testing import RankPool
from tests.needed_libraries import ignore_without

_HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Elsewhere the files are not even imported."""
    return ignore_without("lightning", "transformers", path=collection_path, conftest=__file__)


def program_environment() -> dict[str, str]:
    """Variables of processes that import these libraries: nothing is looked up in a network."""
    path = [str(_HERE.parent / "torchvision_operators"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


@pytest.fixture(scope="session")
def integration_pools() -> Iterator[Callable[[int], RankPool]]:
    """``integration_pools(size)``: rank processes that all tests of this directory share; the largest pool has two."""
    processes: list[Any] = []
    made = {size: RankPool(size, env=program_environment(), processes=processes) for size in (1, 2)}
    made[2].start()  # before a test is looked at for what it leaves
    yield made.__getitem__
    made[2].close(kill=True)
