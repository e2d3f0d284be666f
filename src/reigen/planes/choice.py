"""Which data plane a job uses. One pure decision, with its reason."""

from __future__ import annotations

from reigen.cluster.topology import Topology
from reigen.errors import ConfigError

PLANES = ("null", "shm")


def choose(topology: Topology, requested: str | None = None) -> tuple[str, str]:
    """``(plane, reason)`` for a job.

    Args:
        topology: the ranks and how many of them are on this host.
        requested: REIGEN_PLANE, or None.

    Raises:
        ConfigError: the requested plane does not exist or cannot serve this job, or no plane can.
    """
    if requested is not None and requested not in PLANES:
        raise ConfigError(f"REIGEN_PLANE={requested}: there is no such plane; there are {', '.join(PLANES)}")
    if topology.size == 1:
        return "null", "the job has one rank: nothing has to travel"
    if requested == "null":
        raise ConfigError(f"REIGEN_PLANE=null serves jobs of one rank, this one has {topology.size}")
    if topology.local_size != topology.size:
        raise ConfigError(
            f"{topology.size} ranks, {topology.local_size} of them on this host: so far all ranks must run on one host"
        )
    return "shm", f"all {topology.size} ranks run on this host: shared memory is the shortest way between them"
