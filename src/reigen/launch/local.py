"""A job on this host, planned: which environment and which cores each rank gets. Decides, starts nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import pairwise
from pathlib import Path

from reigen.cluster.environ import PLACE_VARIABLES, RENDEZVOUS_VARIABLE, SECRET_VARIABLE
from reigen.cluster.topology import Topology
from reigen.errors import ConfigError

#: What `--bind` takes.
BINDINGS = ("cores", "none")
#: Set to 1 where what a rank prints ends on a terminal, though the rank itself writes into a pipe: rank 0 may redraw
#: its line with a carriage return.
TERMINAL_VARIABLE = "REIGEN_TERMINAL"
START_TIMEOUT_VARIABLE = "REIGEN_START_TIMEOUT"


@dataclass(frozen=True, slots=True)
class Place:
    """One rank, before it is started.

    Attributes:
        topology: its place in the job.
        cpus: the logical processors it is bound to; empty: not bound.
        environ: its whole environment. Not shown in ``repr``: the job's secret is in it.
    """

    topology: Topology
    cpus: tuple[int, ...]
    environ: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Services:
    """What the launcher keeps for the ranks.

    Attributes:
        rendezvous: ``host:port`` of the rendezvous service.
        secret: the job's 32 bytes.
        master_port: a port that is held for rank 0's own server.
        master_address: where that is: rank 0's host.
    """

    rendezvous: str
    secret: bytes = field(repr=False)
    master_port: int
    master_address: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Cores:
    """The processors that the launcher may use.

    Attributes:
        cpus: numbers of the logical processors, those of one physical core side by side.
        quota: how many processors' time the control group allows, None where it sets no limit.
    """

    cpus: tuple[int, ...]
    quota: float | None = None

    @property
    def num_usable(self) -> int:
        """How many processors can be busy at a time."""
        return len(self.cpus) if self.quota is None else max(1, min(len(self.cpus), int(self.quota)))


def all_here(num_ranks: int) -> list[Topology]:
    """Where the ranks are when all of them are on this host."""
    return [Topology.on_one_host(rank, num_ranks) for rank in range(num_ranks)]


def plan(
    topologies: Sequence[Topology],
    services: Services,
    environ: Mapping[str, str],
    cores: Cores,
    *,
    bind: str | None = None,
    start_timeout_seconds: float | None = None,
) -> tuple[list[Place], str]:
    """Places of the ranks on this host, and why their processors were chosen so.

    Args:
        topologies: the ranks that this host has, at least one.
        services: what they are told of the launcher.
        environ: what they inherit.
        cores: the processors there are.
        bind: ``cores``, ``none``, or None to bind where there is at least one processor for each rank.
        start_timeout_seconds: how long ``init()`` waits for all ranks, None for its default.

    Raises:
        ConfigError: no such binding.
    """
    shares, reason = share_cores(len(topologies), cores.cpus, bind)
    common = dict(environ)
    # Block buffering would hold back what a rank prints until it ends; a terminal would not, and a pipe should not.
    common.setdefault("PYTHONUNBUFFERED", "1")
    common.setdefault("OMP_NUM_THREADS", str(max(1, cores.num_usable // len(topologies))))
    if start_timeout_seconds is not None:
        common[START_TIMEOUT_VARIABLE] = f"{start_timeout_seconds:g}"
    places = []
    for topology, cpus in zip(topologies, shares, strict=True):
        places.append(Place(topology, cpus, {**common, **_variables(topology, services)}))
    return places, reason


def describe(places: Sequence[Place], reason: str) -> list[str]:
    """Where the ranks were placed, for the user, a line each."""
    lines = [reason]
    for place in places:
        where = "any processor" if not place.cpus else "processors " + ",".join(map(str, place.cpus))
        lines.append(f"{where}, OMP_NUM_THREADS={place.environ['OMP_NUM_THREADS']}")
    return lines


def share_cores(num_ranks: int, cpus: Sequence[int], bind: str | None) -> tuple[list[tuple[int, ...]], str]:
    """The processors of each rank (an empty tuple: not bound), and why.

    Neighbouring processors go to one rank, and shares differ by one at most. With more ranks than processors, and only
    if ``bind`` asks for it, rank r gets processor r modulo their number.
    """
    if bind is not None and bind not in BINDINGS:
        raise ConfigError(f"--bind {bind}: there is no such binding; there are {' and '.join(BINDINGS)}")
    unbound: list[tuple[int, ...]] = [()] * num_ranks
    if bind == "none":
        return unbound, "not bound: --bind none"
    if num_ranks <= len(cpus):
        bounds = [rank * len(cpus) // num_ranks for rank in range(num_ranks + 1)]
        shares = [tuple(cpus[low:high]) for low, high in pairwise(bounds)]
        return shares, f"{len(cpus)} processors are spread over {num_ranks} ranks"
    if bind is None:
        return unbound, f"not bound: {num_ranks} ranks on {len(cpus)} processors are better placed by the kernel"
    return [(cpus[rank % len(cpus)],) for rank in range(num_ranks)], "ranks share processors in turn: --bind cores"


def _variables(topology: Topology, services: Services) -> dict[str, str]:
    texts = [str(number) for number in astuple(topology)]
    variables = dict(zip(PLACE_VARIABLES, texts, strict=True))
    variables |= {name.replace("REIGEN_", "HOROVOD_"): variables[name] for name in PLACE_VARIABLES}
    variables |= dict(zip(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), texts, strict=False))
    variables |= {"MASTER_ADDR": services.master_address, "MASTER_PORT": str(services.master_port)}
    return variables | {RENDEZVOUS_VARIABLE: services.rendezvous, SECRET_VARIABLE: services.secret.hex()}


def cores_here(root: Path = Path("/sys")) -> Cores:
    """The processors that this process may use, those of one physical core side by side."""

    def order(cpu: int) -> tuple[int, int, int]:
        topology = root / f"devices/system/cpu/cpu{cpu}/topology"
        return _read_int(topology / "physical_package_id"), _read_int(topology / "core_id"), cpu

    return Cores(tuple(sorted(os.sched_getaffinity(0), key=order)), _quota(root / "fs/cgroup/cpu.max"))


def _read_int(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _quota(path: Path) -> float | None:
    try:
        limit, period = path.read_text().split()
        return int(limit) / int(period)
    except (OSError, ValueError):  # no limit is spelled "max", and older control groups keep it elsewhere
        return None
