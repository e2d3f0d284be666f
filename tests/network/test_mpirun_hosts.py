"""Jobs that mpirun starts on several machines, by ssh. However they end, nothing is left on any of them."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from reigen.launch.hosts import HostInfo
from reigen.launch.mpi.mpirun import Mpirun, MpirunContext, MpirunFamily, exported_names, mpirun_command, mpirun_environ
from reigen.launch.options import LaunchOptions, NetworkOptions
from reigen.launch.ssh.command import SshOptions
from tests.mpirun import DEBIAN, MPICH, PYPI, find
from tests.network.conftest import MakeHosts
from tests.network.test_ssh import Job, jobs_of
from tests.network.waiting import wait_for

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2]
TRAIN = (sys.executable, str(Path(__file__).with_name("train.py")))
#: Says that it is ready, and goes on for as long as it may.
_STAYS = """
import os, time, numpy, reigen
reigen.init()
os.write(1, b"ready\\n")
while True:
    reigen.allreduce(numpy.ones(1000))
    time.sleep(0.05)
"""
STAYS = (sys.executable, "-c", _STAYS)
KINDS = {PYPI: MpirunFamily.OPEN_MPI_5, DEBIAN: MpirunFamily.OPEN_MPI_4, MPICH: MpirunFamily.HYDRA}
_REPORT = re.compile(r"\[\d+, \d+, \d+, [\d.]+\]$")
HOSTS = (HostInfo("h1", 2), HostInfo("h2", 2))
#: Misses a host sooner than with our own options, and later than its ranks, whose words mpirun forwards until then.
SSH = SshOptions(("ssh", "-o", "ServerAliveInterval=3"))

Start = Callable[..., Job]


@pytest.fixture
def start(make_hosts: MakeHosts, tmp_path: Path) -> Start:
    """``start(mpi, command, interfaces)``: four ranks on two machines, by that MPI's mpirun."""

    def make(name: str, command: tuple[str, ...], interfaces: tuple[str, ...] = ("eth0",), **more: str) -> Job:
        mpi = find(name, tmp_path)
        if isinstance(mpi, str):
            pytest.skip(mpi)
        hosts = make_hosts(2, ssh_port=22, shared=[tmp_path])
        options = LaunchOptions(command, 4, hosts=HOSTS, network=NetworkOptions(interfaces), ssh=SSH)
        wanted = {**mpi.environ, "PYTHONPATH": f"{SOURCE / 'src'}:{SOURCE}", "PYTHONUNBUFFERED": "", **more}
        wanted |= {"REIGEN_NETWORK_INTERFACES": ",".join(interfaces)} if interfaces else {}
        environ = mpirun_environ(KINDS[name], options, wanted, is_terminal=False, num_cores=2)
        names = tuple(sorted({*exported_names(environ, ()), *mpi.environ}))
        there = MpirunContext(is_root=True, num_cores=2, has_remote_hosts=True, variables=names)
        line = mpirun_command(Mpirun(mpi.command[0], KINDS[name], ""), options, there)
        return Job(hosts, hosts[0].start(line, env=environ, cwd=SOURCE))

    return make


def reports(out: str) -> list[list[float]]:
    """What the ranks of `train` printed, behind whatever mpirun put before it."""
    return sorted(json.loads(match[0]) for line in out.splitlines() if (match := _REPORT.search(line)))


@pytest.mark.parametrize("mpi", [PYPI, DEBIAN, MPICH])
def test_ranks_of_two_machines_find_each_other_over_mpi(start: Start, mpi: str) -> None:
    code, out, err = start(mpi, TRAIN, REIGEN_LOG="info").finish()
    assert code == 0, out + err
    assert reports(out) == [[rank, 4, 2, 10.0] for rank in range(4) for _ in range(2)]
    assert "backend shm+mpi: 4 ranks on 2 hosts" in err


def test_reigen_run_by_mpirun(make_hosts: MakeHosts, tmp_path: Path) -> None:
    if isinstance(reason := find(PYPI, tmp_path), str):
        pytest.skip(reason)
    hosts = make_hosts(2, ssh_port=22)
    run = (sys.executable, "-m", "reigen", "run", "--launcher", "mpi", "-np", "4", "-H", "h1:2,h2:2", "--no-prefix")
    environ = {"PYTHONPATH": str(SOURCE / "src"), "PYTHONUNBUFFERED": ""}
    code, out, err = Job(hosts, hosts[0].start([*run, *TRAIN], env=environ, cwd=SOURCE)).finish()
    assert code == 0, out + err
    assert sorted(map(json.loads, out.splitlines())) == [[rank, 4, 2, 10.0] for rank in range(4) for _ in range(2)]


@pytest.mark.parametrize(("mpi", "victim"), [(PYPI, "h1"), (PYPI, "h2"), (DEBIAN, "h2"), (MPICH, "h2")])
def test_a_rank_that_is_killed_ends_everything(start: Start, mpi: str, victim: str) -> None:
    job = start(mpi, STAYS)
    job.wait_until_ready(4)
    host = next(host for host in job.hosts if host.name == victim)
    ranks = [pid for pid, command in jobs_of(host).items() if command.startswith(sys.executable)]
    os.kill(max(ranks), signal.SIGKILL)
    code, _, _ = job.finish()
    assert code != 0


@pytest.mark.parametrize("mpi", [PYPI, DEBIAN, MPICH])
def test_a_killed_mpirun_leaves_nothing(start: Start, mpi: str) -> None:
    job = start(mpi, STAYS)
    job.wait_until_ready(4)
    job.process.kill()
    job.finish()


def ranks_of(job: Job) -> list[str]:
    return [command for host in job.hosts for command in jobs_of(host).values() if command.startswith(STAYS[0])]


@pytest.mark.parametrize("mpi", [PYPI, DEBIAN, MPICH])
def test_ranks_end_when_a_machine_is_cut_off(start: Start, mpi: str) -> None:
    """On both sides of the cut. What mpirun itself has started on the machine that is cut off stays there for a while,
    and Open MPI 4's mpirun waits for it.
    """
    job = start(mpi, STAYS, REIGEN_PEER_TIMEOUT="3")
    job.wait_until_ready(4)
    job.hosts[1].cut()
    wait_for(lambda: not ranks_of(job), f"no rank runs: {ranks_of(job)}")
    assert "PeerLostError" in job.process.output()[1]
    if mpi != DEBIAN:
        assert job.process.wait(60.0) != 0
        wait_for(lambda: not jobs_of(job.hosts[0]), f"nothing runs on h1: {jobs_of(job.hosts[0])}")
