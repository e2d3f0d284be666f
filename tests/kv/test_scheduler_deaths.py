"""The scheduler of an elastic job is killed: the job goes on, with no round lost or repeated, and at once."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kv.test_elastic_servers import CUT, KILLS, PROGRAM, Ledger, processes_of, pushes_more, start
from tests.multiprocess.launcher import Launcher, launched, until

pytestmark = pytest.mark.slow
#: How many schedulers are killed at random moments, with and without others.
SCHEDULERS = 4 if KILLS == 1 else KILLS
#: The job makes its next step by then, on a host that does other things, too.
MOST_SECONDS = 15.0


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    directory = tmp_path / "ledger"
    directory.mkdir()
    return Ledger(directory)


def scheduler_of(job: Launcher, killed: Collection[int] = ()) -> int:
    """The scheduler's process, once there is one; not one of those that were killed, which may take a moment to end."""
    found: list[int] = []

    def look() -> bool:
        found[:] = [pid for pid in processes_of(job, "scheduler") if pid not in killed]
        return len(found) == 1

    until(look)
    return found[0]


def kill(*processes: int) -> float:
    """Kills processes; returns when."""
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def times(ledger: Ledger, word: str) -> list[float]:
    """When each step was acknowledged, by whichever process."""
    lines = [words for some in ledger.processes().values() for words in some]
    return sorted(float(words[-1]) for words in lines if words[0] == word)


def next_step(ledger: Ledger, since: float, word: str = "acknowledged") -> float:
    """Waits for the fourth step behind a moment: all have begun one there; returns how long that was."""
    until(lambda: sum(each > since for each in times(ledger, word)) > 3)
    return [each for each in times(ledger, word) if each > since][3] - since


def finish(job: Launcher, ledger: Ledger, num_killed: int) -> None:
    """The workers leave; all that they have pushed is there, once."""
    (ledger.directory / "stop").touch()
    status, _, err = job.finish()
    assert status == 0, err
    assert err.count("scheduler: killed by SIGKILL; it is started again") == num_killed, err
    ledger.check()


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_rounds_go_on_and_a_newcomer_joins(ledger: Ledger, kind: str) -> None:
    with start(ledger, kind) as job:
        pushes_more(ledger, 3, 20)
        taken = next_step(ledger, kill(scheduler_of(job)))
        assert taken < MOST_SECONDS
        pushes_more(ledger, 3, 20)
        kill(ledger.pid(ledger.training()[0]))
        pushes_more(ledger, 3, 20)  # another one has come
        finish(job, ledger, 1)


def test_it_is_killed_while_the_job_starts(ledger: Ledger) -> None:
    """Once before anybody has come, and once when some have."""
    with start(ledger, "dist_sync") as job:
        kill(first := scheduler_of(job))
        until(lambda: processes_of(job, "scheduler") not in ([], [first]))
        until(lambda: sum(map(len, ledger.processes().values())))
        kill(scheduler_of(job))
        pushes_more(ledger, 3, 20)
        finish(job, ledger, 2)


@pytest.mark.parametrize("order", ["worker first", "scheduler first"])
def test_it_is_killed_with_a_worker(ledger: Ledger, order: str) -> None:
    """Of whose end the servers know by the next scheduler alone."""
    with start(ledger, "dist_sync") as job:
        pushes_more(ledger, 3, 20)
        victims = [ledger.pid(ledger.training()[1]), scheduler_of(job)]
        taken = next_step(ledger, kill(*(victims if order == "worker first" else victims[::-1])))
        assert taken < MOST_SECONDS
        pushes_more(ledger, 3, 20)
        finish(job, ledger, 1)


def test_it_is_killed_while_a_newcomer_joins(ledger: Ledger) -> None:
    with start(ledger, "dist_sync") as job:
        pushes_more(ledger, 3, 20)
        kill(ledger.pid(ledger.training()[1]))
        num = len(ledger.processes())
        until(lambda: len(ledger.processes()) > num)  # it is about to make its store
        kill(scheduler_of(job))
        pushes_more(ledger, 3, 20)
        finish(job, ledger, 1)


def test_it_is_killed_with_a_server(ledger: Ledger) -> None:
    with start(ledger, "dist_sync", "--replicate-servers", "2") as job:
        pushes_more(ledger, 3, 20)
        taken = next_step(ledger, kill(processes_of(job, "server")[0], scheduler_of(job)))
        assert taken < MOST_SECONDS
        pushes_more(ledger, 3, 20)
        finish(job, ledger, 1)


def test_it_is_killed_while_a_server_starts_again(ledger: Ledger) -> None:
    with start(ledger, "dist_sync", "--replicate-servers", "2") as job:
        pushes_more(ledger, 3, 20)
        before = processes_of(job, "server")
        kill(before[0])
        until(lambda: len(now := processes_of(job, "server")) == 2 and now != before)
        kill(scheduler_of(job))
        pushes_more(ledger, 3, 20)
        finish(job, ledger, 1)


def test_one_that_is_stopped_is_replaced(ledger: Ledger) -> None:
    """Its connections last; a newcomer joins the one that follows."""
    with start(ledger, "dist_sync", REIGEN_PEER_TIMEOUT="4") as job:
        pushes_more(ledger, 3, 20)
        os.kill(stopped := scheduler_of(job), signal.SIGSTOP)
        kill(ledger.pid(ledger.training()[0]))
        until(lambda: processes_of(job, "scheduler") not in ([], [stopped]))
        pushes_more(ledger, 3, 20)
        (ledger.directory / "stop").touch()
        status, _, err = job.finish()
    assert status == 0, err
    assert "scheduler: nothing was heard of it for 4 s; it is killed" in err
    assert "scheduler: killed by SIGKILL; it is started again" in err
    ledger.check()


def test_it_is_killed_while_workers_leave(ledger: Ledger) -> None:
    with start(ledger, "dist_sync") as job:
        pushes_more(ledger, 3, 20)
        pid = scheduler_of(job)
        (ledger.directory / "stop").touch()
        until(lambda: any(ledger.directory.glob("*.npz")))
        kill(pid)
        finish(job, ledger, 1)


def test_barriers_are_passed_once(ledger: Ledger) -> None:
    """At each of them all have pushed as often."""
    command = (*PROGRAM, str(ledger.directory), "dist_async", "3")
    options = ("-np", "3", "--min-np", "1", "-s", "1", "--server-restarts", "100", "--grace-seconds", "15")
    chance = random.Random("barriers")
    with launched(*options, *command, env=CUT) as job:
        pushes_more(ledger, 3, 20)
        for _ in range(SCHEDULERS):
            wanted = len(times(ledger, "met")) + chance.randrange(30)
            until(lambda wanted=wanted: len(times(ledger, "met")) >= wanted)  # type: ignore[misc]
            assert next_step(ledger, kill(scheduler_of(job)), "met") < MOST_SECONDS
        last = max(ledger.numbers(process, "acknowledged")[-1] for process in ledger.training()) // 3 * 3 + 30
        (stop := ledger.directory / "stop.part").write_text(str(last))
        stop.rename(ledger.directory / "stop")
        status, _, err = job.finish()
    assert status == 0, err
    met = [ledger.numbers(process, "met") for process in ledger.processes()]
    assert met == [list(range(3, last + 1, 3))] * 3
    ledger.check()


def choose_victims(
    job: Launcher, ledger: Ledger, chance: random.Random, number: int, killed: Collection[int]
) -> Sequence[int]:
    """The scheduler alone, with a worker, or with a server, in any order; none that was killed."""
    victims = [scheduler_of(job, killed)]
    if number % 3 == 1:
        victims.append(ledger.pid(chance.choice(ledger.training())))
    if number % 3 == 2:
        victims.append(chance.choice([pid for pid in processes_of(job, "server") if pid not in killed]))
    chance.shuffle(victims)
    return victims


@pytest.mark.timeout(120 + 40 * SCHEDULERS)
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_schedulers_are_killed_at_random_moments(ledger: Ledger, kind: str) -> None:
    """Alone, with a worker, and with a server in turn. REIGEN_TEST_KILLS_FILE: gets the seconds to the next step."""
    chance = random.Random(f"schedulers {kind} {SCHEDULERS}")
    taken: list[tuple[int, float]] = []
    killed: set[int] = set()
    options = ("--replicate-servers", "2", "--server-restarts", str(SCHEDULERS))
    with start(ledger, kind, *options) as job:
        for number in range(SCHEDULERS):
            pushes_more(ledger, 3, chance.randrange(5, 60))
            victims = choose_victims(job, ledger, chance, number, killed)
            killed.update(victims)
            since = kill(*victims)
            taken.append((number % 3, next_step(ledger, since)))
        pushes_more(ledger, 3, 20)
        finish(job, ledger, SCHEDULERS)
    if file := os.environ.get("REIGEN_TEST_KILLS_FILE"):
        Path(f"{file}.{kind}").write_text(json.dumps(taken))
    assert max(seconds for _, seconds in taken) < MOST_SECONDS, taken
