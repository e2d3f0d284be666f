"""Elastic jobs with parameter servers, as users start them: what was acknowledged is in the values exactly once."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np
import pytest

from tests.kv.elastic_program import KEYS, push_of
from tests.multiprocess.launcher import Launcher, launched, until

pytestmark = pytest.mark.slow
PROGRAM = (sys.executable, str(Path(__file__).with_name("elastic_program.py")))
#: The places of the dead rest for one or two seconds.
JOB = ("-np", "3", "--min-np", "1", "-s", "2", "--blacklist-cooldown-range", "1", "1", "--grace-seconds", "15")
CUT = {"REIGEN_KV_BIGARRAY_BOUND": "1000"}
#: Where the keys are cut then, for two servers: at multiples of 256 bytes.
SHARDS: dict[str, tuple[int, ...]] = {"small": (0, 100), "cut": (0, 2528, 5000)}
#: How many workers are killed; more of them take four seconds each.
KILLS = int(os.environ.get("REIGEN_TEST_KILLS", "1"))


class Ledger:
    """What the processes of a job have written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        #: by key, the borders of its shards
        self.shards: dict[str, tuple[int, ...]] = SHARDS
        self._found: dict[tuple[int, int], list[list[str]]] = {}
        self._num_read: dict[tuple[int, int], int] = {}

    def processes(self) -> dict[tuple[int, int], list[list[str]]]:
        """By slot and incarnation, the words of each line; a line that is not complete does not count."""
        for file in self.directory.iterdir():
            if file.suffix != ".npz" and file.name not in {"stop", "hurry", "servers"}:
                slot, incarnation = map(int, file.name.split("."))
                with file.open("rb") as lines:
                    lines.seek(self._num_read.get((slot, incarnation), 0))
                    whole, end, _ = lines.read().rpartition(b"\n")
                self._num_read[slot, incarnation] = self._num_read.get((slot, incarnation), 0) + len(whole + end)
                found = self._found.setdefault((slot, incarnation), [])
                found += [line.split() for line in whole.decode().splitlines()]
        return self._found

    def pid(self, process: tuple[int, int]) -> int:
        return int(self.processes()[process][0][1])

    def numbers(self, process: tuple[int, int], word: str) -> list[int]:
        return [int(words[1]) for words in self.processes()[process] if words[0] == word]

    def num_workers(self, process: tuple[int, int]) -> int:
        """How many workers there were when it was answered last."""
        lines = reversed(self.processes()[process])
        return int(next(words[4] for words in lines if words[0] == "acknowledged"))

    def num_lines(self) -> int:
        return sum(map(len, self.processes().values()))

    def training(self) -> list[tuple[int, int]]:
        """The processes that live and have pushed."""
        pushing = [process for process, lines in sorted(self.processes().items()) if len(lines) > 2]
        return [process for process in pushing if self.lives(process)]

    def lives(self, process: tuple[int, int]) -> bool:
        with suppress(OSError):
            return bool(Path(f"/proc/{self.pid(process)}/cmdline").read_bytes())  # a zombie has none
        return False

    def check(self) -> None:
        """All final values are equal, and their sums are of what was acknowledged and, perhaps, of last words."""
        finals = [np.load(file) for file in self.directory.glob("*.npz")]
        assert finals
        certain, uncertain = [], []
        for process in self.processes():
            acknowledged = self.numbers(process, "acknowledged")
            assert acknowledged == list(range(1, len(acknowledged) + 1))
            certain += [push_of(*process, number) for number in acknowledged]
            uncertain += [
                push_of(*process, number) for number in self.numbers(process, "pushes") if number > len(acknowledged)
            ]
        for key, bounds in self.shards.items():
            for other in finals[1:]:
                np.testing.assert_array_equal(finals[0][key], other[key])
            rest = finals[0][key] - 7.0 - sum((each[key] for each in certain), np.zeros(KEYS[key]))
            # a process may have died when some shards had its push, and others had not
            for begin, end in itertools.pairwise(bounds):
                check_rest(rest[begin:end], [each[key][begin:end] for each in uncertain])


def check_rest(rest: np.ndarray, uncertain: list[np.ndarray]) -> None:
    """Each push without an answer is in the rest once or not at all."""
    if not uncertain:
        np.testing.assert_array_equal(rest, 0.0)
        return
    pushes = np.stack(uncertain, axis=1)
    times = np.round(np.linalg.lstsq(pushes, rest, rcond=None)[0])
    np.testing.assert_array_equal(pushes @ times, rest)
    assert set(times.tolist()) <= {0.0, 1.0}


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    directory = tmp_path / "ledger"
    directory.mkdir()
    return Ledger(directory)


def start(ledger: Ledger, kind: str, *options: str, **environ: str) -> AbstractContextManager[Launcher]:
    return launched(*JOB, *options, *PROGRAM, str(ledger.directory), kind, env={**CUT, **environ})


def processes_of(job: Launcher, role: str) -> list[int]:
    return [pid for pid, command in sorted(job.processes().items()) if f"-m reigen {role}" in command]


def pushes_more(ledger: Ledger, num_workers: int, num: int) -> None:
    """Waits until so many workers train, and have pushed so often meanwhile."""
    until(lambda: len(ledger.training()) == num_workers)
    wanted = ledger.num_lines() + 2 * num  # a push is two lines
    until(lambda: ledger.num_lines() >= wanted)


@pytest.mark.timeout(120 + 20 * KILLS)
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_workers_are_killed_at_random_moments(ledger: Ledger, kind: str) -> None:
    """And then all of them at once: the servers keep the values."""
    chance = random.Random(f"{kind} {KILLS}")
    with start(ledger, kind) as job:
        for _ in range(KILLS):
            pushes_more(ledger, 3, chance.randrange(200))
            os.kill(ledger.pid(chance.choice(ledger.training())), signal.SIGKILL)
        pushes_more(ledger, 3, chance.randrange(200))
        for process in ledger.training():
            os.kill(ledger.pid(process), signal.SIGKILL)
        pushes_more(ledger, 3, 50)
        (ledger.directory / "stop").touch()
        status, _, err = job.finish()
    assert status == 0, err
    ledger.check()


@pytest.mark.timeout(120 + 40 * KILLS)
@pytest.mark.parametrize(
    ("kind", "place"), [("dist_sync", "memory"), ("dist_async", "a disk"), ("dist_async", "memory")]
)
def test_servers_are_killed_at_random_moments(tmp_path: Path, ledger: Ledger, kind: str, place: str) -> None:
    """Every other one together with a worker. A server is killed when the other one has got its copy anew."""
    chance = random.Random(f"servers {kind} {KILLS}")
    snapshots = tmp_path / "snapshots"
    snapshots.mkdir(mode=0o700)
    options = ["--server-restarts", str(1 + KILLS)]
    options += ["--replicate-servers", "2"] if place == "memory" else []
    environ = {"REIGEN_KV_SNAPSHOT_DIR": str(snapshots)} if place == "a disk" else {}
    with start(ledger, kind, *options, **environ) as job:
        for number in range(1 + KILLS):
            pushes_more(ledger, 3, chance.randrange(50, 200))
            victims = [chance.choice(processes_of(job, "server"))]
            victims += [ledger.pid(chance.choice(ledger.training()))] if number % 2 else []
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
        pushes_more(ledger, 3, 50)
        (ledger.directory / "stop").touch()
        status, _, err = job.finish()
    assert status == 0, err
    assert err.count("killed by SIGKILL; it is started again") == 1 + KILLS
    ledger.check()
    assert not any(snapshots.iterdir()), "nobody needs them any more"


def test_a_worker_that_dies_before_it_has_a_store_is_replaced(ledger: Ledger) -> None:
    """The others begin without it."""
    with start(ledger, "dist_sync", DIES_FIRST="1.0") as job:
        pushes_more(ledger, 3, 20)
        (ledger.directory / "stop").touch()
        status, _, err = job.finish()
    assert status == 0, err
    assert "slot 1: killed by SIGKILL; 2 processes go on" in err
    assert ledger.numbers((1, 1), "acknowledged")
    ledger.check()


def test_two_servers_that_die_at_once_have_no_copy_of_each_other(ledger: Ledger) -> None:
    with start(ledger, "dist_sync", "--replicate-servers", "2") as job:
        pushes_more(ledger, 3, 10)
        for pid in processes_of(job, "server"):
            os.kill(pid, signal.SIGKILL)
        status, _, err = job.finish()
    assert status == 1
    assert re.search(r"^reigen run: server [01] failed first: exit code 1$", err, re.MULTILINE), err
    assert re.search(r"what server ([01]) held is lost: its backup, server (?!\1)[01], has died, too", err), err
    assert "REIGEN_KV_SNAPSHOT_DIR would have kept it" in err


@pytest.mark.parametrize("role", ["server", "scheduler"] if KILLS > 1 else ["server"])
def test_a_server_that_dies_ends_the_job_and_is_named(ledger: Ledger, role: str) -> None:
    with start(ledger, "dist_sync", "--server-restarts", "0") as job:
        pushes_more(ledger, 3, 10)
        os.kill(processes_of(job, role)[0], signal.SIGKILL)
        status, _, err = job.finish()
    assert status == 128 + signal.SIGKILL
    assert re.search(rf"^reigen run: {role}( [01])? failed first: killed by SIGKILL", err, re.MULTILINE)
    assert ("(REIGEN_KV_SNAPSHOT_DIR)" in err) == (role == "server"), err


def test_a_worker_that_is_silent_is_lost_and_takes_no_part_when_it_wakes(ledger: Ledger) -> None:
    """Its place is filled by another process, which sees the values of the others."""
    beats = {"PS_HEARTBEAT_INTERVAL": "0.2", "PS_HEARTBEAT_TIMEOUT": "1.5"}
    with start(ledger, "dist_sync", **beats) as job:
        pushes_more(ledger, 3, 10)
        sleeper = ledger.training()[0]
        os.kill(ledger.pid(sleeper), signal.SIGSTOP)
        others = [process for process in ledger.training() if process != sleeper]
        until(lambda: all(ledger.num_workers(process) == 2 for process in others))
        os.kill(ledger.pid(sleeper), signal.SIGCONT)
        until(lambda: not ledger.lives(sleeper))
        pushes_more(ledger, 3, 10)
        (ledger.directory / "stop").touch()
        status, _, err = job.finish()
    assert status == 0, err
    assert "nothing was heard of it for 1.5 s" in err
    ledger.check()


@pytest.mark.skipif(KILLS == 1, reason="takes ten seconds: REIGEN_TEST_KILLS=10")
def test_workers_that_come_later_have_the_values_of_the_others(tmp_path: Path, ledger: Ledger) -> None:
    """Hosts come by a discovery script: a second worker, and a third one."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\n")
    more = ("--host-discovery-script", f"cat {hosts}", "--min-np", "1", "--max-np", "3", "-s", "2")
    command = (*PROGRAM, str(ledger.directory), "dist_sync")
    with launched(*more, "--grace-seconds", "15", *command, env=CUT) as job:
        for num_workers in (1, 2, 3):
            hosts.write_text(f"localhost:{num_workers}\n")
            pushes_more(ledger, num_workers, 20)
        (ledger.directory / "stop").touch()
        status, _, err = job.finish()
    assert status == 0, err
    assert "slot 2 joins; 3 workers go on" in err
    ledger.check()


@pytest.mark.parametrize("main", ["main", "main_with_more_servers"])
def test_a_function_returns_the_results_of_all_workers(main: str) -> None:
    code = f"import tests.kv.elastic_function as program; program.{main}()"
    status = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (status.returncode, status.stdout) == (0, "[(0, 3, 15.0), (1, 3, 15.0), (2, 3, 15.0)]\n"), status.stderr
