"""Ranks that mpirun has started: of PyPI's Open MPI, Debian's, and Debian's MPICH. There are more ranks than cores."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from reigen.cluster.membership.control_service import ControlService
from tests.mpirun import DEBIAN, MPICH, PYPI, Ended, find, run
from tests.multiprocess import launcher
from tests.patience import patiently

_RANKS = str(Path(__file__).with_name("mpi_ranks.py"))
pytestmark = pytest.mark.slow
BUFFERED = {"PYTHONUNBUFFERED": ""}
RANK = "import os, sys, time\nrank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
ALL = pytest.mark.parametrize("mpi", [PYPI, DEBIAN, MPICH])

Play = Callable[..., Ended]


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    """``play(mpi, scenario, num_ranks, options)``: a scenario of `mpi_ranks` to its end."""
    secret = secrets.token_bytes(32)
    server = ControlService(secret)
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
    assert ended.seconds < 90  # the deadlines of all others are longer
    assert "rank 0 did not call init() in time" in ended.stderr


@ALL
def test_a_rank_that_is_stopped_ends_the_job_at_the_deadline(mpi: str, play: Play) -> None:
    def attempt(patience: float) -> None:
        ended = play(mpi, "silent_rank", REIGEN_TEST_PATIENCE=f"{patience:g}")
        assert ended.exit_code != 0
        assert "the others know who is missing" in ended.stdout
        assert "rank(s) 2 did not take their part in time" in ended.stderr

    patiently(attempt, 1.0)


@ALL
def test_late_data_does_not_reach_the_caller(mpi: str, play: Play) -> None:
    ended = play(mpi, "late_data", 2)
    assert "untouched" in ended.stdout, ended


@ALL
def test_a_thread_may_give_up_while_another_waits(mpi: str, play: Play) -> None:
    ended = play(mpi, "aborted_by_another_thread")
    assert ended.stdout.count("told") >= 1, ended
    assert ended.seconds < 90  # the deadlines of all others are longer


@ALL
def test_a_death_ends_the_job(mpi: str, play: Play) -> None:
    ended = play(mpi, "killed_rank")
    assert ended.exit_code != 0
    assert ended.seconds < 90  # the deadlines of all others are longer


def test_survivors_know_who_died_where_mpi_lets_them_live(play: Play) -> None:
    ended = play(PYPI, "killed_rank", 3, "--with-ft", "ulfm")
    assert "survived the death of 2" in ended.stdout, ended
    assert ended.exit_code != 0
    assert ended.seconds < 90  # the deadlines of all others are longer


@ALL
def test_what_else_there_is_to_do_is_done(mpi: str, play: Play) -> None:
    ended = play(mpi, "other_work", 2)
    assert ended.exit_code == 0, ended
    assert ended.stdout.count("worked") == 2


@ALL
def test_backends_of_some_ranks(mpi: str, play: Play) -> None:
    ended = play(mpi, "sets", 4)
    assert ended.exit_code == 0, ended
    assert ended.stdout.count("closed") == 4


def test_threads_that_mpi_was_not_told_of(play: Play) -> None:
    ended = play(PYPI, "wrong_threads", 1)
    assert "without MPI_THREAD_SERIALIZED" in ended.stdout, ended


def test_mpi_that_is_not_initialised_or_not_any_more(play: Play) -> None:
    ended = play(PYPI, "not_initialised", 1)
    assert "call MPI.Init_thread() before init()" in ended.stdout, ended
    assert "MPI has been finalized" in ended.stdout


def test_an_mpirun_of_another_mpi(play: Play) -> None:
    ended = play(MPICH, "wrong_mpirun", 2, MPI4PY_MPIABI="openmpi", LD_LIBRARY_PATH="")
    assert "PMI_SIZE=2, but Open MPI" in ended.stdout, ended


def by_mpirun(code: str, *options: str) -> list[str]:
    """Arguments of `reigen run` that start ``code`` on three ranks by mpirun."""
    return ["--launcher", "mpi", "-np", "3", *options, sys.executable, "-Sc", RANK + code]


def needs_mpirun(directory: Path) -> None:
    if isinstance(reason := find(PYPI, directory), str):
        pytest.skip(reason)


def test_reigen_run_starts_ranks_by_mpirun(tmp_path: Path) -> None:
    needs_mpirun(tmp_path)
    code, out, err = launcher.run(*by_mpirun("print('here is', rank)"), env=BUFFERED)
    assert code == 0, err
    assert sorted(line.split(": ")[-1] for line in out.splitlines()) == ["here is 0", "here is 1", "here is 2"]


def test_ranks_of_mpirun_report_their_metrics(tmp_path: Path) -> None:
    needs_mpirun(tmp_path)
    path, code = tmp_path / "m.jsonl", "import reigen; reigen.init(); reigen.report_progress(steps=7)"
    ranks = ("--launcher", "mpi", "-np", "3", "--metrics-file", str(path), "--top")
    status, _, err = launcher.run(*ranks, sys.executable, "-c", code)
    assert status == 0, err
    assert "mean nothing to Reigen" not in err
    *processes, end = map(json.loads, path.read_text().splitlines())
    steps = {each["rank"]: each["metrics"]["reigen_steps_total"] for each in processes if each["final"]}
    assert steps == {0: 7, 1: 7, 2: 7}
    assert (end["role"], end["exit_code"], end["failure"]) == ("job", 0, "")


def test_the_exit_code_is_that_of_the_rank_that_failed(tmp_path: Path) -> None:
    needs_mpirun(tmp_path)
    code, _, err = launcher.run(*by_mpirun("sys.exit(7) if rank == 1 else time.sleep(300)"))
    assert code == 7
    assert err.splitlines()[-1] == "reigen run: mpirun (Open MPI 5) ended with exit code 7"


def test_options_of_horovodrun(tmp_path: Path) -> None:
    needs_mpirun(tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text("controller: mpi\n")
    arguments = by_mpirun("print(os.environ['SEED'] + ' ' + os.environ['OMPI_MCA_btl_base_verbose'])", "-x", "SEED=5")[
        2:
    ]
    code, out, err = launcher.run(
        "--config-file", str(file), "--mpi-args=--mca btl_base_verbose 3", *arguments, env=BUFFERED
    )
    assert code == 0, err
    assert out.count("5 3") == 3


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_job(signum: signal.Signals, tmp_path: Path) -> None:
    needs_mpirun(tmp_path)
    with launcher.launched(*by_mpirun("print('up', flush=True); time.sleep(300)")) as job:
        job.lines(3)
        job.process.send_signal(signum)
        code, _, err = job.finish()
    assert code == 128 + signum
    assert f"stopped by {signum.name}" in err


def test_a_killed_mpirun_leaves_no_directory_that_the_next_one_with_its_pid_would_find(tmp_path: Path) -> None:
    needs_mpirun(tmp_path)
    kept = tmp_path / "kept"
    kept.mkdir()
    arguments = by_mpirun("print('up', os.getppid(), flush=True); time.sleep(300)")
    with launcher.launched(*arguments, env={"TMPDIR": str(kept)}) as job:
        mpirun = int(job.lines(3)[0].split()[-1])
        [directory] = kept.glob("*/ompi.*")
        assert directory.name == f"ompi.{mpirun}"
        os.kill(mpirun, signal.SIGKILL)
        code, _, err = job.finish()
    assert code == 128 + signal.SIGKILL, err
    assert list(kept.iterdir()) == []


def test_a_killed_launcher_leaves_nothing(tmp_path: Path) -> None:
    needs_mpirun(tmp_path)
    with launcher.launched(*by_mpirun("print('up', flush=True); time.sleep(300)")) as job:
        job.lines(3)
        job.process.kill()
