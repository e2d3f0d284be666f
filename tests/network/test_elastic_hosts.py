"""An elastic job on three stand-in hosts: a rank of another host dies, rank 0 dies, a host is silent."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.lab import Host, HostProcess
from tests.network.conftest import MakeHosts
from tests.network.waiting import wait_for

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2]
PROGRAM = SOURCE / "tests" / "elastic" / "horovod_program.py"
PEER_TIMEOUT_SECONDS = 3.0


class Batches:
    """What the processes of a job have said: batch, rank, size, process."""

    def __init__(self, job: HostProcess) -> None:
        self._job = job

    def __call__(self, size: int) -> list[list[str]]:
        lines = [line.split("BATCH ")[1].split() for line in self._job.output()[0].splitlines() if "BATCH " in line]
        return [each for each in lines if len(each) == 4 and each[2] == str(size)]

    def wait_for(self, size: int, num: int = 5) -> float:
        """Waits until so many more batches were made by this number of ranks; returns the seconds until the first."""
        before, begin = len(self(size)), time.monotonic()
        wait_for(lambda: len(self(size)) > before, f"batches of {size} ranks: {self._job.output()[1][-3000:]}")
        seconds = time.monotonic() - begin
        wait_for(lambda: len(self(size)) >= before + num * size, f"more batches of {size} ranks")
        return seconds


def process_of(host: Host, slot: int) -> int:
    """The process of a place, on the machine that has it."""
    found = [
        pid
        for pid, command in host.processes().items()
        if command.startswith(sys.executable)
        and f"REIGEN_SLOT={slot}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    assert len(found) == 1, found
    return found[0]


def test_ranks_and_hosts_die_and_the_others_go_on(make_hosts: MakeHosts, tmp_path: Path):
    hosts = make_hosts(3, ssh_port=22, shared=[tmp_path])
    enough = tmp_path / "enough"
    options = ["-np", "6", "--min-np", "2", "-H", "h1:2,h2:2,h3:2", "--as-horovod", "--blacklist", "seat"]
    rests = ["--blacklist-cooldown-range", "600", "600"]
    command = [sys.executable, "-m", "reigen", "run", *options, *rests, sys.executable, str(PROGRAM), str(enough)]
    environ = {
        "PYTHONPATH": str(SOURCE / "src"),
        "REIGEN_PEER_TIMEOUT": f"{PEER_TIMEOUT_SECONDS:g}",
        "OMP_NUM_THREADS": "1",
    }
    job = hosts[0].start(command, env=environ, cwd=SOURCE)
    batches = Batches(job)
    batches.wait_for(6)
    os.kill(process_of(hosts[1], 2), signal.SIGKILL)
    after_a_death = batches.wait_for(5)
    os.kill(process_of(hosts[0], 0), signal.SIGKILL)
    after_rank_0 = batches.wait_for(4)
    hosts[2].crash()
    after_a_crash = batches.wait_for(2)
    enough.touch()
    assert job.wait(60) == 0, job.output()
    assert max(after_a_death, after_rank_0) < 5
    assert after_a_crash < PEER_TIMEOUT_SECONDS + 2  # the specification's second, and one for a busy machine
    print(f"death {after_a_death:.2f} s, rank 0 {after_rank_0:.2f} s, host {after_a_crash:.2f} s")
    numbers = {int(each[0]) for size in (2, 4, 5, 6) for each in batches(size)}
    assert numbers == set(range(1, max(numbers) + 1))
