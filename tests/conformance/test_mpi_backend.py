"""The MPI backend passes the public conformance suite, under every MPI of this machine."""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path

import pytest

from reigen.cluster.membership.control_service import ControlService
from tests.machines import Groups
from tests.mpirun import DEBIAN, MPICH, PYPI, find, run

_SUITE = str(Path(__file__).with_name("mpi_suite.py"))
pytestmark = pytest.mark.slow


def check(name: str, size: int, native: str, directory: Path, *, trimmed: bool, groups: Groups | None = None) -> None:
    mpi = find(name, directory)
    if isinstance(mpi, str):
        pytest.skip(mpi)
    secret = secrets.token_bytes(32)
    server = ControlService(secret)
    server.start()
    try:
        arguments = [server.address, native, "trimmed" if trimmed else "whole", str(directory)]
        arguments.append(json.dumps(groups or [[rank] for rank in range(size)]))
        environ = {"REIGEN_TEST_SECRET": secret.hex()}
        ended = run(mpi, size, [sys.executable, _SUITE, *arguments], environ=environ, timeout=150.0)
    finally:
        server.close()
    # backends were broken on purpose, so MPI_Abort ends what has succeeded: the results tell
    results = [directory / f"{rank}.json" for rank in range(size)]
    assert all(file.exists() for file in results), ended.stdout + ended.stderr
    digests = [json.loads(file.read_text()) for file in results]
    for rank, digest in enumerate(digests):
        different = [case for case, value in digest.items() if value != digests[0][case]]
        assert not different, f"rank {rank} and rank 0 got different results: {', '.join(different)}"


@pytest.mark.parametrize(
    ("size", "native"),
    [
        (2, "ordered"),
        (2, "native"),
        (4, "native"),
        (5, "ordered"),
    ],
)
def test_sizes(size: int, native: str, tmp_path: Path) -> None:
    check(PYPI, size, native, tmp_path, trimmed=size > 2)


def test_many_ranks(tmp_path: Path) -> None:
    check(PYPI, 8, "default", tmp_path, trimmed=True)


@pytest.mark.parametrize("native", ["ordered", "native"])
@pytest.mark.parametrize("name", [DEBIAN, MPICH])
def test_other_mpis(name: str, native: str, tmp_path: Path) -> None:
    """In rank order MPI only carries bytes, whatever they mean."""
    check(name, 3, native, tmp_path, trimmed=native == "ordered")


@pytest.mark.parametrize(
    ("groups", "native"),
    [([[0, 1], [2, 3]], "native"), ([[0, 2, 3], [1, 4]], "ordered")],
    ids=str,
)
def test_machines_of_several_ranks(groups: Groups, native: str, tmp_path: Path) -> None:
    check(PYPI, sum(map(len, groups)), native, tmp_path, trimmed=True, groups=groups)
