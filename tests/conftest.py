"""Fixtures of all tests: shared rank processes, and the check that no test leaves anything behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from reigen.testing import LeakCheck, PoolCache, RankPool


@pytest.fixture(scope="session")
def pools() -> Iterator[PoolCache]:
    """The pools of this session."""
    cache = PoolCache()
    yield cache
    cache.close()


@pytest.fixture
def rank_pool(pools: PoolCache) -> Callable[[int], RankPool]:
    """``rank_pool(size)``: rank processes that other tests of this session use, too."""
    return pools.get


@pytest.fixture(autouse=True)
def no_leaks(pools: PoolCache) -> Iterator[None]:
    """Fails a test that leaves threads, descriptors, child processes or shared memory."""
    check = LeakCheck(keep=lambda: pools.resources)
    with check:
        yield
