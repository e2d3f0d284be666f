"""Horovod's integration tests of elastic jobs for torch, by what they look at: a script of Horovod's users, hosts that
are two names of this one, and horovodrun's rules. Horovod itself skips four of them for torch.

hosts_added_and_removed is in `test_elastic_run`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.multiprocess.launcher import DEADLINE_SECONDS, Launcher, launched, until

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("horovod_program.py")


class HorovodJob:
    """A job of the script, below `reigen run --as-horovod`."""

    def __init__(self, directory: Path, launcher: Launcher) -> None:
        self._directory, self.launcher = directory, launcher

    def text(self) -> str:
        return (self._directory / "output").read_text()

    def batches(self, size: int) -> list[tuple[int, int, int]]:
        """(batch, rank, process) of what ranks of a job of this size have made."""
        found = [line.split("BATCH ")[1].split() for line in self.text().splitlines() if "BATCH " in line]
        return [(int(each[0]), int(each[1]), int(each[3])) for each in found if len(each) == 4 and each[2] == str(size)]

    def wait_for(self, size: int, num: int = 10) -> dict[int, int]:
        """Wait for so many more batches of this size; returns processes by rank."""
        before = len(self.batches(size))
        until(lambda: len(self.batches(size)) >= before + num or self.launcher.process.poll() is not None)
        assert len(self.batches(size)) >= before + num, self.text()[-3000:]
        return {rank: process for _, rank, process in self.batches(size)[before:]}

    def fail(self, process: int, how: str) -> None:
        if how == "kill":
            os.kill(process, signal.SIGKILL)
        else:
            (self._directory / f"enough.fail.{process}").touch()

    def finish(self) -> str:
        """End the job in good order; returns what was said. No batch is missing in it."""
        (self._directory / "enough").touch()
        assert self.launcher.process.wait(DEADLINE_SECONDS) == 0, self.text()[-3000:]
        numbers = {batch for size in (1, 2, 3, 4) for batch, _, _ in self.batches(size)}
        assert numbers == set(range(1, max(numbers) + 1))
        return self.text()


@contextmanager
def horovod_job(directory: Path, *options: str) -> Iterator[HorovodJob]:
    command = ("--as-horovod", *options, sys.executable, str(PROGRAM), str(directory / "enough"))
    with (
        (directory / "output").open("wb") as file,
        launched(*command, stdout=file, stderr=subprocess.STDOUT, env={"OMP_NUM_THREADS": "1"}) as launcher,
    ):
        yield HorovodJob(directory, launcher)


@pytest.mark.parametrize("how", ["exception", "kill"])
def test_single_rank_failure(tmp_path: Path, how: str) -> None:
    """Its whole host is left: two of four ranks go on."""
    with horovod_job(tmp_path, "-H", "localhost:2,127.0.0.1:2", "-np", "4", "--min-np", "2") as job:
        ranks = job.wait_for(4)
        job.fail(ranks[3], how)
        left = job.wait_for(2)
        text = job.finish()
    assert set(left.values()) == {ranks[0], ranks[1]}, "in their processes"
    assert "host 127.0.0.1 is not used any more" in text


def test_fault_tolerance_without_scaling(tmp_path: Path) -> None:
    """There are never more than two: those of another host take the places of those whose host is left."""
    options = ("-H", "localhost:2,127.0.0.1:2", "-np", "2", "--min-np", "2", "--max-np", "2")
    with horovod_job(tmp_path, *options) as job:
        first = job.wait_for(2)
        job.fail(first[1], "kill")
        until(lambda: not set(job.wait_for(2).values()) & set(first.values()))
        text = job.finish()
    assert "host localhost is not used any more" in text


def test_all_ranks_failure(tmp_path: Path) -> None:
    with horovod_job(tmp_path, "-H", "localhost:1,127.0.0.1:1", "-np", "2", "--min-np", "1") as job:
        for process in job.wait_for(2).values():
            job.fail(process, "exception")
        assert job.launcher.process.wait(DEADLINE_SECONDS) not in {0, None}
        assert "this process was to fail" in job.text()


def test_all_hosts_blacklisted(tmp_path: Path) -> None:
    """The second host fails when the first one is not used any more."""
    with horovod_job(tmp_path, "-H", "localhost:1,127.0.0.1:1", "-np", "2", "--min-np", "1") as job:
        ranks = job.wait_for(2)
        job.fail(ranks[0], "kill")
        left = job.wait_for(1)
        job.fail(left[0], "exception")
        assert job.launcher.process.wait(DEADLINE_SECONDS) == 1
        assert "ValueError" in job.text()


def test_min_hosts_timeout(tmp_path: Path) -> None:
    options = ("--elastic-timeout", "2", "--blacklist-cooldown-range", "60", "60")
    hosts = ("-H", "localhost:2,127.0.0.1:2", "-np", "4", "--min-np", "4")
    with horovod_job(tmp_path, *hosts, *options) as job:
        job.fail(job.wait_for(4)[3], "kill")
        assert job.launcher.process.wait(DEADLINE_SECONDS) == 1
        assert "Timed out waiting for minimum number of slots" in job.text()


def test_reset_limit(tmp_path: Path) -> None:
    hosts = ("-H", "localhost:1,127.0.0.1:1", "-np", "2", "--min-np", "1")
    with horovod_job(tmp_path, *hosts, "--reset-limit", "1", "--blacklist-cooldown-range", "1", "2") as job:
        job.fail(job.wait_for(2)[1], "kill")
        until(lambda: job.launcher.process.poll() is not None)  # its host comes back: a change, too, for horovodrun
        assert job.launcher.process.returncode == 1
        assert "number of resets during elastic job exceeded limit: 1" in job.text()


def test_resurrecting_blacklisted_hosts(tmp_path: Path) -> None:
    """Rests double, from the second one on: 2 s, 4 s, up to a second more by chance."""
    hosts = ("-H", "localhost:1,127.0.0.1:1", "-np", "2", "--min-np", "1")
    with horovod_job(tmp_path, *hosts, "--blacklist-cooldown-range", "1", "10") as job:
        for _ in range(2):
            job.fail(job.wait_for(2)[1], "kill")
            job.wait_for(1)
        job.wait_for(2)
        text = job.finish()
    rests = [
        float(line.split(" is not used any more for ")[1].split()[0])
        for line in text.splitlines()
        if "more for" in line
    ]
    assert 2 <= rests[0] <= 3
    assert 4 <= rests[1] <= 5
