"""Elastic jobs that go on when their launcher is lost, and launchers that take its place: real processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from reigen.cluster.membership.rendezvous import split_address
from reigen.launch.job_directory import read_record
from tests.multiprocess.launcher import DEADLINE_SECONDS, Launcher, launched, marked, until

pytestmark = pytest.mark.slow

COUNTING = Path(__file__).parents[1] / "elastic" / "counting_program.py"
FAILING = """
import os, sys, time
import numpy as np
import reigen as hvd
from reigen.elastic import ObjectState, run
hvd.init()
state = ObjectState(hvd.broadcast_object, hvd.rank, step=0)
@run
def train(state):
    print("READY", flush=True)
    while not os.path.exists(sys.argv[1]):
        hvd.allreduce(np.ones(1, np.float32), name="x"); state.step += 1; state.commit(); time.sleep(0.01)
    raise ValueError("no more data")
train(state)
"""


class LostJob:
    """A job that goes on when its launcher is lost."""

    def __init__(self, launcher: Launcher, directory: Path, mark: str) -> None:
        self.launcher, self._directory, self._mark = launcher, directory, mark
        self.err = directory / "err"

    @property
    def name(self) -> str:
        until(lambda: list((self._directory / "reigen" / "jobs").glob("*/job")))
        return next((self._directory / "reigen" / "jobs").glob("*/job")).parent.name

    @property
    def directory(self) -> Path:
        return self._directory / "reigen" / "jobs" / self.name

    def steps(self, file: str = "out") -> list[int]:
        """Steps of rank 0 that a launcher has shown, or that are in a file of the job's directory."""
        path = self._directory / file
        text = path.read_text() if path.exists() else ""
        return [int(number) for number in re.findall(r"STEP (\d+) 0 ", text)]

    def process_of(self, slot: int) -> int:
        found = []
        for pid in marked(self._mark):
            with suppress(OSError):
                if f"REIGEN_SLOT={slot}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(pid)
        assert len(found) == 1, found
        return found[0]

    def agent(self) -> int:
        """The process that is the parent of the ranks."""
        status = Path(f"/proc/{self.process_of(0)}/stat").read_text()
        return int(status.rpartition(")")[2].split()[1])

    def lose_launcher(self) -> None:
        os.kill(self.launcher.supervisor(), signal.SIGKILL)
        self.launcher.process.wait(DEADLINE_SECONDS)

    def attach(self, *more: str, **options: object) -> subprocess.Popen[bytes]:
        environ = {**os.environ, "REIGEN_TEST_MARK": self._mark, "XDG_STATE_HOME": str(self._directory)}
        command = [sys.executable, "-m", "reigen", "attach", *more]
        return subprocess.Popen(command, env=environ, **options)  # type: ignore[call-overload]

    def finish(self, *more: str) -> tuple[int, str, str]:
        process = self.attach(*more, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=DEADLINE_SECONDS)
        return process.returncode, out.decode(), err.decode()


@contextmanager
def job_that_goes_on(directory: Path, *options: str, **others: object) -> Iterator[LostJob]:
    mark = directory.name + os.urandom(4).hex()
    environ = {"XDG_STATE_HOME": str(directory), "REIGEN_TEST_MARK": mark, "OMP_NUM_THREADS": "1"}
    rests = ["--blacklist-cooldown-range", "1", "1", "--on-launcher-loss", "continue"]
    with (directory / "out").open("wb") as out, (directory / "err").open("wb") as err:
        others = {"stdout": out, "stderr": err, **others}
        with launched("--min-np", "1", *rests, *options, env=environ, **others) as launcher:
            try:
                yield LostJob(launcher, directory, mark)
            finally:
                for pid in marked(mark):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def counting(num_steps: int) -> tuple[str, ...]:
    return sys.executable, str(COUNTING), str(num_steps), "0.01"


@pytest.mark.parametrize("victim", ["supervisor", "watchdog", "both"])
def test_a_job_goes_on_without_its_launcher_and_another_one_takes_its_place(tmp_path: Path, victim: str):
    with job_that_goes_on(tmp_path, "-np", "3", *counting(100_000)) as job:
        until(lambda: len(job.steps()) > 5)
        name, ranks = job.name, [job.process_of(slot) for slot in range(3)]
        assert (job.directory / "job").stat().st_mode & 0o777 == 0o600
        assert "has a launcher" in job.finish(name)[2]
        victims = {"supervisor": [job.launcher.supervisor()], "watchdog": [job.launcher.process.pid]}
        for pid in victims.get(victim) or [*victims["supervisor"], *victims["watchdog"]]:
            os.kill(pid, signal.SIGKILL)
        job.launcher.process.wait(DEADLINE_SECONDS)
        kept = f"reigen/jobs/{name}/output/rank.0/stdout"
        until(lambda: len(job.steps(kept)) > 5)
        assert f"{name} " in job.finish()[1]

        os.kill(ranks[2], signal.SIGKILL)  # nobody starts it again now
        until(lambda: f"STEP {job.steps(kept)[-1]} 0 2" in (tmp_path / kept).read_text())
        with (tmp_path / "out2").open("wb") as out, (tmp_path / "err2").open("wb") as err:
            again = job.attach(name, stdout=out, stderr=err)
        until(lambda: re.search(r"STEP \d+ 0 3 ", (tmp_path / "out2").read_text()))
        assert [job.process_of(slot) for slot in range(2)] == ranks[:2]  # they are the same processes
        said = (tmp_path / "err2").read_text()
        assert "slot 2: killed by SIGKILL; 2 processes go on" in said, said
        assert "slot 2 is started again" in said
        numbers = [*job.steps(), *job.steps(kept), *job.steps("out2")]
        missing = set(range(1, max(numbers) + 1)) - set(numbers)
        assert len(missing) < 100  # what the launcher had read and not written

        again.send_signal(signal.SIGINT)
        assert again.wait(DEADLINE_SECONDS) == 130
        until(lambda: not marked(job._mark))
        assert not (tmp_path / "reigen" / "jobs" / name / "job").exists()


def speaks_tls(address: str) -> bool:
    """Whether the process that listens there begins TLS with a stranger; who it is, is proven within."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(split_address(address), DEADLINE_SECONDS) as connection:
        try:
            context.wrap_socket(connection).close()
        except OSError:
            return False
    return True


@pytest.mark.parametrize("has_tls", [False, True])
def test_agents_of_other_hosts_outlive_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_tls: bool):
    """A place there is filled again by the launcher that comes later."""
    monkeypatch.setenv("REIGEN_TLS", str(int(has_tls)))
    ssh = Path(__file__).with_name("detached_ssh.py")
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, str(ssh), "serve", str(tmp_path / "sshd")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ)
    assert server.stdout is not None
    hosts = ["-H", "a.invalid:1,b.invalid:2", "-np", "3", "--ssh-command", f"{sys.executable} {ssh} {tmp_path}/sshd"]
    try:
        assert server.stdout.readline() == b"ready\n"
        with job_that_goes_on(
            tmp_path, *hosts, "-x", "REIGEN_TEST_MARK", "-x", "XDG_STATE_HOME", *counting(100_000)
        ) as job:
            until(lambda: len(job.steps()) > 5)
            name, last = job.name, job.process_of(2)
            record = read_record(job.directory)
            assert record is not None
            agents = {agent.host: speaks_tls(agent.address) for agent in record.agents}
            assert agents == dict.fromkeys(("", "a.invalid", "b.invalid"), has_tls)
            job.lose_launcher()
            kept = f"reigen/jobs/{name}/output/rank.0/stdout"
            until(lambda: len(job.steps(kept)) > 5)
            os.kill(last, signal.SIGKILL)
            with (tmp_path / "out2").open("wb") as out, (tmp_path / "err2").open("wb") as err:
                again = job.attach(name, stdout=out, stderr=err)
            until(lambda: re.search(r"STEP \d+ 0 3 ", (tmp_path / "out2").read_text()))
            assert "slot 2 (host b.invalid): killed by SIGKILL" in (tmp_path / "err2").read_text()
            again.send_signal(signal.SIGTERM)
            assert again.wait(DEADLINE_SECONDS) == 143
            until(lambda: not marked(job._mark))
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


def test_a_job_ends_without_a_launcher(tmp_path: Path):
    with job_that_goes_on(tmp_path, "-np", "2", *counting(300)) as job:
        until(lambda: len(job.steps()) > 5)
        name = job.name
        job.lose_launcher()
        assert "goes on without a launcher" in job.err.read_text()
        until(lambda: not marked(job._mark))
        assert f"{name} " in (listed := job.finish()[1])
        assert "has ended" in listed
        code, out, _ = job.finish(name)
        assert code == 0, out
        assert "slot 0: exit code 0" in out
        assert "slot 1: exit code 0" in out
        assert job.steps(f"reigen/jobs/{name}/output/rank.0/stdout")[-1] == 300
        assert job.finish()[1] == ""


def test_a_program_that_fails_without_a_launcher(tmp_path: Path):
    program, enough = tmp_path / "program.py", tmp_path / "enough"
    program.write_text(FAILING)
    with job_that_goes_on(tmp_path, "-np", "2", sys.executable, str(program), str(enough)) as job:
        name = job.name
        until(lambda: (tmp_path / "out").read_text().count("READY") == 2)
        job.lose_launcher()
        enough.touch()
        until(lambda: not marked(job._mark))
        code, out, _ = job.finish(name)
    assert code == 1
    assert "ValueError: no more data" in out


def test_a_launcher_that_was_stopped_leaves_the_job_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The agent has taken it for lost: when it wakes, it starts nobody a second time."""
    monkeypatch.setenv("REIGEN_PEER_TIMEOUT", "3")
    with job_that_goes_on(tmp_path, "-np", "2", *counting(100_000)) as job:
        until(lambda: len(job.steps()) > 5)
        name, ranks, supervisor = job.name, [job.process_of(slot) for slot in range(2)], job.launcher.supervisor()
        os.kill(supervisor, signal.SIGSTOP)
        until(lambda: len(job.steps(f"reigen/jobs/{name}/output/rank.0/stdout")) > 5)
        os.kill(supervisor, signal.SIGCONT)
        assert job.launcher.process.wait(DEADLINE_SECONDS) == 1
        assert "its agent lives; job" in job.err.read_text()
        assert [job.process_of(slot) for slot in range(2)] == ranks


def test_stdout_without_a_reader_detaches(tmp_path: Path):
    reading, writing = os.pipe()
    with job_that_goes_on(tmp_path, "-np", "2", *counting(100_000), stdout=writing) as job:
        os.close(writing)
        os.read(reading, 100)
        name = job.name
        os.close(reading)
        assert job.launcher.process.wait(DEADLINE_SECONDS) == 141
        until(lambda: len(job.steps(f"reigen/jobs/{name}/output/rank.0/stdout")) > 5)


def test_the_end_of_the_agent_is_that_of_its_processes(tmp_path: Path):
    with job_that_goes_on(tmp_path, "-np", "2", *counting(100_000)) as job:
        until(lambda: len(job.steps()) > 5)
        os.kill(job.agent(), signal.SIGKILL)
        assert job.launcher.process.wait(DEADLINE_SECONDS) != 0
        until(lambda: not marked(job._mark))
    assert "host localhost was lost, with slots 0, 1: its agent has ended" in job.err.read_text()
