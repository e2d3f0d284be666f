"""Copying the working directory to other hosts, by rsync over the same ssh as everything else."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO, Protocol

from reigen.errors import LaunchError
from reigen.launch.loop import Loop
from reigen.launch.processes import dies_with_parent
from reigen.launch.ssh import Problem, Ssh

#: rsync gives up when nothing has moved for so long.
_STALL_SECONDS = 60
_SHOWN_BYTES = 4096


def command(host: str, directory: str, ssh: Ssh) -> list[str]:
    """The rsync that copies what is in the working directory into ``directory`` on ``host``, which it makes.

    Nothing is deleted there.
    """
    make = f"mkdir -p {shlex.quote(directory)} && rsync"
    where = f"[{host}]" if ":" in host else host
    options = ["-az", f"--timeout={_STALL_SECONDS}", "-e", shlex.join(ssh.base()), f"--rsync-path={make}"]
    return ["rsync", *options, "--", "./", f"{where}:{directory}/"]


class Waiter(Protocol):
    """Who waits for child processes that are none of the job's."""

    loop: Loop

    def spare(self, pid: int) -> None:
        """Such a child has been started."""

    def turn(self, limit_seconds: float | None = None) -> None:
        """Wait for something to happen, not longer than that."""


def copy(hosts: Sequence[str], directory: str, ssh: Ssh, waiter: Waiter) -> list[Problem]:
    """Copy to all hosts at the same time; returns those that it failed for.

    Args:
        hosts: where to.
        directory: where there.
        ssh: how they are reached.
        waiter: waits for the copies.

    Raises:
        LaunchError: there is no rsync here.
    """
    with ExitStack() as stack:
        copies = [_Copy(host, command(host, directory, ssh), waiter.loop, stack) for host in hosts]
        for each in copies:
            waiter.spare(each.process.pid)
        while any(each.process.returncode is None for each in copies):
            waiter.turn()
        return [problem for each in copies if (problem := each.problem()) is not None]


class _Copy:
    """One rsync, until it has ended."""

    def __init__(self, host: str, words: Sequence[str], loop: Loop, stack: ExitStack) -> None:
        self._host = host
        self._said: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  so it is
        try:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                start_new_session=True,
                preexec_fn=dies_with_parent(),  # noqa: PLW1509  there is no other thread
            )
        except OSError as error:
            raise LaunchError(f"--sync-dst-dir: cannot start {words[0]}: {error.strerror}") from None
        handle = os.pidfd_open(self.process.pid)
        stack.callback(os.close, handle)
        loop.watch(handle, lambda: self._on_exit(loop, handle))

    def problem(self) -> Problem | None:
        """Why it failed; None if it did not."""
        if self.process.returncode == 0:
            return None
        self._said.seek(0)
        lines = self._said.read(_SHOWN_BYTES).decode(errors="replace").splitlines()
        first = next((line.strip() for line in lines if line.strip()), "it did not say why")
        advice = "install rsync there" if "rsync: command not found" in first or "rsync: not found" in first else ""
        return Problem(self._host, f"rsync failed (exit code {self.process.returncode}): {first}", advice)

    def _on_exit(self, loop: Loop, handle: int) -> None:
        loop.unwatch(handle)
        self.process.wait()
