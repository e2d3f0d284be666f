"""Fixtures of all tests: shared rank processes, and the check that no test leaves anything behind."""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Iterator

import pytest

from reigen.testing import LeakCheck, PoolCache, RankPool


def pytest_configure() -> None:
    """A shell starts what shall run in its background with SIGINT ignored, and whatever that starts inherits it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


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
def no_leaks(pools: PoolCache, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves threads, descriptors, child processes or shared memory."""
    with LeakCheck(keep=lambda: pools.resources) as check:
        yield
        if request.node.stash.get(_failed, False):
            check.forgive()  # the traceback keeps everything alive


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Lets ``no_leaks`` know how the test went."""
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report
