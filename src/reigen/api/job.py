"""Joining and leaving the job, and this process's place in it: the same for every framework."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from reigen import context
from reigen.api.process_sets import (
    ProcessSet,
    as_ranks,
    check_static,
    is_communicator,
    register_again,
    register_static,
    translate_ranks,
)
from reigen.cluster.environ import JobInfo, detect_job, job_from_arguments
from reigen.errors import ArgumentError, CollectiveError, DeadlineError

#: The sets that `init` was given, for the next view of an elastic job.
_static_sets: list[ProcessSet] = []


def init(
    comm: object = None,
    process_sets: object = None,
    *,
    rank: int | None = None,
    size: int | None = None,
    coordinator: str | None = None,
) -> None:
    """Join the job that the environment describes, alone if it describes none. Repeating it does nothing.

    Args:
        comm: None for all ranks. A list of ranks makes a job of these alone, numbered in the order of the list; several
            such jobs may run beside each other. An mpi4py communicator stands for the list of its processes.
        process_sets: a list of ``ProcessSet`` to register, the same on every rank; ``"dynamic"`` allows
            ``add_process_set`` later, as HOROVOD_DYNAMIC_PROCESS_SETS=1 does.
        rank: this process's number; with ``size`` and ``coordinator``, for programs that start their ranks themselves,
            in place of what the environment says.
        size: how many ranks there are.
        coordinator: ``host:port`` where rank 0 can listen. Ranks of several hosts need a secret, too: REIGEN_SECRET or
            REIGEN_SECRET_FILE.

    Raises:
        ArgumentError: an argument makes no sense, this rank is not in ``comm``, or a process set is there twice.
        MismatchError: the ranks gave different process sets.
        DeadlineError: not every rank came in time.
    """
    static = check_static(process_sets)
    if context.is_initialized():
        if any(each.process_set_id is None for each in static):
            raise ArgumentError("init() was called before; use add_process_set() to add process sets to a running job")
        return
    arguments = {"dynamic_process_sets": True} if process_sets == "dynamic" else None
    place = _job_from_arguments(rank, size, coordinator)
    joined = context.init(arguments=arguments, ranks=_resolve_ranks(comm, place), job=place)
    _static_sets[:] = static
    try:
        _register(joined, {})
    except BaseException:
        context.shutdown()
        raise


def change_view() -> None:
    """In an elastic job: wait for its next view; ranks, size and process sets are those of that view then.

    Raises:
        NotInitializedError: this process is in no elastic job.
        ReigenError: there is no next view; says why.
    """
    renumbered, joined = context.change_view()
    _register(joined, renumbered)


def _register(joined: context.Context, renumbered: Mapping[int, int]) -> None:
    """Register process sets; in an elastic job in the view behind this one, if a member dies or does not come."""
    elastic = context.elastic_job()
    if context.is_candidate():
        return
    if elastic is None:
        register_static(joined, _static_sets)
        return
    while True:
        try:
            if elastic.epoch == 1:
                register_static(joined, _static_sets)
            else:
                register_again(joined, _static_sets, renumbered)
            elastic.keep_view()
            return
        except CollectiveError as error:
            if joined.is_operational and not isinstance(error, DeadlineError):
                raise  # a wrong program; a member that does not come is left out of the next view
        renumbered, joined = context.change_view()


def _job_from_arguments(rank: int | None, size: int | None, coordinator: str | None) -> JobInfo | None:
    """The job that arguments of ``init`` describe; None if there are none."""
    if rank is None and size is None and coordinator is None:
        return None
    if rank is None or size is None or coordinator is None:
        raise ArgumentError("init() needs rank, size and coordinator together, or none of them")
    return job_from_arguments(rank, size, coordinator)


def _resolve_ranks(comm: Any, job: JobInfo | None) -> list[int] | None:
    """The ranks that ``comm`` stands for; None for all."""
    if comm is None:
        return None
    if is_communicator(comm):
        place = job or detect_job(os.environ)
        if comm.Get_size() == 1 and place.size > 1:
            raise ArgumentError(
                f"the communicator holds this process alone, in a job of {place.size}: MPI knows nothing of a job that "
                f"mpirun has not started. Use comm=[{place.rank}] if a job of this rank alone is meant"
            )
        return translate_ranks(comm, place.rank)
    if isinstance(comm, Iterable):
        comm = list(comm)
        if any(map(is_communicator, comm)):
            raise ArgumentError("comm must be one communicator; give others as process_sets=[ProcessSet(communicator)]")
    return as_ranks(comm) or None


def shutdown() -> None:
    """Leave the job. ``init()`` may be called again afterwards."""
    context.shutdown()


def is_initialized() -> bool:
    """Return whether this process is in a job."""
    return context.is_initialized()


def rank() -> int:
    """Return this process's number in the job. Raises NotInitializedError before ``init()``, as all below do."""
    return context.current().shown_place.rank


def size() -> int:
    """Number of processes in the job."""
    return context.current().shown_place.size


def local_rank() -> int:
    """Return this process's number on its host."""
    return context.current().shown_place.local_rank


def local_size() -> int:
    """Number of the job's processes on this host."""
    return context.current().shown_place.local_size


def cross_rank() -> int:
    """Return this host's number among the hosts that have this local rank."""
    return context.current().shown_place.cross_rank


def cross_size() -> int:
    """Number of hosts that have this local rank."""
    return context.current().shown_place.cross_size


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    return len({len(ranks) for ranks in context.current().hosts}) == 1


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record a timeline of the collectives of all ranks, into one file of rank 0's host (docs/timeline.md).

    Rank 0 decides, and tells the others; other ranks may call it too, which does nothing. HOROVOD_TIMELINE need not be
    set. A file that exists is replaced. A second call with the same file does nothing.

    Args:
        file_path: a Chrome trace, for Perfetto, chrome://tracing and ``reigen trace``; valid JSON while it grows.
        mark_cycles: mark every round of negotiation.

    Raises:
        NotInitializedError: ``init()`` has not been called.
        ArgumentError: on rank 0: another file is being recorded already, or the file cannot be written.
    """
    context.current().timeline.start(str(file_path), mark_cycles)


def stop_timeline() -> None:
    """Complete the timeline that was started last; without one, do nothing. On rank 0; elsewhere it does nothing.

    ``shutdown()``, and the end of the script, do it too.

    Raises:
        NotInitializedError: ``init()`` has not been called.
    """
    context.current().timeline.stop()
