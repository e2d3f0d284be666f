"""Joining and leaving the job, and this process's place in it: the same for every framework."""

from __future__ import annotations

from reigen import context
from reigen.errors import ArgumentError


def init(comm: object = None, process_sets: object = None) -> None:
    """Join the job that the environment describes, alone if it describes none. Repeating it does nothing.

    Args:
        comm: None; a communicator or a list of ranks is not supported.
        process_sets: None; process sets are not supported.

    Raises:
        ArgumentError: an argument is not None.
        DeadlineError: not every rank came in time.
    """
    if comm is not None or process_sets is not None:
        raise ArgumentError("init() takes part with all ranks: comm and process_sets must be None")
    context.init()


def shutdown() -> None:
    """Leave the job. ``init()`` may be called again afterwards."""
    context.shutdown()


def is_initialized() -> bool:
    """Whether this process is in a job."""
    return context.is_initialized()


def rank() -> int:
    """This process's number in the job. Raises NotInitializedError before ``init()``, as all below do."""
    return context.current().rank


def size() -> int:
    """Number of processes in the job."""
    return context.current().size


def local_rank() -> int:
    """This process's number on its host."""
    return context.current().local_rank


def local_size() -> int:
    """Number of the job's processes on this host."""
    return context.current().local_size


def cross_rank() -> int:
    """This host's number among the hosts that have this local rank."""
    return context.current().cross_rank


def cross_size() -> int:
    """Number of hosts that have this local rank."""
    return context.current().cross_size
