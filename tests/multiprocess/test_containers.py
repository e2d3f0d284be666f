"""Processes of one user and one network in containers: who gets a job's secret there, and who does not.

A container is `unshare` here: process ids and mounts of its own, the network and the user of everybody else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import pytest

from reigen.cluster.bootstrap.local import LocalBootstrapServer, ServiceEndpoint, fetch_endpoints
from reigen.errors import AuthenticationError
from reigen.testing.environment import clean_environment
from tests.kv.jobs import SCHEDULER, Job
from tests.multiprocess.test_foreign_launchers import TRAIN, by_hand, finish, ranks, results
from tests.patience import patiently

CONTAINER = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
POINTER = ServiceEndpoint("127.0.0.1:4242", b"s" * 32)
OTHER_CONTAINER = "is in another container than this process"
IMPORTS = (
    "import os, socket, struct, sys; from reigen.cluster.bootstrap.local import *; name = bytes.fromhex(sys.argv[1]); "
)
INIT = "import reigen; reigen.init(); print('in', flush=True); input()"


@pytest.fixture(scope="module", autouse=True)
def containers() -> None:
    done = subprocess.run([*CONTAINER, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no containers here: {done.stderr.strip()}")


@pytest.fixture
def name() -> bytes:
    return b"\0reigen-test/" + os.urandom(8).hex().encode()


@contextmanager
def contained(code: str, name: bytes) -> Iterator[subprocess.Popen[str]]:
    """A program in a container of its own, which is told a name."""
    command = [*CONTAINER, sys.executable, "-c", IMPORTS + code, name.hex()]
    with subprocess.Popen(
        command,
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def said(code: str, name: bytes) -> tuple[str, str]:
    with contained(code, name) as process:
        return process.communicate(timeout=60)


# -- the socket itself ------------------------------------------------------------------------------------------------


def test_a_container_of_the_same_user_gets_no_secret(name: bytes) -> None:
    with closing(LocalBootstrapServer(name, POINTER)):
        out, err = said("print(fetch_endpoints(name))", name)
        assert (out, err.count(OTHER_CONTAINER), err.count("REIGEN_SECRET (64 hex")) == ("", 1, 1)
        assert fetch_endpoints(name) == [POINTER]


#: They go on as if they had seen what they cannot see.
ASKS_ALL_THE_SAME = {
    "nothing": "",
    "a descriptor of its own": "s.send(struct.pack('i', os.memfd_create('reigen-' + 'ab' * 32))); ",
    "no descriptor": "s.send(struct.pack('i', 1234)); ",
    "a secret": "s.send(struct.pack('i', -1)); ",
}


@pytest.mark.parametrize("what", ASKS_ALL_THE_SAME)
def test_a_container_that_follows_the_protocol_without_seeing_anything_gets_no_secret(name: bytes, what: str) -> None:
    code = (
        "from reigen.net.auth import ClientHandshake, Identity, ProcessRole\n"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(20); s.connect(name)\n"
        "data = b''\n"
        "try:\n"
        f"    {ASKS_ALL_THE_SAME[what]}"
        "s.send(ClientHandshake(bytes(32), Identity(ProcessRole.RANK, 0, 'handover')).opening)\n"
        "    while chunk := s.recv(4096):\n"
        "        data += chunk\n"
        "        s.send(bytes(32))\n"
        "except OSError: pass\n"
        "print(data.hex(), 'end')"
    )
    with closing(LocalBootstrapServer(name, POINTER)):
        out, err = said(code, name)
        assert err == ""
        assert out.endswith("end\n")
        assert POINTER.secret.hex() not in out
        assert fetch_endpoints(name) == [POINTER]


def test_a_container_that_poses_as_rank_0_is_not_believed(name: bytes) -> None:
    code = "h = LocalBootstrapServer(name, ServiceEndpoint('127.0.0.1:6', b'x' * 32)); print(flush=True); input()"
    with contained(code, name) as posing:
        assert posing.stdout is not None
        posing.stdout.readline()
        with pytest.raises(AuthenticationError, match=OTHER_CONTAINER):
            fetch_endpoints(name)


def test_a_container_that_knows_no_token_of_ours_proves_nothing(name: bytes) -> None:
    """It can be looked at from here, as it is below; but it cannot look at this process."""
    code = (
        "import reigen.cluster.bootstrap.local as h\n"
        "h._read_token = lambda pid, number: bytes(32)\n"
        "handover = LocalBootstrapServer(name, ServiceEndpoint('127.0.0.1:6', b'x' * 32)); print(flush=True); input()"
    )
    with contained(code, name) as posing:
        assert posing.stdout is not None
        posing.stdout.readline()
        with pytest.raises(AuthenticationError, match="does not know this job's secret"):
            fetch_endpoints(name)


def test_a_container_with_a_user_namespace_of_its_own_gets_no_secret(name: bytes) -> None:
    """It sees all processes, but may look at none of them: root of a container without processes of its own."""
    code = (
        "import sys; from reigen.cluster.bootstrap.local import fetch_endpoints; "
        "print(fetch_endpoints(bytes.fromhex(sys.argv[1])))"
    )
    unshare = ["unshare", "--user", "--map-current-user"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespaces here")
    with closing(LocalBootstrapServer(name, POINTER)):
        done = subprocess.run(
            [*unshare, sys.executable, "-c", code, name.hex()],
            env=clean_environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.stdout == ""
    assert OTHER_CONTAINER in done.stderr


#: Another user than root, whom the kernel does not let look at everything. Changing the user makes a process one that
#: nobody may look at (PR_SET_DUMPABLE), as a program with capabilities of its own is.
ORDINARY = (
    "import ctypes, encodings.idna, traceback; os.setgid(65534); os.setuid(65534); "
    "ctypes.CDLL(None).prctl(4, int(sys.argv[2]))\n"
)


@pytest.mark.parametrize(("asked", "asks"), [("1", "1"), ("0", "1"), ("1", "0")])
def test_processes_of_an_ordinary_user_may_look_at_each_other_or_are_told(name: bytes, asked: str, asks: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    serve = (
        f"{ORDINARY}h = LocalBootstrapServer(name, ServiceEndpoint('127.0.0.1:4', b's' * 32)); "
        "print(flush=True); input(); h.close()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", IMPORTS + serve, name.hex(), asked], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        command = [sys.executable, "-c", f"{IMPORTS}{ORDINARY}print(fetch_endpoints(name))", name.hex(), asks]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        server.communicate(b"\n")
    if asked == asks == "1":
        assert (done.stdout, done.stderr) == ("[ServiceEndpoint('127.0.0.1:4')]\n", "")
    else:
        assert done.stdout == ""
        assert f"{OTHER_CONTAINER}, or otherwise kept apart from it" in done.stderr


# -- jobs -------------------------------------------------------------------------------------------------------------


@contextmanager
def in_containers(
    programs: Sequence[str], variables: Sequence[dict[str, str]]
) -> Iterator[list[subprocess.Popen[str]]]:
    """As `ranks`, each in a container of its own."""
    wrapped = [f"import os, sys; os.execvp('unshare', {[*CONTAINER, sys.executable, '-c', one]!r})" for one in programs]
    with ranks(wrapped, variables) as started:
        yield started


def places(local: bool, **more: str) -> list[dict[str, str]]:
    """The variables of two ranks; the launcher may have said that they share a host."""
    here = [{"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} if local else {} for rank in range(2)]
    port = os.urandom(4).hex()
    return [by_hand(rank, 2, MASTER_PORT=port, **here[rank], **more) for rank in range(2)]


@pytest.mark.slow
def test_ranks_in_one_container_need_no_secret() -> None:
    script = "for r in 0 1; do RANK=$r " + f'{sys.executable} -c "$0" & done; wait'
    done = subprocess.run(
        [*CONTAINER, "bash", "-c", script, TRAIN],
        env={**clean_environment(), **by_hand(0, 2, MASTER_PORT=os.urandom(4).hex())},
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert results(done.stdout) == sorted([[r, 2, r, 2, 0], [3.0] * 3] for r in range(2) for _ in range(2))


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_ranks_in_two_containers_are_told_that_they_need_a_secret(local: bool) -> None:
    def attempt(seconds: float) -> None:
        with in_containers([INIT, INIT], places(local, REIGEN_START_TIMEOUT=f"{seconds:g}")) as started:
            ends = finish(started)
        assert [code for code, _, _ in ends] == [1, 1]
        assert "rank(s) 1 did not call init()" in ends[0][2]
        assert OTHER_CONTAINER in ends[1][2]
        assert "export REIGEN_SECRET=$(openssl rand -hex 32)" in ends[1][2]

    patiently(attempt, 2.0)  # rank 1 must find the other one before its time is up


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_ranks_in_two_containers_meet_with_a_secret(local: bool) -> None:
    with in_containers([TRAIN, TRAIN], places(local, REIGEN_SECRET=os.urandom(32).hex())) as started:
        ends = finish(started)
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert results(ends[0][1] + ends[1][1]) == sorted([[r, 2, 0, 1, r], [3.0] * 3] for r in range(2) for _ in range(2))


@pytest.mark.slow
def test_a_worker_in_another_container_than_its_scheduler_gets_no_secret() -> None:
    with Job(1, 1, REIGEN_START_TIMEOUT="20") as job:
        scheduler = job.start([*CONTAINER, *SCHEDULER], PS_VERBOSE="1")
        scheduler.wait_for("scheduler of 1 worker")
        outside = job.node("worker").hear()
        assert outside["error"] == "AuthenticationError"
        assert OTHER_CONTAINER in outside["text"]
    with Job(1, 1, REIGEN_SECRET=os.urandom(32).hex()) as job:
        job.start([*CONTAINER, *SCHEDULER], PS_VERBOSE="1")
        assert job.node("worker").hear()["joined"] == 0
