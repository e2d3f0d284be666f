"""Which way data takes in a job. One pure decision, with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reigen.errors import ConfigError

#: What REIGEN_PLANE may say. The networks come last.
BACKENDS = ("null", "shm", "tcp", "mpi")
NETWORKS = BACKENDS[2:]


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Which backends a job uses.

    Attributes:
        shares_memory: the ranks of a host share its memory.
        network: what carries data between the hosts, or between all ranks if memory is not shared; None: nothing has
            to.
        reason: why.
    """

    shares_memory: bool
    network: str | None
    reason: str

    @property
    def name(self) -> str:
        """``null``, ``shm``, ``tcp``, ``shm+tcp`` ..."""
        parts = (["shm"] if self.shares_memory else []) + ([self.network] if self.network else [])
        return "+".join(parts) or "null"


def choose_backends(
    machines: Sequence[int], requested: str | None = None, no_mpi: str | None = "not asked"
) -> BackendChoice:
    """The backends of a job.

    Args:
        machines: how many ranks each host has.
        requested: REIGEN_PLANE, or None.
        no_mpi: why MPI cannot carry data; None: it can.

    Raises:
        ConfigError: the requested backend does not exist or cannot serve this job.
    """
    size = sum(machines)
    if requested is not None and requested not in BACKENDS:
        raise ConfigError(f"REIGEN_PLANE={requested}: there is no such backend; there are {', '.join(BACKENDS)}")
    if size == 1:
        return BackendChoice(False, None, "the job has one rank: nothing has to travel")
    if requested == "null":
        raise ConfigError(f"REIGEN_PLANE=null serves jobs of one rank, this one has {size}")
    if requested == "mpi" and no_mpi is not None:
        raise ConfigError(f"REIGEN_PLANE=mpi: MPI cannot carry data: {no_mpi}")
    if len(machines) == 1:
        if requested in NETWORKS:
            return BackendChoice(
                False, requested, f"REIGEN_PLANE={requested}: even between the {size} ranks of one host"
            )
        return BackendChoice(
            True, None, f"all {size} ranks run on this host: shared memory is the shortest way between them"
        )
    if requested == "shm":
        raise ConfigError(f"REIGEN_PLANE=shm serves jobs on one host, this one has {size} ranks on {len(machines)}")
    network, why = ("mpi", "MPI started the job") if no_mpi is None else ("tcp", f"MPI does not carry it: {no_mpi}")
    if requested is not None:
        network, why = requested, f"REIGEN_PLANE={requested}"
    shares_memory = max(machines) > 1
    within = "shared memory within each, " if shares_memory else ""
    reason = f"{size} ranks on {len(machines)} hosts: {within}{network} between them ({why})"
    return BackendChoice(shares_memory, network, reason)
