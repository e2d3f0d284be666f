"""Copies of the working directory on other hosts, by rsync over the launcher's remote shell."""

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
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.launch.supervision.process_tree import dies_with_parent

#: rsync gives up when nothing has moved for so long.
_STALL_SECONDS = 60
_SHOWN_BYTES = 4096


def rsync_command(host: str, directory: str, remote_shell: Sequence[str]) -> list[str]:
    """Return rsync's command line to copy the working directory into ``directory`` on ``host``, deleting nothing."""
    make = f"mkdir -p {shlex.quote(directory)} && rsync"
    where = f"[{host}]" if ":" in host else host
    options = ["-az", f"--timeout={_STALL_SECONDS}", "-e", shlex.join(remote_shell), f"--rsync-path={make}"]
    return ["rsync", *options, "--", "./", f"{where}:{directory}/"]


class ChildWaiter(Protocol):
    """Waiter for child processes that do not belong to the job."""

    loop: LauncherLoop

    def exclude_child(self, pid: int) -> None:
        """Exclude such a child from the job's processes."""

    def turn(self, limit_seconds: float | None = None) -> None:
        """Wait for events, not longer than that."""


def copy_to_hosts(
    hosts: Sequence[str], directory: str, remote_shell: Sequence[str], waiter: ChildWaiter
) -> list[HostProblem]:
    """Copy to ``directory`` of all hosts at the same time; return failures. Raises LaunchError without rsync."""
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
    def __init__(self, host: str, command: Sequence[str], loop: LauncherLoop, stack: ExitStack) -> None:
        self._host = host
        self._output: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  so it is
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
                preexec_fn=dies_with_parent(),  # noqa: PLW1509  there is no other thread
            )
        except OSError as error:
            raise LaunchError(f"--sync-dst-dir: cannot start {command[0]}: {error.strerror}") from None
        handle = os.pidfd_open(self.process.pid)
        stack.callback(os.close, handle)
        loop.watch(handle, lambda: self._on_exit(loop, handle))

    def problem(self) -> HostProblem | None:
        """Return the reason of its failure; None if it did not fail."""
        if self.process.returncode == 0:
            return None
        self._output.seek(0)
        lines = self._output.read(_SHOWN_BYTES).decode(errors="replace").splitlines()
        first = next((line.strip() for line in lines if line.strip()), "it did not say why")
        advice = "install rsync there" if "rsync: command not found" in first or "rsync: not found" in first else ""
        return HostProblem(self._host, f"rsync failed (exit code {self.process.returncode}): {first}", advice)

    def _on_exit(self, loop: LauncherLoop, handle: int) -> None:
        loop.unwatch(handle)
        self.process.wait()
