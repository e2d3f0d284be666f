"""Ranks that mpirun has started: of PyPI's Open MPI, Debian's, and Debian's MPICH. There are more ranks than cores."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.mpirun import DEBIAN, MPICH, PYPI, Ended, find, run

from reigen.cluster.service import RendezvousServer

_RANKS = str(Path(__file__).with_name("mpi_ranks.py"))
slow = pytest.mark.slow
ALL = pytest.mark.parametrize("mpi", [PYPI, pytest.param(DEBIAN, marks=slow), pytest.param(MPICH, marks=slow)])

Play = Callable[..., Ended]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    """``play(mpi, scenario, num_ranks, options)``: a scenario of `mpi_ranks` to its end."""
    secret = secrets.token_bytes(32)
    server = RendezvousServer(secret)
    server.start()

    def play(name: str, scenario: str, num_ranks: int = 3, *options: str, **environ: str) -> Ended:
        mpi = find(name, tmp_path)
        if isinstance(mpi, str):
            pytest.skip(mpi)
        variables = {"REIGEN_TEST_SECRET": secret.hex(), "REIGEN_TEST_RENDEZVOUS": server.address, **environ}
        return run(mpi, num_ranks, [sys.executable, _RANKS, scenario], options=options, environ=variables)

    yield play
    server.close()


@ALL
def test_the_mpi_is_the_one_that_is_meant(mpi: str, play: Play) -> None:
    ended = play(mpi, "library", 2)
    assert ended.exit_code == 0, ended
    assert ended.stdout.count({PYPI: "Open MPI v5", DEBIAN: "Open MPI v4.1", MPICH: "MPICH"}[mpi]) == 2


@ALL
def test_rank_0_tells_the_others(mpi: str, play: Play) -> None:
    ended = play(mpi, "sharing")
    assert ended.exit_code == 0, ended
    assert ended.stdout.count("shared") == 3
    assert len(set(ended.stdout.split())) == 2


@ALL
def test_who_waits_for_rank_0_in_vain_ends_the_job(mpi: str, play: Play) -> None:
    ended = play(mpi, "sharing_without_rank_0")
    assert ended.exit_code != 0
    assert ended.seconds < 20
    assert "rank 0 did not call init() in time" in ended.stderr


@ALL
def test_a_rank_that_is_stopped_ends_the_job_at_the_deadline(mpi: str, play: Play) -> None:
    ended = play(mpi, "silent_rank")
    assert ended.exit_code != 0
    assert ended.seconds < 20
    assert "the others know who is missing" in ended.stdout
    assert "rank(s) 2 did not take their part in time" in ended.stderr


@ALL
def test_late_data_does_not_reach_the_caller(mpi: str, play: Play) -> None:
    ended = play(mpi, "late_data", 2)
    assert "untouched" in ended.stdout, ended


@ALL
def test_a_thread_may_give_up_while_another_waits(mpi: str, play: Play) -> None:
    ended = play(mpi, "aborted_by_another_thread")
    assert ended.stdout.count("told") >= 1, ended
    assert ended.seconds < 20


@ALL
def test_a_death_ends_the_job(mpi: str, play: Play) -> None:
    ended = play(mpi, "killed_rank")
    assert ended.exit_code != 0
    assert ended.seconds < 20


def test_survivors_know_who_died_where_mpi_lets_them_live(play: Play) -> None:
    ended = play(PYPI, "killed_rank", 3, "--with-ft", "ulfm")
    assert "survived the death of 2" in ended.stdout, ended
    assert ended.exit_code != 0
    assert ended.seconds < 20


@ALL
def test_what_else_there_is_to_do_is_done(mpi: str, play: Play) -> None:
    ended = play(mpi, "other_work", 2)
    assert ended.exit_code == 0, ended
    assert ended.stdout.count("worked") == 2


@ALL
def test_planes_of_some_ranks(mpi: str, play: Play) -> None:
    ended = play(mpi, "sets", 4)
    assert ended.exit_code == 0, ended
    assert ended.stdout.count("closed") == 4


def test_threads_that_mpi_was_not_told_of(play: Play) -> None:
    ended = play(PYPI, "wrong_threads", 1)
    assert "without MPI_THREAD_SERIALIZED" in ended.stdout, ended


@slow
def test_an_mpirun_of_another_mpi(play: Play) -> None:
    ended = play(MPICH, "wrong_mpirun", 2, MPI4PY_MPIABI="openmpi", LD_LIBRARY_PATH="")
    assert "PMI_SIZE=2, but Open MPI" in ended.stdout, ended
