"""Jobs that somebody else has started: torchrun, srun, MPI-like variables, a shell; and what goes wrong then."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from reigen.launch.supervision.spawn import reserve_port
from reigen.testing.environment import clean_environment
from tests.mpirun import MPICH, PYPI, find, run
from tests.multiprocess.launcher import until
from tests.patience import patiently

pytestmark = pytest.mark.slow
DEADLINE_SECONDS = 60.0

#: Every rank prints what it is and what it got, twice: a job may be joined again.
TRAIN = """
import json, os, sys
import numpy as np
import reigen
for _ in range(2):
    reigen.init()
    total = reigen.allreduce(np.full(3, float(reigen.rank() + 1)), op=reigen.Sum)
    place = [reigen.rank(), reigen.size(), reigen.local_rank(), reigen.local_size(), reigen.cross_rank()]
    reigen.shutdown()
    # one write a line: the ranks share one pipe
    os.write(1, (json.dumps([place, total.tolist()]) + "\\n").encode())
"""


def results(output: str) -> list[list[object]]:
    """What the ranks printed, sorted."""
    return sorted(json.loads(line) for line in output.splitlines() if line.startswith("[["))


def expected(size: int, times: int = 2) -> list[list[object]]:
    """What `TRAIN` prints on ``size`` ranks of one host."""
    total = size * (size + 1) / 2
    return sorted([[rank, size, rank, size, 0], [total] * 3] for rank in range(size) for _ in range(times))


@contextmanager
def ranks(programs: Sequence[str], variables: Sequence[dict[str, str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """A process for each program, with variables of its own."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**clean_environment(), **its},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for program, its in zip(programs, variables, strict=True)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def finish(started: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each."""
    ends = [process.communicate(timeout=DEADLINE_SECONDS) for process in started]
    return [(process.returncode, *end) for process, end in zip(started, ends, strict=True)]


def run_all(size: int, variables: Sequence[dict[str, str]]) -> str:
    """What `TRAIN` printed on all ranks, none of which failed."""
    with ranks([TRAIN] * size, variables) as started:
        ends = finish(started)
    assert [code for code, _, _ in ends] == [0] * size, ends
    return "".join(out for _, out, _ in ends)


def by_hand(rank: int, size: int, **more: str) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", **more}


# -- launchers --------------------------------------------------------------------------------------------------------


def test_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    done = subprocess.run(
        command,
        env={**clean_environment(), "REIGEN_LOG": "info"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert results(done.stdout) == expected(3)
    assert "3 process(es), started by torchrun: RANK=0, WORLD_SIZE=3" in done.stderr


@pytest.mark.parametrize(
    "names",
    [
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
        ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    ],
)
def test_variables_of_a_launcher_on_one_host(names: tuple[str, ...]) -> None:
    variables = [dict(zip(names, (str(rank), "2", str(rank), "2"), strict=True)) for rank in range(2)]
    assert results(run_all(2, variables)) == expected(2)


@pytest.mark.parametrize("secret", [{}, {"REIGEN_SECRET": os.urandom(32).hex()}])
def test_started_by_hand(secret: dict[str, str]) -> None:
    port = os.urandom(4).hex()
    assert results(run_all(2, [by_hand(rank, 2, MASTER_PORT=port, **secret) for rank in range(2)])) == expected(2)


def test_jobs_of_one_shell_at_the_same_time_do_not_meet_if_their_ports_differ() -> None:
    variables = [
        by_hand(rank, 2, MASTER_PORT=port) for port in (os.urandom(4).hex(), os.urandom(4).hex()) for rank in (0, 1)
    ]
    assert results(run_all(4, variables)) == expected(2, times=4)


def test_the_next_command_of_a_script_is_the_next_life(tmp_path: Path) -> None:
    """Rank 1 begins its second command long before rank 0, which hosts the service, has ended its first."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN + "if reigen.is_initialized() or len(sys.argv) > 1: sys.stdin.readline()\n")
    environ = clean_environment()
    command = f"{sys.executable} {script} WAIT && {sys.executable} {script}"
    port = os.urandom(4).hex()
    started = [
        subprocess.Popen(
            ["bash", "-c", command.replace(" WAIT", " wait" if rank == 0 else "")],
            env={**environ, **by_hand(rank, 2, MASTER_PORT=port)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        second = [started[1].stdout.readline() for _ in range(2)]  # type: ignore[union-attr]
        with pytest.raises(subprocess.TimeoutExpired):
            started[1].wait(2.0)  # its second life waits for rank 0's
        ends = finish(started)
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert results("".join(second) + ends[0][1] + ends[1][1]) == expected(2, times=4)


@pytest.mark.parametrize("secret", [{}, {"REIGEN_SECRET": os.urandom(32).hex()}])
def test_a_program_that_starts_its_ranks_itself(secret: dict[str, str]) -> None:
    environ = {"SLURM_PROCID": "7", "SLURM_STEP_NUM_TASKS": "8", **secret}  # it knows better
    with reserve_port() as free:
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        programs = [
            TRAIN.replace("reigen.init()", f"reigen.init(rank={rank}, size=2, coordinator={coordinator!r})")
            for rank in range(2)
        ]
        with ranks(programs, [environ, environ]) as started:
            ends = finish(started)
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert results(ends[0][1] + ends[1][1]) == expected(2)


# -- what goes wrong --------------------------------------------------------------------------------------------------

INIT = "import reigen; reigen.init(); print('in', flush=True); input()"


@pytest.mark.parametrize("secret", [{}, {"REIGEN_SECRET": os.urandom(32).hex()}])
def test_a_child_of_a_rank_is_no_rank(secret: dict[str, str]) -> None:
    child = (
        "import reigen, reigen.numpy_ops, subprocess, sys\n"
        "reigen.init()\n"
        "command = [sys.executable, '-c', 'import reigen; reigen.init()']\n"
        "done = subprocess.run(command, capture_output=True, text=True)\n"
        "print(done.stderr)\n"
        "reigen.numpy_ops.barrier()\n"  # rank 0, which knows who the ranks are, has to be there until then
    )
    port = os.urandom(4).hex()
    with ranks([child, child], [by_hand(rank, 2, MASTER_PORT=port, **secret) for rank in range(2)]) as started:
        pids = [process.pid for process in started]
        ends = finish(started)
    assert [code for code, _, _ in ends] == [0, 0]
    for rank in range(2):
        assert f"ConfigError: rank {rank} of this job is process {pids[rank]} " in ends[rank][1]


def test_several_hosts_without_a_secret_are_told_what_to_set() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    with ranks([INIT], [variables]) as started:
        ((code, _, err),) = finish(started)
    assert code == 1
    for part in (
        "whoever set RANK and WORLD_SIZE started this process",
        "REIGEN_SECRET",
        "REIGEN_SECRET_FILE",
        "MASTER_ADDR",
    ):
        assert part in err


def test_the_wrong_secret_ends_in_an_error_on_every_rank() -> None:
    def attempt(seconds: float) -> None:
        common = {"MASTER_PORT": os.urandom(4).hex(), "REIGEN_START_TIMEOUT": f"{seconds:g}"}
        variables = [by_hand(rank, 2, **common, REIGEN_SECRET=digits * 64) for rank, digits in enumerate("ab")]
        with ranks([INIT, INIT], variables) as started:
            ends = finish(started)
        assert [code for code, _, _ in ends] == [1, 1]
        assert f"rank(s) 1 did not call init() within {seconds:g} s" in ends[0][2]
        assert f"rank 0 did not call init() within {seconds:g} s" in ends[1][2]
        assert "is its secret the same" in ends[1][2]

    patiently(attempt, 2.0)  # one must find the other's service before its time is up


def test_rank_0_dies_before_the_others_are_in() -> None:
    host = (
        "import os\n"
        "from reigen.cluster.bootstrap.control import ServiceOptions, locate_service\n"
        "from reigen.cluster.environ import detect_job\n"
        "access = locate_service(detect_job(os.environ), os.environ, ServiceOptions())\n"
        "print('serves', flush=True)\n"
        "input()\n"
    )
    port = os.urandom(4).hex()
    with ranks([host, INIT], [by_hand(rank, 2, MASTER_PORT=port) for rank in range(2)]) as started:
        zero, one = started
        assert zero.stdout is not None
        zero.stdout.readline()
        wait_until_connected(zero.pid)
        zero.send_signal(signal.SIGKILL)
        code, _, err = finish([one])[0]
    assert code == 1
    assert "PeerLostError: rank 0 has ended, and with it the job's control service" in err


def wait_until_connected(pid: int) -> None:
    """Until a process has accepted a connection over TCP that it keeps."""

    def connected() -> bool:
        sockets = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
        return any(line.split()[3] == "01" and f"socket:[{line.split()[9]}]" in sockets for line in lines)

    until(connected)


# -- mpirun -----------------------------------------------------------------------------------------------------------

#: MPI says that every rank has a host of its own: then rank 0 tells the others over MPI.
HOSTS_OF_THEIR_OWN = {
    PYPI: {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
    MPICH: {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
}


@pytest.mark.parametrize("hosts", ["one", "several"])
@pytest.mark.parametrize("name", [PYPI, pytest.param(MPICH, marks=pytest.mark.slow)])
def test_mpirun(name: str, hosts: str, tmp_path: Path) -> None:
    mpi = find(name, tmp_path)
    if isinstance(mpi, str):
        pytest.skip(mpi)
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    pretend = [] if hosts == "one" else ["env", *(f"{key}={value}" for key, value in HOSTS_OF_THEIR_OWN[name].items())]
    done = run(mpi, 3, [*pretend, sys.executable, str(script)], environ={"REIGEN_LOG": "info"})
    assert done.exit_code == 0, done
    assert [total for _, total in results(done.stdout)] == [[6.0] * 3] * 6
    assert "3 process(es), started by mp" in done.stderr
    assert ("tells the others over MPI" in done.stderr) == (hosts == "several")
