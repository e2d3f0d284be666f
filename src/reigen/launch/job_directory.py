"""Directories of jobs that go on when their launcher is lost, in the user's home: what another launcher needs.

``JOB/job``            record of the job, mode 0600: it holds the secret and the environment
``JOB/lock``           locked by the launcher that lives
``JOB/agent.log``      words of the agent of the launcher's host
``JOB/output``         output of its processes without a launcher, unless `--output-filename` says where
``JOB/result.HOST``    how it has ended on a host without a launcher
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from reigen.errors import ConfigError, LaunchError
from reigen.files import open_locked, privacy_problem, write_atomically

_RECORD, _LOCK = "job", "lock"
AGENT_LOG = "agent.log"


def jobs_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory of this user's jobs: XDG_STATE_HOME, or ``~/.local/state``, and ``reigen/jobs``."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "reigen" / "jobs"


def job_directory(job: str) -> Path:
    """Return the directory of a job on this host; raises ConfigError where that is no name of one."""
    if not job.isalnum() or not job.isascii():
        raise ConfigError(f"{job!r} is no name of a job: `reigen attach` lists them")
    return jobs_directory() / job


class AgentRecord(msgspec.Struct, frozen=True):
    """Agent that another launcher can reach: its host (empty: that of the launcher), and where it listens."""

    host: str
    address: str


class SlotRecord(msgspec.Struct, frozen=True):
    """Place of a process: as in ``launch.elastic.slots``, with the latest of its processes."""

    number: int
    host: str
    local_rank: int
    incarnation: int


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a job for a launcher that takes another one's place.

    Attributes:
        job: name of the job.
        host: of the launcher.
        started: when the job began, in seconds since 1970.
        generation: of the latest launcher.
        pid: of that.
        arguments: of `reigen run`.
        directory: where it was run.
        environ: its environment.
        secret: the job's, in hexadecimal.
        service: address of this host at which the launcher's service is reached.
        agents: those that can be reached.
        slots: all places that have had a process, by number.
        epoch, members: the latest view that was announced; epoch None: none was.
        metrics: address at which the launcher serves the job's metrics; empty: nowhere.
    """

    job: str
    host: str
    started: float
    generation: int
    pid: int
    arguments: tuple[str, ...]
    directory: str
    environ: dict[str, str]
    secret: str
    service: str = "127.0.0.1"
    agents: tuple[AgentRecord, ...] = ()
    slots: tuple[SlotRecord, ...] = ()
    epoch: int | None = None
    members: tuple[tuple[int, int], ...] = ()
    metrics: str = ""

    def __repr__(self) -> str:
        """Describe it without the secret and the environment."""
        return f"JobRecord({self.job}, launcher {self.generation} on {self.host})"


class JobFile:
    """Record of a job on disk, held by the launcher that lives.

    Attributes:
        record: the latest.
        directory: of the job.
    """

    def __init__(self, record: JobRecord, directory: Path, lock: int) -> None:
        self.record, self.directory, self._lock = record, directory, lock

    @classmethod
    def create(cls, arguments: tuple[str, ...], environ: Mapping[str, str], secret: bytes) -> Self:
        """Make the directory and the record of a new job.

        Raises:
            LaunchError: they cannot be written.
        """
        job = secrets.token_hex(4)
        directory = job_directory(job)
        try:
            directory.mkdir(mode=0o700, parents=True)
            lock = _lock(directory)
            file = cls(
                JobRecord(
                    job=job,
                    host=socket.gethostname(),
                    started=time.time(),
                    generation=1,
                    pid=os.getpid(),
                    arguments=arguments,
                    directory=str(Path.cwd()),
                    environ=dict(environ),
                    secret=secret.hex(),
                ),
                directory,
                lock,
            )
            file.update()
        except OSError as error:
            raise LaunchError(f"--on-launcher-loss continue: {directory} cannot be used: {error.strerror}") from None
        return file

    @classmethod
    def take_over(cls, job: str) -> Self:
        """Take the place of a launcher that has gone: hold the record, with the next generation.

        Raises:
            LaunchError: there is no such job, it is another host's or another user's, or its launcher lives.
        """
        directory = job_directory(job)
        record = read_record(directory)
        if record is None:
            raise LaunchError(f"there is no job {job} (`reigen attach` lists those that there are)")
        if record.host != socket.gethostname():
            raise LaunchError(f"the launcher of job {job} was on host {record.host}: attach there")
        try:
            lock = _lock(directory)
        except BlockingIOError:
            raise LaunchError(f"job {job} has a launcher, process {record.pid}: end that one first") from None
        file = cls(record, directory, lock)
        file.update(generation=record.generation + 1, pid=os.getpid())
        return file

    def update(self, **changes: object) -> None:
        """Write the record with these changes; raises OSError."""
        self.record = msgspec.structs.replace(self.record, **changes)
        write_atomically(self.directory / _RECORD, [msgspec.json.encode(self.record)], mode=0o600)

    def remove(self) -> None:
        """Remove what only another launcher needs: the job has ended. Output stays."""
        for name in (_RECORD, _LOCK, AGENT_LOG):
            with suppress(OSError):
                (self.directory / name).unlink()
        for result in self.directory.glob("result.*"):
            with suppress(OSError):
                result.unlink()
        with suppress(OSError):
            self.directory.rmdir()

    def close(self) -> None:
        """Let another launcher come. May be called twice; the end of all processes that have it does the same."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def read_record(directory: Path) -> JobRecord | None:
    """Return the record in a job's directory; None: there is none that this user can trust and read."""
    try:
        descriptor = os.open(directory / _RECORD, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or privacy_problem(status) is not None:
            return None
        try:
            return msgspec.json.decode(file.read(), type=JobRecord)
        except msgspec.DecodeError:
            return None


def has_launcher(directory: Path) -> bool:
    """Return whether the launcher of a job lives, on this host."""
    try:
        os.close(_lock(directory))
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def list_jobs() -> list[tuple[JobRecord, Path]]:
    """Return this user's jobs on this host, the oldest first."""
    directories = sorted(jobs_directory().glob("*"))
    found = [(record, each) for each in directories if (record := read_record(each)) is not None]
    return sorted(found, key=lambda pair: pair[0].started)


def remove_directory(directory: Path) -> None:
    """Remove a job's directory with everything in it, output too."""
    shutil.rmtree(directory, ignore_errors=True)


def _lock(directory: Path) -> int:
    return open_locked(directory / _LOCK, os.O_WRONLY | os.O_CREAT)
