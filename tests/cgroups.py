"""Control groups with a limit of memory for tests: real ones, below this process's own."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from reigen.resources.memory import cgroup_directories

DEADLINE_SECONDS = 60.0
_LIMITS = {"memory.max": "memory.swap.max", "memory.limit_in_bytes": "memory.memsw.limit_in_bytes"}


class Cgroup:
    """A control group.

    Attributes:
        directory: where it is mounted.
        limit: the file that holds its limit.
    """

    def __init__(self, directory: Path, limit: Path) -> None:
        self.directory, self.limit = directory, limit

    def enter(self) -> Callable[[], None]:
        """For a child to call between fork and exec."""
        procs = self.directory / "cgroup.procs"
        return lambda: procs.write_text(str(os.getpid())) and None


@contextmanager
def limited(num_bytes: int) -> Iterator[Cgroup]:
    """A control group that allows so much memory, and no swap. Skips the test where there can be none."""
    directory, limit = _made()
    try:
        limit.write_text(str(num_bytes))
        with suppress(OSError):  # the kernel does not count swap
            (directory / _LIMITS[limit.name]).write_text("0" if limit.name == "memory.max" else str(num_bytes))
        yield Cgroup(directory, limit)
    finally:
        until = time.monotonic() + DEADLINE_SECONDS
        while (directory / "cgroup.procs").read_text() and time.monotonic() < until:
            time.sleep(0.01)
        directory.rmdir()


def _made() -> tuple[Path, Path]:
    reason = "no control group of this process limits memory"
    for above in cgroup_directories():
        directory = above / f"reigen-test-{uuid.uuid4().hex}"
        try:
            directory.mkdir()
        except OSError as error:
            reason = f"no control group can be made in {above}: {error.strerror}"
            continue
        for name in _LIMITS:
            if os.access(directory / name, os.W_OK):
                return directory, directory / name
        directory.rmdir()
        reason = f"{above} does not let groups below it limit memory"
    pytest.skip(reason)
