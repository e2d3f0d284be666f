"""Fixtures of all tests: shared rank processes, and the check that no test leaves anything behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from reigen.testing import LeakCheck, PoolCache, RankPool
from tests import warm_python

# The same examples each time, however slow the machine is; `pytest --hypothesis-profile=explore` looks for new ones.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("again", settings.get_profile("explore"), derandomize=True)
settings.load_profile("again")


def pytest_configure(config: pytest.Config) -> None:
    """A shell ignores SIGINT in what it starts in its background, nohup SIGHUP; whatever that starts inherits it."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if (directory := getattr(config, "workerinput", {}).get("warm_python")) is not None:  # a worker of xdist
        warm_python.join_session(directory, os.getppid())
    else:
        directory = tempfile.mkdtemp(prefix="reigen-tests-")
        config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
        warm_python.join_session(directory, os.getpid())


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers of xdist share what the first process of the session has made."""
    node.workerinput["warm_python"] = str(warm_python.current_session().directory)


#: Tests whose rank processes need a framework, by the beginnings of their files' names.
_SHARES_RANKS = ("tests/torch/", "tests/keras/", "tests/jax/", "tests/tensorflow/test_tf_", "tests/integrations/")

#: Files whose tests take long and share nothing: each test goes to a worker that has nothing else to do.
_SHARES_NOTHING = (
    *("tests/examples/", "tests/network/test_batch_standins.py", "tests/unit/engine/test_simulator.py"),
    *("tests/multiprocess/test_as_horovod.py", "tests/docs/test_docs_programs.py"),
)


class ByFile(LoadFileScheduling):
    """A file's tests stay together, and so do those that need the same framework in their rank processes.

    It takes seconds to import, and is imported once.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(_SHARES_NOTHING):
            return nodeid
        shared = next((each for each in _SHARES_RANKS if nodeid.startswith(each)), None)
        return shared or super()._split_scope(nodeid)

    def _reschedule(self, node: Any) -> None:
        """Gives a worker more when it has one test left, the one it begins with the next; xdist would when it has two.

        What it has, no other worker does, and at the end all others wait for it.
        """
        if not self.workqueue or self._pending_of(self.assigned_work[node]) <= 1:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    """With ``--dist loadfile``: as above."""
    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


#: Files that take minutes, the longest first: what is begun last keeps one worker busy when the others have ended.
_LONGEST = (
    *("tests/network/test_slurm.py", "tests/frameworks/", "tests/conformance/test_launchers.py"),
    *("tests/network/test_grid_engine.py", "tests/unit/engine/test_simulator.py"),
    *("tests/multiprocess/test_mpirun_jobs.py", "tests/network/test_batch_standins.py"),
    *("tests/kv/test_deadlines.py", "tests/elastic/test_elastic_jobs.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders files; the tests of each stay in their order."""
    places = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: next((places[name] for name in _LONGEST if item.nodeid.startswith(name)), len(places)))


def pytest_collection_finish() -> None:
    """What all tests have in common is not looked through whenever a test leaves a cycle: PyTorch alone takes 0.2 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pools() -> Iterator[PoolCache]:
    """The pools of this session."""
    cache = PoolCache()
    yield cache
    cache.close(kill=True)


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
