"""Elastic jobs of `reigen run` with real processes, which stand in for members: who is started, when, and how it ends.

In the place of ssh is a script that runs the agents on this machine.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.multiprocess.launcher import Launcher, launched, run, until
from tests.multiprocess.test_launch_hosts import FAKE_SSH

pytestmark = pytest.mark.slow
MEMBER = Path(__file__).parent / "elastic_member.py"
#: The shortest rest that may be asked for.
SHORT = ("--blacklist-cooldown-range", "1", "1")


class Job:
    """A running elastic job, whose members do what they are told."""

    def __init__(self, launcher: Launcher, directory: Path) -> None:
        self.launcher, self._directory = launcher, directory
        self._read: dict[str, int] = {}

    def tell(self, whom: str, *orders: str) -> None:
        """Tell a slot, ``1``, or one process, ``1.0``, or all, an empty text."""
        file = self._directory / f"do.{whom}".rstrip(".")
        with file.open("a") as out:
            out.write("".join(f"{order}\n" for order in orders))

    def read(self, name: str) -> list[str]:
        """What a process has found in its environment, when it runs: rank, candidate, host, local rank, where."""
        until(lambda: (self._directory / name).exists() or self.launcher.process.poll() is not None)
        return (self._directory / name).read_text().split()[1:]

    def view(self, teller: str, epoch: int, *members: str) -> None:
        """Have a slot tell the launcher of a view; returns when it has."""
        self.tell(teller, " ".join(("view", str(epoch), *members)))
        until((self._directory / f"view.{epoch}").exists)

    def kill(self, name: str, signum: int = 9) -> None:
        """Kill a process as soon as it runs."""
        self.read(name)
        os.kill(int((self._directory / name).read_text().split()[0]), signum)

    @property
    def started(self) -> set[str]:
        return {file.name for file in self._directory.iterdir() if re.fullmatch(r"\d+\.\d+", file.name)}


@contextmanager
def elastic(directory: Path, *options: str, **others: object) -> Iterator[Job]:
    (directory / "members").mkdir()
    command = (sys.executable, str(MEMBER), str(directory / "members"))
    with launched(*options, *command, **others) as launcher:
        yield Job(launcher, directory / "members")


def script(file: Path, text: str) -> str:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return str(file)


@pytest.fixture
def ssh(tmp_path):
    return ("--ssh-command", script(tmp_path / "ssh", FAKE_SSH.partition("\n")[2]))


def test_a_killed_rank_0_is_replaced_by_a_candidate(tmp_path):
    with elastic(tmp_path, "-np", "3", "--min-np", "2", *SHORT) as job:
        assert job.read("0.0") == ["0", "-", "localhost", "0", "-"]
        assert job.read("2.0") == ["2", "-", "localhost", "2", "-"]
        job.kill("0.0")
        assert job.read("0.1") == ["-", "1", "localhost", "0", "-"]
        job.view("1", 2, "1.0", "2.0", "0.1")
        job.tell("", "finish")
        status, out, err = job.launcher.finish()
    assert (status, out) == (0, "")
    assert err.splitlines() == [
        "reigen run: slot 0: killed by SIGKILL; 2 processes go on, its place rests for 1 s",
        "reigen run: slot 0 is started again (host localhost)",
    ]


def test_two_names_of_this_host_are_two_hosts(tmp_path):
    hosts = ("-H", "localhost:2,127.0.0.1:2", "-np", "4", "--min-np", "2", "--blacklist", "host")
    with elastic(tmp_path, *hosts) as job:
        assert [job.read(f"{slot}.0")[:4] for slot in range(4)] == [
            ["0", "-", "localhost", "0"],
            ["1", "-", "localhost", "1"],
            ["2", "-", "127.0.0.1", "0"],
            ["3", "-", "127.0.0.1", "1"],
        ]
        job.kill("3.0")
        until(lambda: len([pid for pid, command in job.launcher.processes().items() if MEMBER.name in command]) <= 4)
        job.view("0", 2, "0.0", "1.0")
        job.tell("0", "finish")
        job.tell("1", "finish")
        status, _, err = job.launcher.finish()
    assert status == 0
    text = "slot 3 (host 127.0.0.1): killed by SIGKILL; host 127.0.0.1 is not used any more; 2 processes go on"
    assert text in err
    assert job.started == {"0.0", "1.0", "2.0", "3.0"}


def test_the_last_holders_of_the_state_die(tmp_path):
    with elastic(tmp_path, "-np", "2", "--min-np", "1") as job:
        job.read("1.0")
        job.view("0", 1, "0.0", "1.0")
        job.tell("0.0", "exit 3")
        job.tell("1.0", "exit 4")
        status, _, err = job.launcher.finish()
    assert status in {3, 4}, "whichever was first"
    assert f"failed first: exit code {status}" in err


def test_fewer_than_the_minimum_for_too_long(tmp_path):
    options = ("-np", "2", "--min-np", "2", "--elastic-timeout", "1", "--blacklist-cooldown-range", "30", "30")
    with elastic(tmp_path, *options) as job:
        job.kill("1.0")
        status, _, err = job.launcher.finish()
    assert status == 1
    assert err.splitlines()[-1] == (
        "reigen run: Timed out waiting for minimum number of slots to become available. Please check that you have "
        "enough resources to run at least 2 processes."
    )


def test_a_spare_is_there_before_it_is_needed(tmp_path):
    with elastic(tmp_path, "-np", "2", "--min-np", "1", "--spares", "1") as job:
        assert job.read("0.0")[:2] == ["0", "-"]
        assert job.read("2.0")[:2] == ["-", "1"], "it has no rank, and is a candidate"
        job.view("0", 1, "0.0", "1.0")
        job.kill("1.0")
        job.view("0", 2, "0.0", "2.0")
        job.tell("", "finish")
        status, _, err = job.launcher.finish()
    assert status == 0
    # the view may be announced before the death is seen; then two are members
    rest = r"(1\d|20) s"  # 10, and up to as much again by chance
    assert re.search(
        f"slot 1: killed by SIGKILL; (1 process goes|2 processes go) on, its place rests for {rest}", err
    ), err


@pytest.mark.parametrize(
    ("directory", "reason"),
    [
        ("missing", "there is no such directory on this host; create one that all hosts share"),
        ("/proc", "it cannot be written to"),
    ],
)
def test_a_witness_that_cannot_be_is_said_once_and_nothing_is_started(tmp_path, directory, reason):
    path = tmp_path / directory
    with elastic(tmp_path, "-np", "2", "--min-np", "1", "--witness-dir", str(path)) as job:
        status, _, err = job.launcher.finish()
    assert status == 1
    assert err.count("--witness-dir") == err.count(f"--witness-dir {path}: {reason}") == 1, err
    assert job.started == set()


def test_reset_limit(tmp_path):
    with elastic(tmp_path, "-np", "3", "--min-np", "1", "--reset-limit", "1") as job:
        job.read("1.0")
        job.view("0", 1, "0.0", "1.0", "2.0")
        job.kill("2.0")
        job.view("0", 2, "0.0", "1.0")
        job.kill("1.0")
        status, _, err = job.launcher.finish()
    assert status == 1
    assert "Job has been shutdown because number of resets during elastic job exceeded limit: 1" in err


def test_hosts_come_and_go_while_the_job_runs(tmp_path, ssh):
    """Hosts that appear get agents, hosts that vanish are left, and those that cannot be used disturb nobody."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:1\na.invalid:1\n")
    discover = script(tmp_path / "discover", f"cat {hosts}")
    options = ("--min-np", "2", "--max-np", "3", "--host-discovery-script", discover, *ssh)
    does = {"FAKE_SSH_DOES": "if [ $FAKE_HOST = bad.invalid ]; then echo nothing works >&2; exit 255; fi"}
    with elastic(tmp_path, *options, env=does) as job:
        assert job.read("0.0") == ["0", "-", "localhost", "0", "-"]
        assert job.read("1.0") == ["1", "-", "a.invalid", "0", "a.invalid"]
        job.view("0", 1, "0.0", "1.0")
        hosts.write_text("localhost:1\na.invalid:1\nbad.invalid:4\nb.invalid:4\n")
        assert job.read("2.0") == ["-", "1", "b.invalid", "0", "b.invalid"]
        hosts.write_text("localhost:1\nb.invalid:4\n")
        assert job.read("3.0") == ["-", "1", "b.invalid", "1", "b.invalid"]
        hosts.write_text("rubbish rubbish\n")
        job.view("0", 2, "0.0", "2.0", "3.0")
        job.tell("", "finish")
        status, _, err = job.launcher.finish()
    assert status == 0
    assert "host bad.invalid cannot take part: ssh failed: nothing works (try it by hand" in err
    assert "host a.invalid has vanished: slot 1 is asked to leave" in err
    assert "slot 1 (host a.invalid) has left" in err


def test_a_job_ends_while_a_host_is_still_called(tmp_path, ssh):
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    discover = script(tmp_path / "discover", f"cat {hosts}")
    does = {"FAKE_SSH_DOES": f"touch {tmp_path}/called; exec sleep 1000"}
    with elastic(tmp_path, "--min-np", "2", "--host-discovery-script", discover, *ssh, env=does) as job:
        job.read("1.0")
        job.view("0", 1, "0.0", "1.0")
        hosts.write_text("localhost:2\nslow.invalid:2\n")
        until((tmp_path / "called").exists)
        job.tell("", "finish")
        assert job.launcher.finish() == (0, "", "")


def test_an_agent_that_is_killed_takes_its_host_with_it(tmp_path, ssh):
    options = ("-H", "localhost:1,a.invalid:2", "-np", "3", "--min-np", "1", *ssh, *SHORT)
    with elastic(tmp_path, *options) as job:
        job.read("1.0")
        job.read("2.0")
        agents = [pid for pid, command in job.launcher.processes().items() if "reigen.launch.agent" in command]
        for pid in agents:
            os.kill(pid, 9)
        assert job.read("1.1") == ["-", "1", "a.invalid", "0", "a.invalid"]
        assert job.read("2.1") == ["-", "1", "a.invalid", "1", "a.invalid"]
        job.view("0", 2, "0.0", "1.1", "2.1")
        job.tell("", "finish")
        status, _, err = job.launcher.finish()
    assert status == 0
    assert "reigen run: host a.invalid was lost, with slots 1, 2" in err


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo first; echo it is so >&2; exit 3", "it has failed (exit code 3): it is so"),
        ("echo h1:2:3", "it has printed 'h1:2:3', which is neither 'host' nor 'host:slots'"),
        ("echo h1; echo h1:2", "it has named host h1 twice"),
    ],
)
def test_the_first_run_of_a_discovery_script_must_go_well(tmp_path, text, problem):
    discover = script(tmp_path / "discover", text)
    status, out, err = run("--min-np", "1", "--host-discovery-script", discover, "true")
    assert (status, out) == (1, "")
    assert err == f"reigen run: --host-discovery-script {discover}: {problem}; nothing was started\n"


def test_later_failures_of_a_discovery_script_are_a_warning(tmp_path):
    broken = tmp_path / "broken"
    discover = script(tmp_path / "discover", f"if [ -e {broken} ]; then exit 4; fi; echo localhost:2")
    with elastic(tmp_path, "--min-np", "1", "--host-discovery-script", discover) as job:
        job.read("1.0")
        broken.touch()
        assert job.launcher.process.stderr is not None
        warning = job.launcher.process.stderr.readline().decode()
        broken.unlink()
        assert job.launcher.process.stderr.readline() == b"reigen run: the discovery script works again\n"
        job.tell("", "finish")
        assert job.launcher.finish()[0] == 0
    assert warning == (
        f"reigen run: the discovery script {discover}: it has failed (exit code 4); the hosts that it named before are "
        "kept\n"
    )


def test_hosts_that_do_not_suffice(ssh):
    does = {"FAKE_SSH_DOES": "echo nothing works >&2; exit 255"}
    status, out, err = run("--min-np", "2", "-H", "localhost:1,a.invalid:2", *ssh, "true", env=does)
    assert (status, out) == (1, "")
    first, second = err.splitlines()
    problem = "ssh failed: nothing works (try it by hand: ssh a.invalid true)"
    assert first == f"reigen run: host a.invalid cannot take part: {problem}; it is called again in 10 s"
    needed = "the hosts that can take part have 1 slots, and 2 processes are needed at least"
    assert second == f"reigen run: {needed}; nothing was started"


def test_commands_that_do_not_exist_and_programs_that_know_nothing_of_elastic_jobs():
    assert run("--min-np", "1", "-np", "2", "nosuchcmd") == (127, "", "reigen run: no such command: nosuchcmd\n")
    assert run("--min-np", "1", "-np", "2", "true") == (0, "", "")
    status, _, err = run("--min-np", "1", "-np", "2", "sh", "-c", "exit 3")
    assert status == 3
    assert "failed first: exit code 3" in err


def test_ctrl_c_ends_a_job_that_waits_for_hosts(tmp_path):
    discover = script(tmp_path / "discover", f"touch {tmp_path}/asked; echo localhost:1")
    with launched("--min-np", "2", "--host-discovery-script", discover, "true") as launcher:
        until((tmp_path / "asked").exists)
        launcher.process.send_signal(2)
        assert launcher.finish()[0] == 130
