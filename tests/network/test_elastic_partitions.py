"""Elastic jobs on stand-in hosts whose network is cut in two: one part goes on at most, with and without a witness."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.lab import Host, HostProcess, Hosts
from tests.network.conftest import MakeHosts
from tests.network.waiting import wait_for

pytestmark = pytest.mark.slow
SOURCE = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("partition_program.py")
PEER_TIMEOUT_SECONDS = 3.0


class PartedJob:
    """A job with a rank on each host but the first one, which has the launcher; slot n is on host n + 1."""

    def __init__(self, hosts: Hosts, directory: Path, *options: str) -> None:
        self.hosts, self._directory, self.size = hosts, directory, len(hosts) - 1
        names = ",".join(f"h{number + 2}:1" for number in range(self.size))
        command = [sys.executable, "-m", "reigen", "run", "-np", str(self.size), "--min-np", "1", "-H", names]
        command += ["--blacklist-cooldown-range", "600", "600", "--on-launcher-loss", "continue", *options]
        environ = {
            "PYTHONPATH": str(SOURCE / "src"),
            "REIGEN_PEER_TIMEOUT": f"{PEER_TIMEOUT_SECONDS:g}",
            "OMP_NUM_THREADS": "1",
            "XDG_STATE_HOME": "/tmp",
        }
        self.launcher: HostProcess = hosts[0].start(
            [*command, sys.executable, str(PROGRAM), str(directory)], env=environ, cwd=SOURCE
        )
        try:
            wait_for(lambda: all(self.steps(slot) for slot in range(self.size)), "first steps")
        except AssertionError:
            raise AssertionError(self.describe()) from None

    def describe(self) -> str:
        return f"{self.launcher.output()}"

    def steps(self, slot: int, *, below: int | None = None) -> list[tuple[float, int, int]]:
        """(time, step, size) of a slot's steps, all of them or those of views that are smaller."""
        file = self._directory / f"steps.{slot}"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        found = [line.split() for line in lines if line.endswith("\n")]
        steps = [(float(at), int(step), int(size)) for at, step, size in found]
        return [each for each in steps if below is None or each[2] < below]

    def part(self, one: list[int], other: list[int]) -> None:
        """Cut all connections between these slots' hosts."""
        for a in one:
            for b in other:
                self.hosts.partition(self.hosts[a + 1], self.hosts[b + 1])

    def heal(self, one: list[int], other: list[int]) -> None:
        for a in one:
            for b in other:
                self.hosts.heal(self.hosts[a + 1], self.hosts[b + 1])

    def who_goes_on(self, seconds: float = 30.0) -> tuple[set[int], float]:
        """Waits until some make steps in a smaller view; returns which slots do, a while later, and the seconds."""
        at = time.time()
        wait_for(
            lambda: any(self.steps(slot, below=self.size) for slot in range(self.size)),
            "steps of a smaller view",
            timeout=seconds,
        )
        took = time.time() - at
        until = time.time() + PEER_TIMEOUT_SECONDS + 2
        wait_for(lambda: time.time() > until, "time passes")
        return {slot for slot in range(self.size) if self.steps(slot, below=self.size)}, took

    def is_gone(self, slot: int) -> bool:
        host: Host = self.hosts[slot + 1]
        return not any(str(PROGRAM) in command for command in host.processes().values())


@pytest.mark.parametrize(
    ("num_ranks", "one", "witness", "goes_on"),
    [
        (2, [0], "", [0]),
        (2, [0], "--witness", None),
        (3, [0], "", [1, 2]),
        (4, [0, 1], "", [0, 1]),
        (4, [0, 1], "--witness-dir", None),
    ],
    ids=str,
)
def test_one_part_goes_on_and_the_other_is_fenced(
    make_hosts: MakeHosts, tmp_path: Path, num_ranks: int, one: list[int], witness: str, goes_on: list[int] | None
):
    """Without a witness a half goes on if it has rank 0; with one, either may, and only that which asks it first."""
    hosts = make_hosts(num_ranks + 1, ssh_port=22, shared=[tmp_path])
    options = [witness] * bool(witness) + ([str(tmp_path)] if witness == "--witness-dir" else [])
    job = PartedJob(hosts, tmp_path, *options)
    other = [slot for slot in range(num_ranks) if slot not in one]
    job.part(one, other)

    going, seconds = job.who_goes_on()

    print(f"{num_ranks} hosts, {witness or 'no witness'}: {sorted(going)} go on after {seconds:.2f} s")
    assert sorted(going) in ([goes_on] if goes_on is not None else [one, other])
    job.heal(one, other)
    left = [slot for slot in range(num_ranks) if slot not in going]
    wait_for(lambda: all(job.is_gone(slot) for slot in left), "the end of those that are left behind")
    check_ends(job, left, tmp_path)
    assert not any(job.steps(slot, below=num_ranks) for slot in left)


def check_ends(job: PartedJob, fenced: list[int], directory: Path) -> None:
    """Ends the job; those who were left behind have ended with exit code 75."""
    (directory / "enough").touch()
    assert job.launcher.wait(60) == 0, job.describe()
    said = job.launcher.output()[1]
    for slot in fenced:
        words = [line for line in said.splitlines() if line.startswith(f"[{slot}]")]
        assert any("exit code 75" in line and "without this process" in line for line in words), said


def test_the_host_of_rank_0_vanishes_and_a_witness_lets_the_other_one_go_on(make_hosts: MakeHosts, tmp_path: Path):
    hosts = make_hosts(3, ssh_port=22, shared=[tmp_path])
    job = PartedJob(hosts, tmp_path, "--witness-dir", str(tmp_path))
    hosts[1].crash()
    going, seconds = job.who_goes_on()
    assert going == {1}
    print(f"host of rank 0 silent, until the other one goes on: {seconds:.2f} s")
    assert seconds < 1.7 * PEER_TIMEOUT_SECONDS  # a member that waits for the silent host once more takes twice as long
    (tmp_path / "enough").touch()
    assert job.launcher.wait(60) == 0, job.describe()
    assert not list(tmp_path.glob("reigen-witness-*"))


def test_packets_that_are_lost_one_way(make_hosts: MakeHosts, tmp_path: Path):
    """A host hears the others and is not heard: it is left out, or they are, but never both."""
    hosts = make_hosts(4, ssh_port=22, shared=[tmp_path])
    job = PartedJob(hosts, tmp_path)
    for number in (2, 3):
        hosts.drop_one_way(hosts[1], to=hosts[number], drop=True)
    going, seconds = job.who_goes_on()
    print(f"one-way loss: {sorted(going)} go on after {seconds:.2f} s")
    assert going == {1, 2}
    for number in (2, 3):
        hosts.drop_one_way(hosts[1], to=hosts[number], drop=False)
    wait_for(lambda: job.is_gone(0), "the end of those that are left behind")
    check_ends(job, [0], tmp_path)
