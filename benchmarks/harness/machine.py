"""Where a benchmark ran: figures mean nothing without it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True):
    """The host.

    Attributes:
        cpu: model of the processor.
        num_cores: logical processors that this process may use.
        memory_bytes: of the host.
        system: kernel and architecture.
        load: processes that wanted to run, averaged over the last minute, before the benchmark began.
    """

    cpu: str
    num_cores: int
    memory_bytes: int
    system: str
    load: float

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / (1 << 30):.0f} GiB"
        return f"{self.cpu}, {self.num_cores} cores, {memory}, {self.system}; load before: {self.load:.2f}"


def this_machine() -> Machine:
    """The host that this process runs on."""
    return Machine(
        cpu=cpu_model(Path("/proc/cpuinfo")),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        load=os.getloadavg()[0],
    )


def cpu_model(cpuinfo: Path) -> str:
    """The processor's name as the kernel tells it; aarch64 kernels tell only numbers."""
    facts: dict[str, str] = {}
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    if "model name" in facts:
        return facts["model name"]
    if "CPU part" in facts:
        return f"implementer {facts.get('CPU implementer', '?')}, part {facts['CPU part']}"
    return platform.machine()
