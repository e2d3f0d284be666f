"""Whether the kernel's OOM killer has ended a process: its counters tell. Linux only; loads no NumPy."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from reigen.resources.memory import cgroup_directories, describe_memory_limit

_PROC = Path("/proc")
#: Where a control group counts, in version 2 (with the groups below it) and in version 1.
_EVENTS = ("memory.events", "memory.oom_control")
#: How often the counters are looked at, and how old a look may be that tells what was counted shortly before an end.
_SAMPLE_SECONDS = 1.0
_RECENT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class OomKillCounts:
    """How many processes the kernel's OOM killer has ended so far; None where the kernel does not say.

    Attributes:
        cgroup: in the control group of this process.
        host: on the whole machine.
    """

    cgroup: int | None
    host: int | None


def count_oom_kills(proc: Path = _PROC) -> OomKillCounts:
    """How many processes the OOM killer has ended until now.

    Args:
        proc: where ``vmstat`` and ``self`` are.
    """
    files = (directory / name for directory in cgroup_directories(proc / "self") for name in _EVENTS)
    in_cgroup = next((count for file in files if (count := _read_kill_count(file)) is not None), None)
    return OomKillCounts(in_cgroup, _read_kill_count(proc / "vmstat"))


def explain_oom_kill(
    before: OomKillCounts, now: OomKillCounts, limit: str, *, lately: OomKillCounts | None = None
) -> str:
    """What the counters say of a process that has ended in between; empty: the OOM killer has not done it.

    The machine's counter, which knows of every container, is asked only where there is none of this control group.

    Args:
        before: the counters before it ended.
        now: and after that.
        limit: see `memory.least_limit`.
        lately: the counters shortly before it ended, of one that SIGKILL has ended; None: nobody knows when or how.
    """
    more = f" ({limit})" if limit else ""
    if before.cgroup is not None and now.cgroup is not None:
        if now.cgroup <= before.cgroup:
            return ""
        if lately is not None and lately.cgroup is not None and now.cgroup > lately.cgroup:
            return f"the kernel's OOM killer did that: out of memory{more}"
        return f"the kernel's OOM killer has ended a process of this control group meanwhile{more}, perhaps this one"
    if before.host is not None and now.host is not None and now.host > before.host:
        return f"the kernel's OOM killer has ended a process of this machine meanwhile{more}, perhaps this one"
    return ""


class OomMonitor:
    """Explains the ends of processes of this control group, one after the other: no kill explains two of them.

    The counters do not tell whom they have counted, nor when. So they are looked at regularly, by `sample`, and only
    what they count shortly before a process ends is taken for its cause.

    Args:
        count: reads the counters.
        clock: tells the time, in seconds.
    """

    def __init__(
        self, count: Callable[[], OomKillCounts] = count_oom_kills, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count, self._clock = count, clock
        #: The counters as they would be if there had been none but the kills that have explained an end.
        self._explained = count()
        #: The last two looks, (when, what), the older one first: what was counted before the newer one may be the cause
        #: of an end that is heard of after it. What was counted and has explained an end is in them, too.
        self._samples = [(clock(), self._explained)] * 2

    def sample(self) -> float:
        """Look at the counters if that is due; returns in how many seconds it is due again."""
        now = self._clock()
        if now - self._samples[1][0] >= _SAMPLE_SECONDS:
            self._samples = [self._samples[1], (now, self._count())]
        return self._samples[1][0] + _SAMPLE_SECONDS - now

    def explain(self) -> str:
        """Why a process has just ended that SIGKILL has ended; empty: nobody knows."""
        now, since = self._count(), self._clock() - _RECENT_SECONDS
        lately = next((counts for at, counts in self._samples if at >= since), now)
        words = explain_oom_kill(self._explained, now, describe_memory_limit(), lately=lately)
        if words:
            self._explained = _add_kill(self._explained, now)
            self._samples = [(at, _add_kill(counts, now)) for at, counts in self._samples]
        return words

    def suspicion(self) -> str:
        """The same of a process that has ended, but nobody knows how."""
        return explain_oom_kill(self._explained, self._count(), describe_memory_limit())


def _add_kill(counts: OomKillCounts, most: OomKillCounts) -> OomKillCounts:
    """One kill more in each counter, but no more than there were."""

    def more(count: int | None, limit: int | None) -> int | None:
        return count if count is None or limit is None else min(count + 1, limit)

    return OomKillCounts(more(counts.cgroup, most.cgroup), more(counts.host, most.host))


def _read_kill_count(path: Path) -> int | None:
    """The number behind ``oom_kill``."""
    with suppress(OSError, ValueError, StopIteration):
        return int(next(x for x in path.read_text().splitlines() if x.startswith("oom_kill ")).split()[1])
    return None
