"""Processes of an elastic job, started without a launcher: who is started and killed, and when, is the test's."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from reigen.cluster.membership.control_service import ControlService
from reigen.cluster.membership.elastic.voter_memory import VOTER_MEMORY_BYTES
from tests.elastic.fork_server import ForkedProcess, ForkServer
from tests.multiprocess.launcher import until


class Member:
    """A process of the job, and the lines that it has written."""

    def __init__(self, slot: int, process: subprocess.Popen[str] | ForkedProcess) -> None:
        self.slot, self.process = slot, process
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the process, if it is there."""
        if self.process.poll() is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        """Waits for the end; returns the exit code."""
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    @property
    def has_ended(self) -> bool:
        """True if the process has ended, and all that it has written is there."""
        return self.process.poll() is not None and not self._reader.is_alive()

    def says(self, text: str) -> bool:
        """True if a line has this in it."""
        return any(text in line for line in self.lines)


class ElasticProcesses:
    """A job on this host.

    Args:
        command: of each process, behind ``python``; with a server, arguments of its module.
        min_size, max_size: numbers of ranks with which steps are run.
        server: forks the processes; None: each is a new interpreter.
        environ: more variables.
    """

    def __init__(
        self,
        *command: str | Path,
        min_size: int = 1,
        max_size: int = 8,
        server: ForkServer | None = None,
        **environ: str,
    ) -> None:
        self._server = server
        self._command, self._sizes, self._more = command, (min_size, max_size), environ
        self._secret = secrets.token_bytes(32)
        self._service = ControlService(self._secret)
        self._service.start()
        self._voter_fd = os.memfd_create("reigen-voter")
        os.ftruncate(self._voter_fd, VOTER_MEMORY_BYTES)
        self._incarnations: dict[int, int] = {}
        self.members: list[Member] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.kill()
            with suppress(subprocess.TimeoutExpired):
                member.wait(10)
            assert member.process.stdout is not None
            member.process.stdout.close()
        self._service.close()
        os.close(self._voter_fd)

    def end_service(self) -> None:
        """Ends the launcher's service, as the launcher's death would."""
        self._service.close()

    def start_first(self, size: int, environs: Mapping[int, Mapping[str, str]] | None = None) -> list[Member]:
        """Starts the members of the first view; ``environs``: more variables of some ranks. Returns all processes."""
        for rank in range(size):
            numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
            place = {f"REIGEN_{name}": str(number) for name, number in numbers.items()}
            self._start(rank, **place, **(environs or {}).get(rank, {}), REIGEN_CROSS_RANK="0", REIGEN_CROSS_SIZE="1")
        return self.members

    def start_candidate(self, slot: int, **environ: str) -> Member:
        """Starts a process that wants to become a member."""
        return self._start(slot, **environ, REIGEN_ELASTIC_CANDIDATE="1")

    def _start(self, slot: int, **environ: str) -> Member:
        incarnation = self._incarnations.get(slot, -1) + 1
        self._incarnations[slot] = incarnation
        variables = {
            **os.environ,
            "REIGEN_ELASTIC": "1",
            "REIGEN_SLOT": str(slot),
            "REIGEN_INCARNATION": str(incarnation),
            "REIGEN_MIN_SIZE": str(self._sizes[0]),
            "REIGEN_MAX_SIZE": str(self._sizes[1]),
            "REIGEN_ELASTIC_TIMEOUT": "60",
            "REIGEN_VOTER_FD": str(self._voter_fd),
            "REIGEN_RENDEZVOUS": self._service.address,
            "REIGEN_SECRET": self._secret.hex(),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            **self._more,
            **environ,
        }
        if self._server is not None:
            variables["REIGEN_VOTER_FD"] = f"{os.getpid()}:{self._voter_fd}"
            member = Member(slot, self._server.start([*map(str, self._command)], variables))
            self.members.append(member)
            return member
        process = subprocess.Popen(
            [sys.executable, *map(str, self._command)],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[self._voter_fd],
        )
        member = Member(slot, process)
        self.members.append(member)
        return member

    def wait_for(self, text: str, members: list[Member] | None = None, seconds: float = 60.0) -> None:
        """Waits until these members (all) have written this.

        Raises:
            AssertionError: not within this time, or some have ended without it.
        """
        members = self.members if members is None else members
        silent: list[Member] = []

        def are_done() -> bool:
            ended = [member for member in members if member.has_ended]  # before what they say is looked at
            silent[:] = [member for member in members if not member.says(text)]
            return not silent or any(member in silent for member in ended)

        with suppress(AssertionError):
            until(are_done, seconds)
        if silent:
            codes = {member.slot: member.process.poll() for member in silent}
            raise AssertionError(f"{text!r} is not said by (exit codes) {codes}: {self._describe(members)}")

    @staticmethod
    def _describe(members: list[Member]) -> str:
        return "\n".join(f"[{member.slot}] {line}" for member in members for line in member.lines)
