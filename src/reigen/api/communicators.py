"""Ranks as users name them: a list of numbers, or an mpi4py communicator. Nothing here imports mpi4py."""

from __future__ import annotations

import operator
from typing import Any, Protocol, TypeGuard

from reigen.errors import ArgumentError


class MpiCommunicator(Protocol):
    """Methods that are used of an mpi4py communicator."""

    def Get_size(self) -> int:  # noqa: N802 - mpi4py's name
        """Return the number of its processes."""

    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of all processes, in the communicator's order."""


def translate_ranks(comm: MpiCommunicator, rank: int) -> list[int]:
    """The global ranks of a communicator's processes, in its order. Collective over the communicator.

    Args:
        comm: an mpi4py communicator.
        rank: the global rank of this process.
    """
    return [int(each) for each in comm.allgather(rank)]


def is_communicator(value: object) -> TypeGuard[MpiCommunicator]:
    """Return whether it looks like an mpi4py communicator."""
    return hasattr(value, "Get_size") and hasattr(value, "allgather")


def as_ranks(ranks: object) -> list[int]:
    """A list of ranks, as the user gave it.

    Raises:
        ArgumentError: it holds something else than integers, or one twice.
    """
    try:
        found = [operator.index(rank) for rank in ranks]  # type: ignore[attr-defined]
    except TypeError:
        raise ArgumentError(f"a list of ranks is needed, got {ranks!r}") from None
    if len(set(found)) < len(found):
        raise ArgumentError(f"a rank is there twice: {found}")
    return found
