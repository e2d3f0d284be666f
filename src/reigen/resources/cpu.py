"""Processors that this process may use, and the time that its threads have had on them. Linux only; loads no NumPy."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from reigen.resources.memory import cgroup_directories

_PROC = Path("/proc")
#: Of the calling thread: nanoseconds on a processor, nanoseconds ready to run without one, number of times on one.
_SCHEDSTAT = "/proc/thread-self/schedstat"


class ProcessorTime(NamedTuple):
    """Processor time until now, in nanoseconds.

    Attributes:
        thread: the calling thread was on a processor.
        delay: it was ready to run, and no processor was free for it (the kernel's run_delay); 0 where that is unknown.
        process: the threads of the process were on processors, all together.
    """

    thread: int = 0
    delay: int = 0
    process: int = 0


def read_processor_time() -> ProcessorTime:
    """Read the processor time of the calling thread and its process; takes about ten microseconds."""
    try:
        fd = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        try:
            on_processor, delay, _ = os.read(fd, 100).split()
        finally:
            os.close(fd)
        return ProcessorTime(int(on_processor), int(delay), time.process_time_ns())
    except (OSError, ValueError):  # a kernel without CONFIG_SCHED_INFO
        return ProcessorTime(time.thread_time_ns(), 0, time.process_time_ns())


class AllowedCpus(NamedTuple):
    """Processors that this process may use.

    Attributes:
        mask: bit n is set for processor n.
        quota: how many of them its control groups let it use at a time; 0: all.
    """

    mask: int
    quota: float = 0.0


def read_allowed_cpus() -> AllowedCpus:
    """Read which processors this process may use."""
    return AllowedCpus(sum(1 << cpu for cpu in os.sched_getaffinity(0)), read_cpu_quota() or 0.0)


def read_cpu_quota(proc: Path = _PROC) -> float | None:
    """Return the least quota of this process's control groups, in processors; None: no limit."""
    found = []
    for group in cgroup_directories(proc / "self", "cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):  # no such file, or no limit: "max", or -1
                limit, period = " ".join((group / name).read_text() for name in names).split()
                if int(limit) > 0:
                    found.append(int(limit) / int(period))
    return min(found, default=None)
