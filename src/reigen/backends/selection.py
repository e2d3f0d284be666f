"""Selection of a job's backends. One pure decision, with its reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reigen.errors import ConfigError

#: Values of REIGEN_PLANE. The networks come last.
BACKENDS = ("null", "shm", "tcp", "mpi")
NETWORKS = BACKENDS[2:]


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Backends of a job.

    Attributes:
        shares_memory: the ranks of a host share its memory.
        network: between the hosts, or between all ranks if memory is not shared; None: there is one host.
        reason: why.
    """

    shares_memory: bool
    network: str | None
    reason: str

    @property
    def name(self) -> str:
        """Name: ``null``, ``shm``, ``tcp``, ``shm+tcp`` ..."""
        parts = (["shm"] if self.shares_memory else []) + ([self.network] if self.network else [])
        return "+".join(parts) or "null"


def choose_backends(
    ranks_by_host: Sequence[int], requested: str | None = None, no_mpi: str | None = "not asked"
) -> BackendChoice:
    """Choose the backends of a job with so many ranks on each host.

    ``requested`` is REIGEN_PLANE, or None; ``no_mpi`` the reason why MPI cannot carry data, None if it can.

    Raises:
        ConfigError: the requested backend does not exist or cannot serve this job.
    """
    size = sum(ranks_by_host)
    if requested is not None and requested not in BACKENDS:
        raise ConfigError(f"REIGEN_PLANE={requested}: there is no such backend; there are {', '.join(BACKENDS)}")
    if size == 1:
        return BackendChoice(False, None, "the job has one rank: nothing has to travel")
    if requested == "null":
        raise ConfigError(f"REIGEN_PLANE=null serves jobs of one rank, this one has {size}")
    if requested == "mpi" and no_mpi is not None:
        raise ConfigError(f"REIGEN_PLANE=mpi: MPI cannot carry data: {no_mpi}")
    if len(ranks_by_host) == 1:
        if requested in NETWORKS:
            return BackendChoice(
                False, requested, f"REIGEN_PLANE={requested}: even between the {size} ranks of one host"
            )
        return BackendChoice(
            True, None, f"all {size} ranks run on this host: shared memory is the shortest way between them"
        )
    if requested == "shm":
        raise ConfigError(
            f"REIGEN_PLANE=shm serves jobs on one host, this one has {size} ranks on {len(ranks_by_host)}"
        )
    network, why = ("mpi", "MPI started the job") if no_mpi is None else ("tcp", f"MPI does not carry it: {no_mpi}")
    if requested is not None:
        network, why = requested, f"REIGEN_PLANE={requested}"
    shares_memory = max(ranks_by_host) > 1
    within = "shared memory within each, " if shares_memory else ""
    reason = f"{size} ranks on {len(ranks_by_host)} hosts: {within}{network} between them ({why})"
    return BackendChoice(shares_memory, network, reason)
