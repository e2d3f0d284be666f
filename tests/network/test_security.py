"""What a job on several hosts shows to its network, and what others there can do to it."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reigen.errors import AuthenticationError
from reigen.net.auth import ClientHandshake, Identity, ProcessRole
from reigen.net.connection import open_connection
from tests.lab import Host, HostProcess, Hosts
from tests.network.conftest import MakeHosts
from tests.network.waiting import wait_for

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2]
#: Trains, so to speak, until rank 0 finds the file that its argument names.
JOB = """
import os, sys
from pathlib import Path
import numpy as np
import reigen
reigen.init()
gradient = np.frombuffer(b"GRADIENT" * 8192, np.uint8).copy()
print("ready", os.environ["REIGEN_RENDEZVOUS"], os.environ["REIGEN_SECRET"], flush=True)
step, is_over = 0, np.zeros(1, np.uint8)
while not is_over[0]:
    mine = gradient if reigen.rank() == 0 else np.zeros_like(gradient)
    assert (reigen.broadcast(mine, 0, name="gradient") == gradient).all()
    is_over = reigen.broadcast(np.array([Path(sys.argv[1]).exists()], np.uint8), 0, name="is_over")
    step += 1
print("steps", step)
reigen.shutdown()
"""
SSH_PORT = 22


def wait_until_ready(process: HostProcess, num_ranks: int) -> tuple[str, str]:
    """Until every rank is; returns where the job's service is, and the job's secret."""
    until = time.monotonic() + 60
    pause = threading.Event()
    while True:
        ready = [line.split() for line in process.output()[0].splitlines() if "ready" in line]
        if len(ready) == num_ranks:
            return ready[0][-2], ready[0][-1]
        assert process.returncode is None, process.output()
        assert time.monotonic() < until, process.output()
        pause.wait(0.02)


@contextlib.contextmanager
def job(hosts: Hosts, tmp_path: Path, **env: str) -> Iterator[tuple[str, str]]:
    """A job of a rank on each of the first two hosts, as long as the block lasts; gives its service and its secret."""
    script, end = tmp_path / "job.py", tmp_path / "end"
    script.write_text(JOB)
    command = [sys.executable, "-m", "reigen", "run", "-np", "2", "-H", "h1,h2", sys.executable, script, end]
    process = hosts[0].start(command, env={"PYTHONPATH": str(SOURCE / "src"), **env}, cwd=SOURCE)
    yield wait_until_ready(process, 2)
    end.touch()
    assert process.wait(60) == 0, process.output()
    assert process.output()[0].count("steps") == 2


class Sniffer:
    """Sees every packet on a host's interface."""

    def __init__(self, host: Host) -> None:
        with host.network():
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self._socket.bind(("eth0", 0))
        self._socket.settimeout(0.1)
        self.seen = bytearray()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                packet = self._socket.recv(1 << 17)
                if len(self.seen) < 64 << 20:
                    self.seen += packet

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()


@pytest.mark.parametrize("tls", ["0", "1"])
def test_who_listens_on_the_network(make_hosts: MakeHosts, tmp_path: Path, tls: str) -> None:
    """With TLS they see nothing of the data; the secret they never see."""
    if tls == "1" and importlib.util.find_spec("cryptography") is None:
        pytest.skip("cryptography is not installed")
    hosts = make_hosts(2, ssh_port=SSH_PORT, shared=[tmp_path])
    with contextlib.closing(Sniffer(hosts[0])) as sniffer, job(hosts, tmp_path, REIGEN_TLS=tls) as (_, secret):
        wait_for(lambda: len(sniffer.seen) > 200_000 and (tls == "1" or b"is_over" in sniffer.seen), "data was seen")
    for text in (b"GRADIENTGRADIENT", b"RGN3", b"is_over"):
        assert (text in sniffer.seen) is (tls == "0"), text
    assert bytes.fromhex(secret) not in sniffer.seen
    assert secret.encode() not in sniffer.seen


def listeners(host: Host) -> set[tuple[str, int]]:
    """Address and port of everything on a host to which TCP can connect, but for its sshd."""
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{host.pid}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                address, _, port = local.partition(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return {(address, port) for address, port in found if port != SSH_PORT}


def test_nothing_listens_on_all_addresses(make_hosts: MakeHosts, tmp_path: Path) -> None:
    hosts = make_hosts(2, ssh_port=SSH_PORT, shared=[tmp_path])
    with job(hosts, tmp_path):
        for host in hosts:
            there = listeners(host)
            assert there
            assert {address for address, _ in there} <= {host.address, "127.0.0.1"}


def test_a_job_on_one_host_listens_on_loopback_only(make_hosts: MakeHosts, tmp_path: Path) -> None:
    (host,) = make_hosts(1, shared=[tmp_path])
    script, end = tmp_path / "job.py", tmp_path / "end"
    script.write_text(JOB)
    command = [sys.executable, "-m", "reigen", "run", "-np", "2", sys.executable, script, end]
    process = host.start(command, env={"PYTHONPATH": str(SOURCE / "src")}, cwd=SOURCE)
    wait_until_ready(process, 2)
    assert {address for address, _ in listeners(host)} == {"127.0.0.1"}
    end.touch()
    assert process.wait(60) == 0, process.output()


def test_strangers_on_the_network_disturb_no_job(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """A third host sends rubbish to every port that the job listens on, says nothing there, and guesses secrets."""
    hosts = make_hosts(3, ssh_port=SSH_PORT, shared=[tmp_path])
    seeded = random.Random(0)
    old_version = b"RGN1" + bytes(37)
    hello = ClientHandshake(bytes(32), Identity(ProcessRole.RANK, 1)).opening
    with job(hosts, tmp_path) as (service, _), hosts[2].network(), contextlib.ExitStack() as stack:
        targets = [target for host in hosts for target in listeners(host)]
        assert len(targets) >= 3
        for address in targets:
            for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", old_version, hello[:-1], hello * 3, seeded.randbytes(5000)):
                stranger = stack.enter_context(socket.create_connection(address, timeout=60))
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(noise)
                    if seeded.random() < 0.3:  # a reset in place of an orderly end
                        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        host, _, port = service.rpartition(":")
        assert (host, int(port)) in targets
        with pytest.raises(AuthenticationError, match="does not know"):
            open_connection((host, int(port)), bytes(32), Identity(ProcessRole.RANK, 1), 100, time.monotonic() + 60)
