"""`reigen run` in jobs of a real Slurm: three nodes, which are stand-in machines."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reigen.testing import check_launcher
from tests.lab import Hosts, Unavailable
from tests.network.slurm import Slurm, why_no_slurm

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2]
PYTHON = sys.executable


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := why_no_slurm():
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("slurm")
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(3, shared=[directory]))
        except Unavailable as error:
            pytest.skip(str(error))
        yield Slurm(hosts, directory)


@pytest.mark.timeout(600)
def test_the_conformance_suite(slurm: Slurm) -> None:
    with slurm.allocation("-N3", "-n5") as environ:
        outcome = check_launcher("slurm", "h1:1,h2:2,h3:2", prefix=slurm.hosts[0].entry(SOURCE), environ=environ)
    assert set(outcome.values()) == {"passed"}
