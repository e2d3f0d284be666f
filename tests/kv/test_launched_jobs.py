"""Jobs with parameter servers as users start them: the closed form holds, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from tests.mpirun import PYPI, find
from tests.multiprocess.launcher import Launcher, launched, run, until

from reigen.cluster.environ import WORKERS_LOST_EXIT_CODE

pytestmark = pytest.mark.slow
PROGRAM = (sys.executable, str(Path(__file__).with_name("train.py")))
#: 1 + rate * rounds * n * (n + 1) / 2, for a rate of 0.5, 6 rounds, and 2 workers.
VALUE = "10.0"
DONE = [f"[{rank}] {rank} of 2: {{{VALUE}}}" for rank in range(2)]
BOUND = {"REIGEN_KV_BIGARRAY_BOUND": "1000"}
#: Servers may take that long to end after the workers.
JOB = ("-np", "2", "-s", "2", "--grace-seconds", "15")


@pytest.fixture
def rest(tmp_path: Path) -> Path:
    """While it exists, workers rest in the middle."""
    file = tmp_path / "rest"
    file.touch()
    return file


def process_of(job: Launcher, role: str, number: int) -> int:
    """The process that is this server, or the scheduler."""
    wanted = {f"DMLC_ROLE={role}".encode(), f"DMLC_TASK_ID={number}".encode()}
    found = [pid for pid in job.processes() if wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(
    ("program", "options"), [("run", JOB), ("launch", ("-n", "2", "-s", "2", "--launcher", "local"))]
)
def test_servers_beside_the_workers_and_a_program_in_all_roles(program: str, options: tuple[str, ...]) -> None:
    status, out, err = run(*options, *PROGRAM, program=program, env=BOUND)
    assert (status, err) == (0, "")
    assert sorted(out.splitlines()) == DONE


@pytest.mark.parametrize("program", ["run", "launch"])
def test_by_mpirun(program: str, tmp_path: Path) -> None:
    if isinstance(reason := find(PYPI, tmp_path), str):
        pytest.skip(reason)
    options = ("--launcher", "mpi", "-np" if program == "run" else "-n", "2", "-s", "2")
    status, out, err = run(*options, *PROGRAM, program=program, env={**BOUND, "PYTHONUNBUFFERED": ""})
    assert status == 0, out + err
    assert sorted(line.partition(": ")[2] for line in out.splitlines()) == [line[4:] for line in DONE]


@pytest.mark.parametrize(("kind", "workers"), [("local", "0 of 1 0 of 1"), ("ring", "0 of 2 1 of 2")])
def test_servers_of_a_program_that_needs_none_do_not_run_it_either(kind: str, workers: str) -> None:
    code = f"from reigen import kv; s = kv.create({kind!r}); print(f'{{s.rank}} of {{s.num_workers}}')"
    options = ("-n", "2", "-s", "2", "--launcher", "local", "--grace-seconds", "60")
    status, out, err = run(*options, sys.executable, "-c", code, program="launch")
    assert (status, " ".join(sorted(line[4:] for line in out.splitlines()))) == (0, workers), err
    assert sorted(err.splitlines()) == [
        f"[{name}] a store of type {kind!r} needs no {name.split()[0]}: this process ends"
        for name in ("scheduler", "server 0", "server 1")
    ]


def test_a_program_may_take_longer_than_the_deadline_until_it_makes_a_store() -> None:
    code = f"import runpy, time; time.sleep(7); runpy.run_path({PROGRAM[1]!r}, run_name='__main__')"
    status, out, err = run(*JOB, sys.executable, "-c", code, env={**BOUND, "REIGEN_DEADLINE": "6"})
    assert (status, sorted(out.splitlines())) == (0, DONE), err


def test_a_killed_worker_that_servers_wait_for_is_started_again(rest: Path) -> None:
    environ = {**BOUND, "REIGEN_KV_ON_WORKER_LOSS": "wait"}
    with launched(*JOB, *PROGRAM, str(rest), "1", env=environ) as job:
        assert sorted(job.lines(3)) == ["[0] resting", "[1] resting", "[1] resting"]
        rest.unlink()
        status, out, err = job.finish()
    assert (status, sorted(out.splitlines())) == (0, DONE)
    assert "reigen run: rank 1: killed by SIGKILL; it is started again\n" in err


@pytest.mark.parametrize(("role", "name"), [("server", "server 1"), ("scheduler", "scheduler")])
def test_a_killed_server_with_snapshots_and_a_killed_scheduler_are_started_again(
    role: str, name: str, rest: Path, tmp_path: Path
) -> None:
    keeps = {"REIGEN_KV_SNAPSHOT_DIR": str(tmp_path), "REIGEN_KV_SNAPSHOT_SECONDS": "0"}
    with launched(*JOB, *PROGRAM, str(rest), env={**BOUND, **(keeps if role == "server" else {})}) as job:
        assert sorted(job.lines(2)) == ["[0] resting", "[1] resting"]
        first = process_of(job, role, int(role == "server"))
        os.kill(first, signal.SIGKILL)
        until(lambda: first not in job.processes())
        rest.unlink()
        status, out, err = job.finish()
    assert (status, sorted(out.splitlines())) == (0, DONE), err
    assert f"reigen run: {name}: killed by SIGKILL; it is started again\n" in err


def test_a_killed_server_without_snapshots_ends_the_job_by_name(rest: Path) -> None:
    with launched(*JOB, *PROGRAM, str(rest), env=BOUND) as job:
        job.lines(2)
        os.kill(process_of(job, "server", 1), signal.SIGKILL)
        status, _, err = job.finish()
    assert status == 137
    assert "reigen run: server 1 failed first: killed by SIGKILL\n" in err


def test_a_job_whose_workers_are_all_lost_ends_and_says_so_although_servers_keep_snapshots(
    rest: Path, tmp_path: Path
) -> None:
    environ = {"REIGEN_KV_SNAPSHOT_DIR": str(tmp_path), "PS_HEARTBEAT_INTERVAL": "0.2", "PS_HEARTBEAT_TIMEOUT": "8"}
    with launched("-np", "1", "-s", "1", *PROGRAM, str(rest), env=environ) as job:
        job.lines(1)
        os.kill(process_of(job, "worker", 0), signal.SIGSTOP)
        status, _, err = job.finish()
    assert status == WORKERS_LOST_EXIT_CODE
    assert "it is started again" not in err
    last = err[err.index(" failed first: ") :]
    assert "the job is over: worker 0 on host " in last
    assert " is lost: nothing was heard of it for 8 s\n" in last
