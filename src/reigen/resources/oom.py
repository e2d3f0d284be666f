"""Kills by the kernel's OOM killer, from its counters. Linux only; loads no NumPy."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from reigen.resources.memory import cgroup_directories, describe_memory_limit

_PROC = Path("/proc")
#: Files with a control group's counter, in version 2 (with the groups below it) and in version 1.
_EVENTS = ("memory.events", "memory.oom_control")
#: Seconds between samples of the counters, and the age of one that still shows the state shortly before an end.
_SAMPLE_SECONDS = 1.0
_RECENT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class OomKillCounts:
    """Numbers of processes that the OOM killer has ended: in this control group and on the host; None: unknown."""

    cgroup: int | None
    host: int | None


def count_oom_kills(proc: Path = _PROC) -> OomKillCounts:
    """Count the processes that the OOM killer has ended until now."""
    files = (directory / name for directory in cgroup_directories(proc / "self") for name in _EVENTS)
    in_cgroup = next((count for file in files if (count := _read_kill_count(file)) is not None), None)
    return OomKillCounts(in_cgroup, _read_kill_count(proc / "vmstat"))


def explain_oom_kill(
    before: OomKillCounts, now: OomKillCounts, limit: str, *, lately: OomKillCounts | None = None
) -> str:
    """Explain the end of a process by the counters before and after it; empty: the OOM killer has not done it.

    The host's counter, which knows of every container, is asked only where there is none of this control group.

    Args:
        before: the counters before it ended.
        now: and after that.
        limit: see `memory.describe_memory_limit`.
        lately: the counters shortly before it ended, of one that SIGKILL has ended; None: when and how is unknown.
    """
    more = f" ({limit})" if limit else ""
    if before.cgroup is not None and now.cgroup is not None:
        if now.cgroup <= before.cgroup:
            return ""
        if lately is not None and lately.cgroup is not None and now.cgroup > lately.cgroup:
            return f"the kernel's OOM killer did that: out of memory{more}"
        return f"the kernel's OOM killer has ended a process of this control group meanwhile{more}, perhaps this one"
    if before.host is not None and now.host is not None and now.host > before.host:
        return f"the kernel's OOM killer has ended a process of this host meanwhile{more}, perhaps this one"
    return ""


class OomMonitor:
    """Explains the ends of processes of this control group, one after the other: no kill explains two of them.

    The counters do not show which processes they have counted, nor when. So they are looked at regularly, by `sample`,
    and only kills that they count shortly before a process ends are taken for its cause.
    """

    def __init__(
        self, count: Callable[[], OomKillCounts] = count_oom_kills, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count, self._clock = count, clock
        #: The counters as they would be if there had been none but the kills that have explained an end.
        self._explained = count()
        #: The last two samples, (time, counts), the older one first: kills before the newer one may be the cause of an
        #: end that is noticed after it. Kills that have explained an end are in them, too.
        self._samples = [(clock(), self._explained)] * 2

    def sample(self) -> float:
        """Look at the counters if that is due; return the seconds until it is due again."""
        now = self._clock()
        if now - self._samples[1][0] >= _SAMPLE_SECONDS:
            self._samples = [self._samples[1], (now, self._count())]
        return self._samples[1][0] + _SAMPLE_SECONDS - now

    def explain(self) -> str:
        """Explain a process's end by SIGKILL just now; empty: unknown."""
        now, since = self._count(), self._clock() - _RECENT_SECONDS
        lately = next((counts for at, counts in self._samples if at >= since), now)
        text = explain_oom_kill(self._explained, now, describe_memory_limit(), lately=lately)
        if text:
            self._explained = _add_kill(self._explained, now)
            self._samples = [(at, _add_kill(counts, now)) for at, counts in self._samples]
        return text

    def probable_cause(self) -> str:
        """Explain the end of a process of which it is not known how it ended."""
        return explain_oom_kill(self._explained, self._count(), describe_memory_limit())


def _add_kill(counts: OomKillCounts, most: OomKillCounts) -> OomKillCounts:
    """Add one kill to each counter, up to the numbers in ``most``."""

    def more(count: int | None, limit: int | None) -> int | None:
        return count if count is None or limit is None else min(count + 1, limit)

    return OomKillCounts(more(counts.cgroup, most.cgroup), more(counts.host, most.host))


def _read_kill_count(path: Path) -> int | None:
    """Return the number behind ``oom_kill``."""
    with suppress(OSError, ValueError, StopIteration):
        return int(next(x for x in path.read_text().splitlines() if x.startswith("oom_kill ")).split()[1])
    return None
