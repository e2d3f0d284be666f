"""Whole jobs that mpirun has started: no option and no variable of Reigen is needed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.mpirun import DEBIAN, MPICH, PYPI, Ended, Mpi, find, run
from tests.multiprocess import sharing_script

_SCRIPTS = str(Path(__file__).with_name("mpi_scripts.py"))
pytestmark = pytest.mark.slow
ALL = pytest.mark.parametrize("name", [PYPI, DEBIAN, MPICH])

#: Where data travels: in shared memory; over MPI; in shared memory on two "hosts", and over MPI between them.
SHM: dict[str, str] = {}
FLAT = {"REIGEN_PLANE": "mpi"}


def mpi(name: str, directory: Path) -> Mpi:
    found = find(name, directory)
    if isinstance(found, str):
        pytest.skip(found)
    return found


def play(name: str, directory: Path, script: str, num_ranks: int, environ: Mapping[str, str] = SHM) -> Ended:
    return run(mpi(name, directory), num_ranks, [sys.executable, _SCRIPTS, script], environ=environ, timeout=100.0)


def posing(script: str) -> list[str]:
    """Ranks 0 and 1 think that they are on another host than the rest."""
    rank = "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"
    return ["sh", "-c", f'REIGEN_HOST_ID=host$(({rank} / 2)) exec "$0" "$@"', sys.executable, _SCRIPTS, script]


def test_the_command_line_of_the_documents(tmp_path: Path) -> None:
    found = mpi(PYPI, tmp_path)
    arguments = ["mpirun", "-np", "2", "-H", "localhost:2", "-bind-to", "none", "-map-by", "slot"]
    plain = Mpi(PYPI, (str(Path(found.command[0])), *arguments[3:]), found.environ)
    ended = run(plain, 2, [sys.executable, _SCRIPTS, "train"])
    assert ended.exit_code == 0, ended
    assert len({line.split()[-1] for line in ended.stdout.splitlines()}) == 1, "replicas differ"


def test_the_command_line_of_the_documents_with_debians_open_mpi(tmp_path: Path) -> None:
    found = mpi(DEBIAN, tmp_path)
    plain = Mpi(
        DEBIAN, (found.command[0], *["-H", "localhost:2", "-bind-to", "none", "-map-by", "slot"]), found.environ
    )
    ended = run(plain, 2, [sys.executable, _SCRIPTS, "train"])
    assert ended.exit_code == 0, ended


@ALL
@pytest.mark.parametrize("environ", [SHM, FLAT], ids=["shm", "mpi"])
def test_ranks_find_each_other(name: str, environ: dict[str, str], tmp_path: Path) -> None:
    ended = play(name, tmp_path, "hello", 3, environ)
    assert ended.exit_code == 0, ended
    lines = sorted(ended.stdout.splitlines())
    assert [line.partition(":")[0] for line in lines] == [f"rank {r} of 3, local rank {r} of 3" for r in range(3)]
    assert len({line.partition(": ")[2] for line in lines}) == 1


@ALL
def test_two_hosts(name: str, tmp_path: Path) -> None:
    environ = {"REIGEN_LOG": "info"}
    ended = run(mpi(name, tmp_path), 4, posing("hello"), environ=environ)
    assert ended.exit_code == 0, ended
    assert "shm+mpi" in ended.stderr
    assert ("MPICH" if name == MPICH else "with `mpirun --with-ft ulfm`") in ended.stderr
    assert len({line.partition(": ")[2] for line in ended.stdout.splitlines()}) == 1


@ALL
@pytest.mark.parametrize("environ", [SHM, FLAT], ids=["shm", "mpi"])
def test_a_bug_in_one_rank_ends_the_job(name: str, environ: dict[str, str], tmp_path: Path) -> None:
    ended = play(name, tmp_path, "raises", 3, environ)
    assert ended.exit_code not in {0, None}
    assert "ValueError: a bug in the script" in ended.stderr
    assert ended.seconds < 90  # every other deadline is longer


# MPICH's mpirun waits for a rank that stands still or does not come, as long as no rank has initialised MPI. The two
# Open MPIs take an exit code, which is all they see of ranks in shared memory, alike.
WAYS = [pytest.param(PYPI, SHM, id="shm"), *(pytest.param(name, FLAT, id=f"mpi-{name}") for name in (PYPI, DEBIAN))]


@pytest.mark.parametrize(("name", "environ"), [*WAYS, pytest.param(MPICH, FLAT, id=f"mpi-{MPICH}")])
def test_a_rank_that_stands_still_ends_the_job_at_the_deadline(
    name: str, environ: dict[str, str], tmp_path: Path
) -> None:
    ended = play(name, tmp_path, "stops", 3, {**environ, "REIGEN_DEADLINE": "2"})
    assert ended.exit_code != 0
    assert "DeadlineError" in ended.stderr
    assert ended.seconds < 90  # every other deadline is longer


@pytest.mark.parametrize(("name", "environ"), WAYS)
def test_a_rank_that_does_not_come_ends_the_job(name: str, environ: dict[str, str], tmp_path: Path) -> None:
    ended = play(name, tmp_path, "does_not_come", 3, {**environ, "REIGEN_START_TIMEOUT": "2"})
    assert ended.exit_code != 0
    assert "rank(s) 1" in ended.stderr, ended
    assert ended.seconds < 90  # every other deadline is longer


@ALL
def test_an_error_that_is_caught_does_not_make_the_job_hang(name: str, tmp_path: Path) -> None:
    ended = play(name, tmp_path, "catches", 3, FLAT)
    assert "caught" in ended.stdout, ended
    assert ended.seconds < 90  # every other deadline is longer


@ALL
def test_a_script_may_end_mpi_itself(name: str, tmp_path: Path) -> None:
    ended = play(name, tmp_path, "finalizes", 2, FLAT)
    assert ended.exit_code == 0, ended
    assert ended.stdout.count("finalized") == 2


@pytest.mark.parametrize(("name", "hosts"), [pytest.param(PYPI, 2, marks=pytest.mark.nightly), (DEBIAN, 1), (MPICH, 2)])
def test_shared_parameters(name: str, hosts: int, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(sharing_script.__file__))]
    if hosts == 2:
        command = [*posing("")[:3], *command]
    ended = run(mpi(name, tmp_path), 2 * hosts, command)
    assert ended.exit_code == 0, ended
    lines = sorted(map(json.loads, ended.stdout.splitlines()))
    assert [line[:3] for line in lines] == [[rank, 2 * hosts, hosts] for rank in range(2 * hosts)]
    assert {line[4] for line in lines} == {sharing_script.truth()}
