"""Detector of leaks: threads, descriptors, child processes, shared memory."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

_SHM = Path("/dev/shm")
#: Things that are just closing are gone long before that, even on a busy host.
_PATIENCE_SECONDS = 30.0
_MEMFD_MAPPING = re.compile(r"\S+ \S+ \S+ \S+ (\d+)\s+(/memfd:.*)")  # a line of /proc/PID/maps


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


@dataclass(frozen=True)
class _Snapshot:
    """Snapshot of this process's resources: an identity for each thing, and its description."""

    threads: Mapping[Hashable, str] = field(default_factory=dict)
    descriptors: Mapping[Hashable, str] = field(default_factory=dict)
    children: Mapping[Hashable, str] = field(default_factory=dict)
    mappings: Mapping[Hashable, str] = field(default_factory=dict)
    shm_files: Mapping[Hashable, str] = field(default_factory=dict)

    @classmethod
    def now(cls) -> _Snapshot:
        return cls(
            threads={thread: f"thread {thread.name!r}" for thread in threading.enumerate()},
            descriptors=_descriptors(),
            children=_children(),
            mappings=_memfd_mappings(),
            shm_files={path.name: str(path) for path in _SHM.glob("*")},
        )

    def added_since(self, before: _Snapshot, kept: Resources) -> list[str]:
        """Return a line for each thing that ``before`` did not have and that is not ``kept`` on purpose."""
        leaks = [text for key, text in self.threads.items() if key not in before.threads]
        leaks += [
            text
            for key, text in self.descriptors.items()
            if key not in before.descriptors and not (isinstance(key, tuple) and key[0] in kept.descriptors)
        ]
        leaks += [t for key, t in self.children.items() if key not in before.children and key not in kept.processes]
        leaks += [text for key, text in self.mappings.items() if key not in before.mappings]
        leaks += [text for key, text in self.shm_files.items() if key not in before.shm_files]
        return leaks


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
        self._before = _Snapshot()
        self._forgiven = False

    def __enter__(self) -> Self:
        self._before = _Snapshot.now()
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
        added = _Snapshot.now().added_since(self._before, self._keep())
        return [leak for leak in added if not _is_foreign(leak)]

    def check(self) -> None:
        """Wait for things that are closing; raise LeakError if something is left at the deadline."""
        patience = _PATIENCE_SECONDS if self._deadline_seconds is None else self._deadline_seconds
        until = time.monotonic() + patience
        if not self.leaks():
            return
        gc.collect()  # arrays in reference cycles keep their mappings
        pause = threading.Event()
        while (leaks := self.leaks()) and time.monotonic() < until:
            pause.wait(0.005)
        if leaks:
            raise LeakError(leaks)


def _descriptors() -> dict[Hashable, str]:
    found: dict[Hashable, str] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  the names are the descriptors
        with contextlib.suppress(FileNotFoundError):  # the one that was listing them
            target = os.readlink(f"/proc/self/fd/{name}")
            found[int(name), target] = f"descriptor {name} -> {target}"
    return found


def _children() -> dict[Hashable, str]:
    found: dict[Hashable, str] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for pid in map(int, (task / "children").read_text().split()):
                found[pid] = f"child process {pid} ({_command(pid)})"
    return found


def _command(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"
    return command[:200] or "zombie: nobody has waited for it"


def _memfd_mappings() -> dict[Hashable, str]:
    found: dict[Hashable, str] = {}
    maps = Path("/proc/self/maps").read_bytes()
    if b"/memfd:" not in maps:  # a thousand lines with a framework, and this is asked before and after each test
        return found
    for line in maps.decode(errors="replace").splitlines():
        if match := _MEMFD_MAPPING.match(line):
            inode, name = match.groups()
            found[inode] = f"mapping of shared memory {name} (inode {inode})"
    return found


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
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False
