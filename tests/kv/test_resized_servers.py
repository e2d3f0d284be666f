"""Server processes of an elastic job come and go while it runs, as users see it: nothing is lost or counted twice."""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import pytest

from tests.kv.test_elastic_servers import Ledger, ledger, processes_of, pushes_more, start
from tests.multiprocess.launcher import Launcher, run, until

__all__ = ["ledger"]
pytestmark = pytest.mark.slow
#: How many processes are killed while servers move.
KILLS = int(os.environ.get("REIGEN_TEST_KILLS", "1"))
MOVING = ("--max-servers", "4")
#: Where the keys are cut then, for four servers.
SHARDS: dict[str, tuple[int, ...]] = {"small": (0, 100), "cut": (0, 1280, 2528, 3776, 5000)}


def wish(ledger: Ledger, num: int) -> None:
    """A worker asks for so many server processes behind its next push."""
    (ledger.directory.parent / "servers").write_text(str(num))
    (ledger.directory.parent / "servers").rename(ledger.directory / "servers")


def handover_of(job: Launcher) -> Path:
    """The job's own directory by which servers are handed over."""
    pid = processes_of(job, "server")[0]
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    (text,) = [each for each in variables if each.startswith(b"REIGEN_KV_HANDOVER_DIR=")]
    return Path(os.fsdecode(text.partition(b"=")[2]))


def resize(ledger: Ledger, job: Launcher, num: int) -> None:
    """Waits until there are so many server processes, and for pushes behind that."""
    wish(ledger, num)
    until(lambda: len(processes_of(job, "server")) == num)
    pushes_more(ledger, 3, 20)


def finish(ledger: Ledger, job: Launcher) -> str:
    """Ends the job, and compares what the servers have with the ledger; returns its stderr."""
    (ledger.directory / "stop").touch()
    status, _, err = job.finish()
    assert status == 0, err
    ledger.shards = SHARDS
    ledger.check()
    return err


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_servers_grow_and_shrink_under_pushes(ledger: Ledger, kind: str) -> None:
    with start(ledger, kind, *MOVING) as job:
        pushes_more(ledger, 3, 20)
        handover = handover_of(job)
        assert handover.stat().st_mode & 0o777 == 0o700
        for num in (3, 4, 1, 2):
            resize(ledger, job, num)
        err = finish(ledger, job)
    assert not handover.exists()
    assert "server process 2 is started" in err
    assert "server process 2 has left" in err
    assert "warning" not in err, "it is no loss"


@pytest.mark.timeout(120 + 40 * KILLS)
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_processes_are_killed_while_servers_move(tmp_path: Path, ledger: Ledger, kind: str) -> None:
    """Server processes, the scheduler, and workers, at random moments behind the wish for another number."""
    chance = random.Random(f"moves {kind} {KILLS}")
    snapshots = tmp_path / "snapshots"
    snapshots.mkdir(mode=0o700)
    environ = {"REIGEN_KV_SNAPSHOT_DIR": str(snapshots)}
    with start(ledger, kind, *MOVING, "--server-restarts", "100", **environ) as job:
        pushes_more(ledger, 3, 20)
        for number in range(2 + 2 * KILLS):
            before = set(processes_of(job, "server"))
            wish(ledger, num := (3, 1, 4, 2)[number % 4])
            until(lambda: set(processes_of(job, "server")) != before)  # noqa: B023  it is called here
            victims = [processes_of(job, "server"), processes_of(job, "scheduler")]
            victims.append([ledger.pid(process) for process in ledger.training()])
            for pids in victims if number % 3 == 2 else [victims[number % 3]]:
                os.kill(chance.choice(pids), signal.SIGKILL)
            pushes_more(ledger, 3, chance.randrange(5, 20))
            until(lambda: len(processes_of(job, "server")) == num)
        pushes_more(ledger, 3, 20)
        err = finish(ledger, job)
    assert "is started again" in err


def test_a_process_that_is_sent_sigterm_hands_over_its_servers(ledger: Ledger) -> None:
    """So do all at once; others are started in their place."""
    with start(ledger, "dist_sync", *MOVING) as job:
        pushes_more(ledger, 3, 20)
        first = processes_of(job, "server")
        os.kill(first[1], signal.SIGTERM)
        until(lambda: processes_of(job, "server") == first[:1])
        pushes_more(ledger, 3, 20)
        os.kill(first[0], signal.SIGTERM)
        until(lambda: len(processes_of(job, "server")) == 1 and processes_of(job, "server") != first[:1])
        pushes_more(ledger, 3, 20)
        err = finish(ledger, job)
    assert "server process 1 has left" in err


def test_a_process_that_dies_without_snapshots_ends_the_job(ledger: Ledger) -> None:
    with start(ledger, "dist_sync", *MOVING) as job:
        pushes_more(ledger, 3, 20)
        handover = handover_of(job)
        os.kill(processes_of(job, "server")[0], signal.SIGKILL)
        status, _, err = job.finish()
    assert not handover.exists()
    assert status == 128 + signal.SIGKILL
    assert "reigen run: server process 0 failed first: killed by SIGKILL" in err
    assert "REIGEN_KV_SNAPSHOT_DIR" in err


def test_a_job_that_is_stopped_while_servers_move_ends_soon(ledger: Ledger) -> None:
    with start(ledger, "dist_sync", *MOVING) as job:
        pushes_more(ledger, 3, 20)
        handover = handover_of(job)
        wish(ledger, 4)
        until(lambda: len(processes_of(job, "server")) == 4)
        os.kill(job.supervisor(), signal.SIGTERM)
        status, _, _ = job.finish()
    assert not handover.exists()
    assert status == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("-np", "2", "-s", "1", "--max-servers", "2"), "only in elastic jobs"),
        (("-np", "2", "--min-np", "1", "--max-servers", "2"), "--max-servers needs -s"),
        (
            ("-np", "2", "--min-np", "1", "-s", "3", "--max-servers", "2"),
            "--max-servers 2: the servers run in 3 processes",
        ),
        (
            ("-np", "2", "--min-np", "1", "-s", "2", "--max-servers", "3", "--replicate-servers", "2"),
            "With REIGEN_KV_SNAPSHOT_DIR they survive",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: tuple[str, ...], text: str) -> None:
    status, _, err = run(*options, sys.executable, "-c", "0")
    assert status != 0
    assert text in err
