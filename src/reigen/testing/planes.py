"""The conformance suite of data planes: every plane passes the same one.

Each rank runs the same list of cases on one plane. Any rank can compute the input of any other from a seed, so each
compares what it got with an independent truth (:mod:`reigen.testing.truth`), bit by bit where the plane declares sums
in rank order; and all ranks' results are compared with each other by hash in any case.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from reigen.cluster.environ import detect
from reigen.cluster.rendezvous import Rendezvous, RendezvousClient, Room
from reigen.errors import CollectiveError, DeadlineError
from reigen.planes.base import DataPlane
from reigen.testing.plane_cases import PATIENCE_SECONDS, Conformance, Memory, soon
from reigen.testing.pool import RankPool
from reigen.testing.threads import run_threads

#: Makes one rank's plane: ``make(rank, size, rendezvous)``. On leaving, everything that it holds has been released.
MakePlane = Callable[[int, int, Rendezvous], AbstractContextManager[DataPlane]]


def check_plane(
    make: MakePlane, size: int, *, pool: RankPool | None = None, trimmed: bool = False, timeout: float = 120.0
) -> None:
    """Runs the suite with ``size`` ranks.

    Args:
        make: makes a rank's plane. With a pool, a module-level function.
        size: how many ranks; at least 1.
        pool: where the ranks run. By default they are threads of this process, over an in-memory rendezvous.
        trimmed: leave out what other numbers of ranks have shown as well: for large ``size``.
        timeout: seconds for all of it.

    Raises:
        RankError: a case failed; the tracebacks name it.
        AssertionError: ranks got different results.
    """
    if size > 1:
        _run(_meet_nobody, make, size, pool, timeout)
        _run(_give_up, make, size, pool, timeout)
    digests = _run(_conform, make, size, pool, timeout, trimmed, Memory())
    for rank, digest in enumerate(digests):
        different = [name for name, value in digest.items() if value != digests[0][name]]
        assert not different, f"rank {rank} and rank 0 got different results: {', '.join(different)}"


def check_rank(
    make: MakePlane, rank: int, size: int, rendezvous: Rendezvous, *, trimmed: bool = False
) -> dict[str, str]:
    """One rank's part of the suite, for ranks that something else has started, `mpirun` for example.

    Args:
        make: makes this rank's plane.
        rank: this rank.
        size: how many ranks; all of them call this.
        rendezvous: where they meet.
        trimmed: as for `check_plane`.

    Returns:
        Hashes of results that must be the same on all ranks, by case: for the caller to compare.

    Raises:
        AssertionError: a case failed.
        CollectiveError: it failed on another rank.
    """
    if size > 1:
        for body in (_meet_nobody, _give_up):
            body(make, rank, size, Room(rendezvous, body.__name__))
    return _conform(make, rank, size, rendezvous, trimmed, Memory())


def _run(
    body: Callable[..., Any], make: MakePlane, size: int, pool: RankPool | None, timeout: float, *args: object
) -> list[Any]:
    if pool is not None:
        return pool.run(_in_process, body, make, *args, timeout=timeout)
    return run_threads(lambda rank, meeting: body(make, rank, size, meeting, *args), size, timeout=timeout)


def _in_process(body: Callable[..., Any], make: MakePlane, *args: object) -> object:
    job = detect(os.environ)
    assert job.rendezvous is not None
    assert job.secret is not None
    client = RendezvousClient(job.rendezvous, job.secret, job.rank, PATIENCE_SECONDS)
    try:
        return body(make, job.rank, job.size, client, *args)
    finally:
        client.close()


# ---------------------------------------------------------------------------------------------- planes that break


def _meet_nobody(make: MakePlane, rank: int, size: int, rendezvous: Rendezvous) -> None:
    """The last rank does not come: the others are told so at their deadline."""
    with make(rank, size, rendezvous) as plane, _leaving_together(rendezvous, rank, size):
        if rank != size - 1:
            error = _failure_of_barrier(plane, time.monotonic() + 0.3 + 0.1 * size)  # ranks may be more than cores
            if isinstance(error, DeadlineError):
                assert size - 1 in error.ranks, f"the error names {error.ranks}, not rank {size - 1}"
            else:  # another rank was earlier, and gave up
                assert size > 2, error


def _give_up(make: MakePlane, rank: int, size: int, rendezvous: Rendezvous) -> None:
    """Rank 0 aborts: the others are told why, long before their deadline."""
    with make(rank, size, rendezvous) as plane, _leaving_together(rendezvous, rank, size):
        if plane.capabilities.abortable and rank == 0:
            plane.abort(CollectiveError("enough is enough", ranks=(0,)))
        elif plane.capabilities.abortable:
            error = _failure_of_barrier(plane, soon())
            assert "enough is enough" in str(error)


def _failure_of_barrier(plane: DataPlane, deadline: float) -> CollectiveError:
    try:
        plane.barrier(deadline)
    except CollectiveError as error:
        return error
    raise AssertionError("barrier() returned although a rank had not called it")


@contextmanager
def _leaving_together(rendezvous: Rendezvous, rank: int, size: int) -> Iterator[None]:
    """Keeps every plane open until all ranks have seen what they should see; a rank that fails keeps nobody waiting."""
    try:
        yield
    finally:
        rendezvous.put(f"done/{rank}", b"")
    for other in range(size):
        rendezvous.get(f"done/{other}", PATIENCE_SECONDS)


# ---------------------------------------------------------------------------------------------- planes that work


def _conform(
    make: MakePlane, rank: int, size: int, rendezvous: Rendezvous, trimmed: bool, memory: Memory
) -> dict[str, str]:
    with make(rank, size, rendezvous) as plane, _leaving_together(rendezvous, rank, size):
        assert (plane.rank, plane.size) == (rank, size)
        conformance = Conformance(plane, trimmed, memory)
        for name, case in conformance.cases():
            try:
                case()
            except Exception as error:
                plane.abort(CollectiveError(f"rank {rank} failed in the case {name!r}", ranks=(rank,)))
                error.add_note(f"data plane {plane.name!r}, rank {rank} of {size}, case: {name}")
                raise
        return conformance.digests
