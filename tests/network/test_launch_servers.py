"""`reigen launch` over real ssh: servers and workers on two machines, and nothing left there however the job ends."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab import Host, Hosts
from tests.mpirun import PYPI, find
from tests.network.conftest import MakeHosts
from tests.network.test_ssh import SOURCE, Job, jobs_of
from tests.network.waiting import wait_for

pytestmark = pytest.mark.slow
LAUNCH = (sys.executable, "-m", "reigen", "launch", "-n", "2", "-s", "2")
STAYS = "print('ready', flush=True); time.sleep(300)"
#: Everybody meets at the scheduler, at the address that all were told, and is done then.
MEETS = """
import socket
where = e['DMLC_PS_ROOT_URI'], int(e['DMLC_PS_ROOT_PORT'])
if role == 'scheduler':
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where); listener.listen()
        connections = [listener.accept()[0] for _ in range(4)]
        for connection in connections: connection.sendall(b'x')
else:
    while True:
        try: connection = socket.create_connection(where); break
        except ConnectionRefusedError: time.sleep(0.01)
    connection.recv(1)
print(role, number, socket.gethostname(), e.get('DMLC_NODE_HOST'))
"""


def command(code: str) -> list[str]:
    begin = "import os, sys, time\ne = os.environ\nrole, number = e['DMLC_ROLE'], int(e['DMLC_TASK_ID'])\n"
    return [sys.executable, "-Sc", begin + code]


Start = Callable[..., Job]


@pytest.fixture
def start(make_hosts: MakeHosts) -> Start:
    """``start(code, *options)``: a job on two new machines."""

    def make(code: str, *options: str, cwd: Path = SOURCE, **environ: str) -> Job:
        hosts = make_hosts(2, ssh_port=22)
        (hosts[0].root / "root/work").mkdir()
        (hosts[0].root / "root/hosts").write_text("h1\nh2\n")
        line = [*LAUNCH, "-H", "/root/hosts", *options, *command(code)]
        variables = {"PYTHONPATH": str(SOURCE / "src"), **environ}
        return Job(hosts, hosts[0].start(line, env=variables, cwd=cwd))

    return make


def process_of(host: Host, role: str) -> int:
    """The process of a role on a machine."""
    found = [pid for pid in jobs_of(host) if f"DMLC_ROLE={role}".encode() in _environ(pid).split(b"\0")]
    assert len(found) == 1
    return found[0]


def _environ(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def test_all_meet_at_the_scheduler(start: Start) -> None:
    code, out, err = start(MEETS).finish()
    assert (code, err) == (0, ""), out + err
    assert sorted(out.splitlines()) == [
        "[0] worker 0 h1 10.77.0.1",
        "[1] worker 1 h2 10.77.0.2",
        "[scheduler] scheduler 0 h1 10.77.0.1",
        "[server 0] server 0 h1 10.77.0.1",
        "[server 1] server 1 h2 10.77.0.2",
    ]


def test_the_working_directory_is_copied_for_all(start: Start) -> None:
    job = start("print(os.getcwd())", "--sync-dst-dir", "/tmp/copied", cwd=Path("/root/work"))
    code, out, err = job.finish()
    assert (code, err) == (0, ""), out + err
    assert sorted(out.splitlines()) == [
        "[0] /root/work",
        "[1] /tmp/copied",
        "[scheduler] /root/work",
        "[server 0] /root/work",
        "[server 1] /tmp/copied",
    ]


def test_a_worker_elsewhere_that_fails_ends_everything(start: Start) -> None:
    code, _, err = start("if role == 'worker' and number == 1: sys.exit(7)\ntime.sleep(300)").finish()
    assert code == 7
    assert "reigen run: rank 1 (host h2) failed first: exit code 7\n" in err


def test_a_server_elsewhere_that_dies_ends_everything_or_is_started_again(start: Start) -> None:
    job = start(STAYS)
    job.wait_until_ready(5)
    os.kill(process_of(job.hosts[1], "server"), signal.SIGKILL)
    code, _, err = job.finish()
    assert code == 137
    assert "reigen run: server 1 (host h2) failed first: killed by SIGKILL\n" in err


def test_a_server_elsewhere_with_snapshots_is_started_again(start: Start) -> None:
    job = start(STAYS, REIGEN_KV_SNAPSHOT_DIR="/tmp/snapshots")
    job.wait_until_ready(5)
    first = process_of(job.hosts[1], "server")
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: job.output().count("[server 1] ready") == 2, "the server is there again")
    assert process_of(job.hosts[1], "server") != first
    job.process.signal(signal.SIGTERM)
    code, _, err = job.finish()
    assert code == 143
    assert "reigen run: server 1 (host h2): killed by SIGKILL; it is started again\n" in err


def test_a_crash_of_a_host_with_servers_ends_everything(start: Start) -> None:
    job = start(STAYS, REIGEN_PEER_TIMEOUT="4", REIGEN_KV_SNAPSHOT_DIR="/tmp/snapshots")
    job.wait_until_ready(5)
    job.hosts[1].crash()
    code, _, err = job.finish()
    assert code == 255
    assert "host h2 was lost, with rank 1 and server 1: " in err


def test_a_killed_launcher_leaves_no_server_anywhere(start: Start) -> None:
    job = start(STAYS)
    job.wait_until_ready(5)
    job.process.kill()
    job.finish()


def test_by_mpirun(start: Start, tmp_path: Path) -> None:
    if isinstance(reason := find(PYPI, tmp_path), str):
        pytest.skip(reason)
    code, out, err = start(MEETS, "--launcher", "mpi", PYTHONUNBUFFERED="").finish()
    assert code == 0, out + err
    found = sorted(line.partition("<stdout>: ")[2] or line for line in out.splitlines())
    assert [line.split()[:2] for line in found] == [
        *(["scheduler", "0"], ["server", "0"], ["server", "1"], ["worker", "0"], ["worker", "1"])
    ]
    assert {line.split()[2] for line in found if line.startswith("server")} == {"h1", "h2"}


def test_a_failure_under_mpirun_ends_everything(start: Start, tmp_path: Path) -> None:
    if isinstance(reason := find(PYPI, tmp_path), str):
        pytest.skip(reason)
    code, _, err = start(
        "sys.exit(7) if role == 'worker' and number == 1 else time.sleep(300)", "--launcher", "mpi"
    ).finish()
    assert code == 7
    assert err.splitlines()[-1] == "reigen run: mpirun (Open MPI 5) ended with exit code 7"


#: Reigen's own servers, and a program that uses them.
PROGRAM = (sys.executable, str(SOURCE / "tests/kv/train.py"))
DONE = ["[0] 0 of 2: {10.0}", "[1] 1 of 2: {10.0}"]


def real(hosts: Hosts, *arguments: str, **environ: str) -> Job:
    variables = {"PYTHONPATH": str(SOURCE / "src"), "REIGEN_KV_BIGARRAY_BOUND": "1000", **environ}
    line = (sys.executable, "-m", "reigen", "run", "-np", "2", "-H", "h1:1,h2:1", "-s", "2", *arguments)
    return Job(hosts, hosts[0].start(line, env=variables, cwd=SOURCE))


@pytest.mark.parametrize("where", [(), ("--server-hosts", "h3")])
def test_real_servers(make_hosts: MakeHosts, where: tuple[str, ...]) -> None:
    code, out, err = real(make_hosts(3, ssh_port=22), *where, "--verbose", *PROGRAM).finish()
    assert (code, sorted(out.splitlines())) == (0, DONE), err
    assert f"host {'h3' if where else 'h2'}: server 1: process " in err


def test_a_real_server_elsewhere_goes_on_from_its_snapshot(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2, ssh_port=22)
    for host in hosts:
        (host.root / "tmp/rest").touch()
    keeps = {"REIGEN_KV_SNAPSHOT_DIR": "/tmp/snapshots", "REIGEN_KV_SNAPSHOT_SECONDS": "0"}
    job = real(hosts, *PROGRAM, "/tmp/rest", **keeps)
    wait_for(lambda: job.output().count("[0] resting") + job.output().count("[1] resting") == 2, "workers rest")
    os.kill(process_of(hosts[1], "server"), signal.SIGKILL)
    for host in hosts:
        (host.root / "tmp/rest").unlink()
    code, out, err = job.finish()
    assert (code, sorted(out.splitlines())[::2]) == (0, DONE), out + err
    assert "reigen run: server 1 (host h2): killed by SIGKILL; it is started again\n" in err
