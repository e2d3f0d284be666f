"""Topology of a job: a process's numbers in its job, on its host and across hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reigen.errors import ArgumentError, ConfigError


@dataclass(frozen=True, slots=True)
class Topology:
    """Numbers of a rank in the job, on its host, and across hosts.

    Attributes:
        rank: number of the process in the job, from 0.
        size: processes in the job.
        local_rank: number of the process among those of its host.
        local_size: processes on its host.
        cross_rank: number of its host among the hosts that have this local rank.
        cross_size: number of hosts that have this local rank.

    Raises:
        ConfigError: the numbers contradict each other; the message lists every contradiction.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def __post_init__(self) -> None:
        problems = []
        pairs = (("rank", self.rank, self.size), ("local_rank", self.local_rank, self.local_size))
        for name, index, count in (*pairs, ("cross_rank", self.cross_rank, self.cross_size)):
            if count < 1:
                problems.append(f"{name.replace('rank', 'size')} is {count}, but must be at least 1")
            elif not 0 <= index < count:
                problems.append(f"{name} is {index}, but must be from 0 to {count - 1}")
        for name, count in (("local_size", self.local_size), ("cross_size", self.cross_size)):
            if count > max(self.size, 1):
                problems.append(f"{name} is {count}, but the whole job has {self.size}")
        if problems:
            raise ConfigError("the place of this process in its job makes no sense: " + "; ".join(problems))

    @classmethod
    def alone(cls) -> Topology:
        """Return the topology of the only process of its job."""
        return cls(0, 1, 0, 1, 0, 1)

    @classmethod
    def on_one_host(cls, rank: int, size: int) -> Topology:
        """Return that of rank ``rank`` of ``size`` that all run on one host."""
        return cls(rank, size, rank, size, 0, 1)


def renumber_rank(rank: int, size: int, ranks: Sequence[int]) -> int:
    """Return the rank of a process in a job of some ``ranks`` of its job, which are numbered anew in that order.

    Raises:
        ArgumentError: ``ranks`` are repeated, or none of the job, or this rank is not one of them.
    """
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= min(ranks) <= max(ranks) < size:
        raise ArgumentError(f"comm must hold different ranks from 0 to {size - 1}, at least one; got {list(ranks)}")
    if rank not in ranks:
        raise ArgumentError(
            f"comm={list(ranks)} does not hold this process, rank {rank}: it is not part of that job; call init() with "
            "a list that holds it, or not at all"
        )
    return list(ranks).index(rank)
