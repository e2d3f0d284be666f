"""Copying the working directory to other hosts, by rsync over the launcher's remote shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from typing import IO, Protocol

from reigen.errors import LaunchError
from reigen.launch.base import HostProblem
from reigen.launch.event_loop import LauncherLoop
from reigen.launch.process_tree import dies_with_parent

#: rsync gives up when nothing has moved for so long.
_STALL_SECONDS = 60
_SHOWN_BYTES = 4096


def rsync_command(host: str, directory: str, remote_shell: Sequence[str]) -> list[str]:
    """The rsync that copies what is in the working directory into ``directory`` on ``host``, which it makes.

    Nothing is deleted there.
    """
    make = f"mkdir -p {shlex.quote(directory)} && rsync"
    where = f"[{host}]" if ":" in host else host
    options = ["-az", f"--timeout={_STALL_SECONDS}", "-e", shlex.join(remote_shell), f"--rsync-path={make}"]
    return ["rsync", *options, "--", "./", f"{where}:{directory}/"]


class ChildWaiter(Protocol):
    """Who waits for child processes that are none of the job's."""

    loop: LauncherLoop

    def exclude_child(self, pid: int) -> None:
        """Such a child has been started."""

    def turn(self, limit_seconds: float | None = None) -> None:
        """Wait for something to happen, not longer than that."""


def copy_to_hosts(
    hosts: Sequence[str], directory: str, remote_shell: Sequence[str], waiter: ChildWaiter
) -> list[HostProblem]:
    """Copy to all hosts at the same time; returns those that it failed for.

    Args:
        hosts: where to.
        directory: where there.
        remote_shell: how they are reached (``AgentStarter.remote_shell``).
        waiter: waits for the copies.

    Raises:
        LaunchError: there is no rsync here.
    """
    with ExitStack() as stack:
        copies = [
            _RsyncProcess(host, rsync_command(host, directory, remote_shell), waiter.loop, stack) for host in hosts
        ]
        for each in copies:
            waiter.exclude_child(each.process.pid)
        while any(each.process.returncode is None for each in copies):
            waiter.turn()
        return [problem for each in copies if (problem := each.problem()) is not None]


class _RsyncProcess:
    """One rsync, until it has ended."""

    def __init__(self, host: str, words: Sequence[str], loop: LauncherLoop, stack: ExitStack) -> None:
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

    def problem(self) -> HostProblem | None:
        """Why it failed; None if it did not."""
        if self.process.returncode == 0:
            return None
        self._said.seek(0)
        lines = self._said.read(_SHOWN_BYTES).decode(errors="replace").splitlines()
        first = next((line.strip() for line in lines if line.strip()), "it did not say why")
        advice = "install rsync there" if "rsync: command not found" in first or "rsync: not found" in first else ""
        return HostProblem(self._host, f"rsync failed (exit code {self.process.returncode}): {first}", advice)

    def _on_exit(self, loop: LauncherLoop, handle: int) -> None:
        loop.unwatch(handle)
        self.process.wait()
