"""Jobs with parameter servers as users start them: the closed form holds, whatever dies on the way."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from reigen.cluster.environ import WORKERS_LOST_EXIT_CODE
from tests.mpirun import PYPI, find
from tests.multiprocess.launcher import Launcher, launched, run, until
from tests.strangers import wants

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


def processes_of(job: Launcher, role: str, number: int) -> list[int]:
    """The process that is this server, or the scheduler; none while it is away."""
    wanted = {f"DMLC_ROLE={role}".encode(), f"DMLC_TASK_ID={number}".encode()}
    return [pid for pid in job.processes() if wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))]


def process_of(job: Launcher, role: str, number: int) -> int:
    """The process that is this server, or the scheduler."""
    found = processes_of(job, role, number)
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


#: Worker 1 is killed in its first life, behind its first push.
SETS_TWICE = """
import os, signal
import numpy as np
from reigen import kv, optim
store = kv.create("dist_sync")
store.set_optimizer(optim.create("sgd", learning_rate=1.0))
store.set_optimizer(optim.create("sgd", learning_rate=1.0, momentum=0.5))
store.init("w", np.zeros(3, np.float32))
out = np.empty(3, np.float32)
while store.rounds("w") < 3:
    store.pushpull("w", np.ones(3, np.float32), out)
    if store.rank == 1 and os.environ["DMLC_NUM_ATTEMPT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
store.close()
print(out.tolist())
"""


def test_a_worker_that_is_started_again_sets_the_optimizer_twice_again() -> None:
    environ = {**BOUND, "REIGEN_KV_ON_WORKER_LOSS": "wait"}
    status, out, err = run(*JOB, sys.executable, "-c", SETS_TWICE, env=environ)
    assert "reigen run: rank 1: killed by SIGKILL; it is started again\n" in err
    values = [-2.0 - 3.0 - 3.5] * 3  # momentum 0.5: steps of 2, 3 and 3.5
    assert (status, sorted(out.splitlines())) == (0, [f"[0] {values}", f"[1] {values}"]), err


#: Worker 1 leaves in good order and fails then, before worker 0 leaves or after that.
FAILS_BEHIND_IT = """
import sys
import numpy as np
from reigen import kv
how = sys.argv[1]
print("begins", flush=True)
store = kv.create("dist_sync")
store.init("w", np.zeros(3, np.float32))
store.pushpull("w", np.ones(3, np.float32))
store.barrier()
if store.rank == 0 and how.endswith("waits"):
    while True:
        store.pushpull("w", np.ones(3, np.float32))
store.close()
if store.rank == 0:
    pass
elif how.startswith("exits"):
    print("last words", file=sys.stderr, flush=True)
    sys.exit(3)
else:
    raise RuntimeError("last words")
"""


@pytest.mark.parametrize("how", ["exits", "raises", "exits while the other waits", "raises while the other waits"])
def test_a_worker_that_fails_behind_its_stores_is_not_started_again(how: str) -> None:
    program = (sys.executable, "-c", FAILS_BEHIND_IT, how)
    status, out, err = run(*JOB, *program, env={**BOUND, "REIGEN_KV_ON_WORKER_LOSS": "wait"})
    assert sorted(out.splitlines()) == ["[0] begins", "[1] begins"], err
    code = 3 if how.startswith("exits") else 1
    assert status == code
    last = err[err.index("reigen run: ") :]
    assert last.startswith(f"reigen run: rank 1 failed first: exit code {code}\n  the last lines of its stderr:\n"), err
    assert "last words\n" in last
    assert "started again" not in err


def test_of_a_worker_that_fails_each_time_the_first_failure_is_reported() -> None:
    code = (
        "import os, sys; n = int(os.environ['DMLC_NUM_ATTEMPT']); rank = os.environ['DMLC_TASK_ID'];\n"
        "if rank == '1': print('words of life', n, file=sys.stderr); sys.exit(3 + n)\n"
        "import reigen.kv; reigen.kv.create('dist_sync').barrier()"
    )
    environ = {**BOUND, "REIGEN_KV_ON_WORKER_LOSS": "wait"}
    status, _, err = run(*JOB, "--server-restarts", "2", sys.executable, "-c", code, env=environ)
    assert status == 3, err
    assert err[err.index("reigen run: rank 1 failed first") :] == (
        "reigen run: rank 1 failed first: exit code 3\n  the last lines of its stderr:\n    words of life 0\n"
        "  it was started again 2 times, and has failed again\n  1 other rank was stopped because of it\n"
    )


@pytest.mark.parametrize(
    ("role", "name", "place"),
    [("server", "server 1", "a disk"), ("server", "server 1", "memory"), ("scheduler", "scheduler", "")],
)
def test_a_killed_server_with_snapshots_and_a_killed_scheduler_are_started_again(
    role: str, name: str, place: str, rest: Path, tmp_path: Path
) -> None:
    keeps = {"REIGEN_KV_SNAPSHOT_DIR": str(tmp_path), "REIGEN_KV_SNAPSHOT_SECONDS": "0"} if place == "a disk" else {}
    copies = ("--replicate-servers", "2") if place == "memory" else ()
    with launched(*JOB, *copies, *PROGRAM, str(rest), env={**BOUND, **keeps}) as job:
        assert sorted(job.lines(2)) == ["[0] resting", "[1] resting"]
        first = process_of(job, role, int(role == "server"))
        os.kill(first, signal.SIGKILL)
        until(lambda: first not in job.processes())
        rest.unlink()
        status, out, err = job.finish()
    assert (status, sorted(out.splitlines())) == (0, DONE), err
    assert f"reigen run: {name}: killed by SIGKILL; it is started again\n" in err


@pytest.mark.parametrize("victims", ["scheduler server", "server scheduler", "scheduler server worker", "all"])
def test_what_was_acknowledged_outlives_the_scheduler_and_whoever_dies_with_it(
    victims: str, rest: Path, tmp_path: Path
) -> None:
    """Nobody who knows the job is there when the processes of the new lives find each other: they are stopped."""
    keeps = {
        "REIGEN_KV_SNAPSHOT_DIR": str(tmp_path),
        "REIGEN_KV_SNAPSHOT_SECONDS": "0",
        "REIGEN_KV_ON_WORKER_LOSS": "wait",
        "PS_VERBOSE": "1",
    }
    parts = [("scheduler", 0), *((role, number) for role in ("server", "worker") for number in range(2))]
    if victims != "all":
        parts = [(role, int(role != "scheduler")) for role in victims.split()]
    with launched(*JOB, *PROGRAM, str(rest), env={**BOUND, **keeps}) as job:
        assert sorted(job.lines(2)) == ["[0] resting", "[1] resting"]
        killed = [process_of(job, role, number) for role, number in parts]
        others = [process_of(job, role, number) for role in ("server", "worker") for number in range(2)]
        others = [pid for pid in others if pid not in killed]
        for pid in others:
            os.kill(pid, signal.SIGSTOP)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        until(lambda: all(_has_joined_again(job, role, number) for role, number in parts))
        for pid in others:
            os.kill(pid, signal.SIGCONT)
        rest.unlink()
        status, out, err = job.finish()
    assert (status, sorted(line for line in out.splitlines() if "resting" not in line)) == (0, DONE), err
    assert not any(tmp_path.glob("job-*"))


def _has_joined_again(job: Launcher, role: str, number: int) -> bool:
    """Whether the process that was started again has connected to something, or (the scheduler) listens."""
    wanted = {f"DMLC_ROLE={role}".encode(), f"DMLC_TASK_ID={number}".encode(), b"DMLC_NUM_ATTEMPT=1"}
    for pid in job.processes():
        with suppress(OSError):
            if wanted <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                sockets = [link for link in Path(f"/proc/{pid}/fd").iterdir() if "socket:" in os.readlink(link)]
                # a server listens, and has a connection to the scheduler
                return len(sockets) >= {"scheduler": 1, "server": 2, "worker": 1}[role]
    return False


def listens(address: tuple[str, int]) -> bool:
    with suppress(ConnectionRefusedError), socket.create_connection(address):
        return True
    return False


@pytest.mark.parametrize(
    ("program", "options"), [("run", JOB), ("launch", ("-n", "2", "-s", "2", "--launcher", "local", "--as-mxnet"))]
)
def test_nobody_else_takes_the_schedulers_port_not_even_while_there_is_none(
    program: str, options: tuple[str, ...], rest: Path
) -> None:
    with launched(*options, *PROGRAM, str(rest), program=program, env=BOUND) as job:
        assert sorted(job.lines(2)) == ["[0] resting", "[1] resting"]
        first = process_of(job, "scheduler", 0)
        environ = dict(entry.split(b"=", 1) for entry in Path(f"/proc/{first}/environ").read_bytes().split(b"\0")[:-1])
        address = environ[b"DMLC_PS_ROOT_URI"].decode(), int(environ[b"DMLC_PS_ROOT_PORT"])
        with wants(address[1]) as stranger:
            for _ in range(2):
                os.kill(first, signal.SIGKILL)
                until(lambda gone=first: gone not in job.processes())  # type: ignore[misc]
                until(lambda: processes_of(job, "scheduler", 0))
                first = process_of(job, "scheduler", 0)
                until(lambda: listens(address))
            assert stranger.stop() == 0
        rest.unlink()
        status, out, err = job.finish()
    assert (status, sorted(out.splitlines())) == (0, DONE), err
    assert err.count("reigen run: scheduler: killed by SIGKILL; it is started again\n") == 2


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
