"""Ranks of Reigen's job, as Lightning asks for them."""

from __future__ import annotations

from typing import Any

from reigen.api import job

#: Lightning's ``ClusterEnvironment``, of one of its packages.
_ClusterEnvironment: Any = object


class JobEnvironment(_ClusterEnvironment):
    """Place of this process in the job. Ranks that Lightning would set are ignored."""

    @property
    def creates_processes_externally(self) -> bool:
        """Lightning starts no processes."""
        return True

    @property
    def main_address(self) -> str:
        """Address for a process group of torch's, which is not used."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Port for a process group of torch's, which is not used."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return whether there is a job."""
        return job.is_initialized()

    def world_size(self) -> int:
        """Return the number of ranks."""
        return job.size()

    def set_world_size(self, size: int) -> None:
        """Lightning's count of devices says nothing about the job."""

    def global_rank(self) -> int:
        """Return this process's rank."""
        return job.rank()

    def set_global_rank(self, rank: int) -> None:
        """Lightning's count of devices says nothing about the job."""

    def local_rank(self) -> int:
        """Return this process's number among those of its host."""
        return job.local_rank()

    def node_rank(self) -> int:
        """Return the number of this process's host."""
        return job.cross_rank()
