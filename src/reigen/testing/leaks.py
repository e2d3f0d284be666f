"""Detector of leaks: threads, descriptors, child processes, shared memory."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from reigen.cluster.bootstrap.rank_lock import read_process_stat

#: Things that are just closing are gone long before that, even on a busy host.
_WAIT_SECONDS = 30.0
_MEMFD_MAPPING = re.compile(r"^\S+ \S+ \S+ \S+ (\d+)\s+(/memfd:.*)", re.MULTILINE)  # lines of /proc/PID/maps
#: Threads, descriptors, children and shared memory of this process: kind and identity of each, and its description.
_Snapshot = dict[tuple[Hashable, ...], str]


class LeakError(AssertionError):
    """Error for things that were not there before, with one line for each in ``leaks``."""

    def __init__(self, leaks: list[str]) -> None:
        self.leaks = leaks
        super().__init__("left behind:\n" + "\n".join(f"  {leak}" for leak in leaks))


@dataclass(frozen=True)
class Resources:
    """Descriptors and child processes of this process that outlive a test on purpose, for example a shared pool's."""

    descriptors: frozenset[int] = frozenset()
    processes: frozenset[int] = frozenset()

    def __or__(self, other: Resources) -> Resources:
        return Resources(self.descriptors | other.descriptors, self.processes | other.processes)


class LeakCheck:
    """Context manager that fails when its block leaves something behind.

    Looks at Python threads, file descriptors, child processes (zombies too), mappings of anonymous shared memory
    (memfd) and files in /dev/shm. Things that are just closing get ``deadline_seconds``, half a minute by default. A
    block that raises is not checked: its own error matters more. ``keep`` returns, at the end, things that outlive the
    block on purpose.

    Raises:
        LeakError: at the end of the block, naming everything that is left.
    """

    def __init__(self, *, deadline_seconds: float | None = None, keep: Callable[[], Resources] = Resources) -> None:
        self._deadline_seconds = deadline_seconds
        self._keep = keep
        self._before: _Snapshot = {}
        self._forgiven = False

    def __enter__(self) -> Self:
        self._before = _take_snapshot()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and not self._forgiven:
            self.check()

    def forgive(self) -> None:
        """Leave out the check at the end of the block."""
        self._forgiven = True

    def leaks(self) -> list[str]:
        """Return a line for each thing there now that was not there at the beginning."""
        added = {key: text for key, text in _take_snapshot().items() if key not in self._before}
        kept = self._keep()
        on_purpose = {("descriptor", fd) for fd in kept.descriptors} | {("child", pid) for pid in kept.processes}
        return [text for key, text in added.items() if key[:2] not in on_purpose and not _is_foreign(text)]

    def check(self) -> None:
        """Wait for things that are closing; raise LeakError if something is left at the deadline."""
        until = time.monotonic() + (_WAIT_SECONDS if self._deadline_seconds is None else self._deadline_seconds)
        if not self.leaks():
            return
        gc.collect()  # arrays in reference cycles keep their mappings
        pause = threading.Event()
        while (leaks := self.leaks()) and time.monotonic() < until:
            pause.wait(0.005)
        if leaks:
            raise LeakError(leaks)


def _take_snapshot() -> _Snapshot:
    found: _Snapshot = {("thread", thread): f"thread {thread.name!r}" for thread in threading.enumerate()}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  the names are the descriptors
        with contextlib.suppress(FileNotFoundError):  # the one that was listing them
            target = os.readlink(f"/proc/self/fd/{name}")
            found["descriptor", int(name), target] = f"descriptor {name} -> {target}"
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in map(int, (task / "children").read_text().split()):
                found["child", pid] = f"child process {pid} ({_command(pid)})"
    maps = Path("/proc/self/maps").read_bytes()
    if b"/memfd:" in maps:  # a thousand lines with a framework, and this is asked before and after each test
        for inode, name in _MEMFD_MAPPING.findall(maps.decode(errors="replace")):
            found["mapping", inode] = f"mapping of shared memory {name} (inode {inode})"
    found.update({("file", path): str(path) for path in Path("/dev/shm").glob("*")})
    return found


def _command(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"
    return command[:200] or "zombie: no process has waited for it"


def _is_foreign(leak: str) -> bool:
    """Return whether a file in /dev/shm is gone by now, or in use by an unrelated process."""
    if not leak.startswith("/dev/shm/"):
        return False
    if not Path(leak).exists():
        return True
    return any(not _is_descendant(pid) for pid in _users_of(leak))


def _users_of(path: str) -> Iterator[int]:
    """Yield the ids of the processes that have mapped a file."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if path in (entry / "maps").read_text():
                    yield int(entry.name)


def _is_descendant(pid: int) -> bool:
    """Return whether a process is this one or one of its descendants."""
    while pid > 1:
        if pid == os.getpid():
            return True
        stat = read_process_stat(pid)
        pid = int(stat[1]) if stat else 0
    return False
