"""Leases of samples in elastic jobs, as users start them: each sample counts once, whoever is killed."""

from __future__ import annotations

import os
import random
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from tests.kv.test_elastic_servers import CUT, JOB, KILLS, Ledger, ledger, processes_of
from tests.multiprocess.launcher import Launcher, launched, until

pytestmark = pytest.mark.slow
__all__ = ["ledger"]
PROGRAM = (sys.executable, str(Path(__file__).with_name("lease_program.py")))
SAMPLES, BATCH = 200, 3
BATCHES = -(-SAMPLES // BATCH)


def start(ledger: Ledger, kind: str, epochs: int, *options: str, **environ: str) -> AbstractContextManager[Launcher]:
    arguments = (str(ledger.directory), kind, *map(str, (SAMPLES, BATCH, epochs)))
    return launched(*JOB, *options, *PROGRAM, *arguments, env={**CUT, **environ})


def training(ledger: Ledger) -> list[tuple[int, int]]:
    """The processes that live and have leased something, and are not through."""
    words = {process: [line[0] for line in lines] for process, lines in sorted(ledger.processes().items())}
    return [one for one, said in words.items() if "leased" in said and "done" not in said and ledger.lives(one)]


def num_pushed(ledger: Ledger) -> int:
    return sum(line[0] == "pushed" for lines in ledger.processes().values() for line in lines)


def check(ledger: Ledger, epochs: int) -> None:
    """Each sample is in each key as often as there were epochs."""
    finals = [np.load(file) for file in ledger.directory.glob("*.npz")]
    assert finals
    for values in finals:  # of each worker, when its loop had ended: nothing was missing then
        for key in values:
            np.testing.assert_array_equal(values[key], epochs)
    leased = [int(line[1]) for lines in ledger.processes().values() for line in lines if line[0] == "leased"]
    assert set(leased) == set(range(epochs * BATCHES))


EPOCHS = 30 * (1 + KILLS)
#: Where each batch is saved to a disk.
EPOCHS_ON_DISK = 10 * (1 + KILLS)
PLACES = [("dist_async", "memory"), ("dist_sync", "memory"), ("dist_async", "a disk")]


def pushes_more(ledger: Ledger, num: int) -> None:
    """Waits until three workers train, and so many batches more have been pushed."""
    wanted = num_pushed(ledger) + num
    until(lambda: num_pushed(ledger) >= wanted and len(training(ledger)) == 3)


@pytest.mark.timeout(120 + 20 * KILLS)
@pytest.mark.parametrize("kind", ["dist_async", "dist_sync"])
def test_workers_are_killed_at_random_moments(ledger: Ledger, kind: str) -> None:
    chance = random.Random(f"leases {kind} {KILLS}")
    with start(ledger, kind, EPOCHS) as job:
        for _ in range(KILLS):
            pushes_more(ledger, chance.randrange(100, 300))
            os.kill(ledger.pid(chance.choice(training(ledger))), signal.SIGKILL)
        (ledger.directory / "hurry").touch()
        status, _, err = job.finish()
    assert status == 0, err
    check(ledger, EPOCHS)


@pytest.mark.timeout(120 + 40 * KILLS)
@pytest.mark.parametrize(("kind", "place"), PLACES)
def test_servers_and_workers_are_killed_at_once(tmp_path: Path, ledger: Ledger, kind: str, place: str) -> None:
    chance = random.Random(f"servers and leases {kind} {KILLS}")
    snapshots = tmp_path / "snapshots"
    snapshots.mkdir(mode=0o700)
    options = ["--server-restarts", str(KILLS)]
    options += ["--replicate-servers", "2"] if place == "memory" else []
    environ = {"REIGEN_KV_SNAPSHOT_DIR": str(snapshots)} if place == "a disk" else {}
    epochs = EPOCHS if place == "memory" else EPOCHS_ON_DISK
    with start(ledger, kind, epochs, *options, **environ) as job:
        for _ in range(KILLS):
            pushes_more(ledger, chance.randrange(100, 300))
            victims = [chance.choice(processes_of(job, "server")), ledger.pid(chance.choice(training(ledger)))]
            for pid in chance.sample(victims, 2):
                os.kill(pid, signal.SIGKILL)
        (ledger.directory / "hurry").touch()
        status, _, err = job.finish()
    assert status == 0, err
    assert err.count("killed by SIGKILL; it is started again") == KILLS
    check(ledger, epochs)


@pytest.mark.parametrize("kind", ["dist_async", "dist_sync"])
def test_the_scheduler_is_killed_alone_and_with_a_worker(ledger: Ledger, kind: str) -> None:
    with start(ledger, kind, EPOCHS) as job:
        for also in (0, 1):
            pushes_more(ledger, 100)
            pids = [*processes_of(job, "scheduler"), ledger.pid(training(ledger)[0])]
            for pid in pids[: 1 + also]:
                os.kill(pid, signal.SIGKILL)
            until(lambda: processes_of(job, "scheduler") not in ([], pids[:1]))  # noqa: B023  it is called here
        pushes_more(ledger, 100)
        (ledger.directory / "hurry").touch()
        status, _, err = job.finish()
    assert status == 0, err
    assert err.count("scheduler: killed by SIGKILL; it is started again") == 2
    check(ledger, EPOCHS)


@pytest.mark.parametrize("kind", ["dist_async", "dist_sync"])
def test_servers_move_while_samples_are_leased(ledger: Ledger, kind: str) -> None:
    """Server 0, which has the ledger of leases, too; a worker is killed meanwhile."""
    with start(ledger, kind, EPOCHS, "--max-servers", "3") as job:
        pushes_more(ledger, 100)
        first = processes_of(job, "server")
        os.kill(first[1], signal.SIGTERM)
        until(lambda: processes_of(job, "server") == first[:1])
        pushes_more(ledger, 100)
        os.kill(first[0], signal.SIGTERM)
        os.kill(ledger.pid(training(ledger)[0]), signal.SIGKILL)
        until(lambda: len(processes_of(job, "server")) == 1 and processes_of(job, "server") != first[:1])
        pushes_more(ledger, 100)
        (ledger.directory / "hurry").touch()
        status, _, err = job.finish()
    assert status == 0, err
    assert "server process 0 has left" in err
    check(ledger, EPOCHS)
