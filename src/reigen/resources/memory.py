"""Available memory of this process: of its host, and of its control groups. Linux only; loads no NumPy.

A process in a control group has the limits of that group and of all groups above it; the least remainder counts. The
kernel shows their places: ``/proc/self/cgroup`` names the group in each hierarchy, ``/proc/self/mountinfo`` where that
hierarchy, or a part of it, is mounted. In a container with a namespace of its own the group is ``/`` and the mount
begins there; the groups above it cannot be seen from inside.

File cache is not counted as used, nor is it on the host (MemAvailable): the kernel takes it back. Free swap is not
counted as available. ``memory.high`` is not looked at: the kernel slows a process down beyond it, and kills none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

#: Memory that is never taken: others need some, too, and a count of a moment ago may be too large by now.
KEEP_FREE_BYTES = 16 << 20
_PROC = Path("/proc")
_MIB = 1 << 20
#: A limit, its use, and lines of memory.stat of which the kernel takes back as much as it needs; in version 2 and
#: version 1 of the control groups. memsw is memory and swap together: where some is swapped out, the rest may be less.
_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
#: By controller: a group with that controller has one of these.
_PRESENT = {"memory": [used for _, used, _ in _FILES], "cpu": ["cpu.max", "cpu.cfs_quota_us"]}
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Available memory in bytes; None: unknown.

    ``limit`` names the limit, for an error: ``within the limit of ...``; empty: the host has no more.
    """

    num_bytes: int | None
    limit: str = ""

    def allows(self, num_bytes: int) -> bool:
        """Return whether there is room for so much."""
        return self.num_bytes is None or num_bytes <= self.num_bytes


def available_memory(proc: Path = _PROC) -> AvailableMemory:
    """Return the memory that is left on the host, or in a control group of this process, if that is less."""
    found = AvailableMemory(None)
    with suppress(OSError, ValueError, StopIteration):
        line = next(x for x in (proc / "meminfo").read_text().splitlines() if x.startswith("MemAvailable:"))
        found = AvailableMemory(int(line.split()[1]) << 10)
    for directory in cgroup_directories(proc / "self"):
        for limit, used, reclaimable in _FILES:
            with suppress(OSError, ValueError):  # no such file; or no limit, which is spelled "max"
                allowed = int((directory / limit).read_text())
                in_use = int((directory / used).read_text())
                if found.allows(allowed - in_use + 1):  # the kernel takes its time for the rest
                    in_use = max(0, in_use - _sum_of(directory / "memory.stat", reclaimable))
                if found.allows(allowed - in_use + 1):
                    where = f"within {directory / limit} = {allowed / _MIB:.1f} MiB"
                    found = AvailableMemory(max(0, allowed - in_use), where)
    return found


def describe_memory_limit(proc: Path = _PROC) -> str:
    """Describe the lowest limit of this process's control groups; empty: there is none below the host's memory."""
    found: list[tuple[int, str]] = []
    with suppress(OSError, ValueError, IndexError):
        found.append((int((proc / "meminfo").read_text().split()[1]) << 10, ""))
    for directory in cgroup_directories(proc / "self"):
        for limit, _, _ in _FILES:
            with suppress(OSError, ValueError):
                allowed = int((directory / limit).read_text())
                found.append((allowed, f"{directory / limit} = {allowed / _MIB:.1f} MiB"))
    return min(found, default=(0, ""), key=lambda each: each[0])[1]


def cgroup_directories(proc_self: Path = _PROC / "self", controller: str = "memory") -> list[Path]:
    """Return the control groups that limit ``memory`` or ``cpu``: its own, then the visible ones above it."""
    try:
        groups = (proc_self / "cgroup").read_text().splitlines()
        mounts = (proc_self / "mountinfo").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if not controllers or controller in controllers.split(","):
            tops = _mounts(mounts, "" if not controllers else controller)
            seen = [_directories_between(path, root, point) for root, point in tops]
            most: list[Path] = max(seen, key=len, default=[])
            found += most
    # where both versions are mounted, one of them has the limits, and not in every group of version 2
    return [directory for directory in found if any((directory / name).exists() for name in _PRESENT[controller])]


def _mounts(lines: list[str], controller: str) -> Iterator[tuple[str, str]]:
    """Yield (top group, mount point) of each mount of a controller, or of version 2 (empty)."""
    for line in lines:
        before, _, behind = line.partition(" - ")
        kind, _, options = behind.split(" ", 2)
        if (kind == "cgroup" and controller in options.split(",")) if controller else (kind == "cgroup2"):
            root, point = before.split(" ")[3:5]
            yield _unescape_path(root), _unescape_path(point)


def _directories_between(path: str, root: str, point: str) -> list[Path]:
    """List the directories of a group and of those above it, up to the top of a mount; empty: it is not below that."""
    if root.startswith("/.."):  # above this process's namespace, and the names on the way down are unknown
        return [Path(point)]
    try:
        names = PurePosixPath(path).relative_to(root).parts
    except ValueError:
        return []
    if ".." in names:  # outside of its own namespace
        return []
    return [Path(point, *names[:depth]) for depth in range(len(names), -1, -1)]


def _unescape_path(text: str) -> str:
    """Decode a path in mountinfo, where a space is written in octal."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)


def _sum_of(stat: Path, names: tuple[str, ...]) -> int:
    lines = (line.partition(" ") for line in stat.read_text().splitlines())
    return sum(int(number) for name, _, number in lines if name in names)
