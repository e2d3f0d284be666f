"""Conformance suite of backends: every backend passes the same one.

Each rank runs the same list of cases on one backend. Any rank can compute the input of any other from a seed, so each
compares its result with an independent truth (:mod:`reigen.testing.reference`), bit by bit where the backend declares
sums in rank order; and all ranks' results are compared with each other by hash in any case.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import Any

from reigen.backends.base import Backend, ProgressHook
from reigen.cluster.environ import detect_job
from reigen.cluster.membership.rendezvous import PrefixRendezvous, Rendezvous, RendezvousClient
from reigen.errors import CollectiveError, DeadlineError
from reigen.testing.backend_cases import CASE_TIMEOUT_SECONDS, BackendConformance, CaseCache, case_deadline
from reigen.testing.pool import RankPool
from reigen.testing.threads import run_threads

#: Makes one rank's backend: ``make(rank, size, rendezvous)``. On leaving, all its resources have been released.
MakeBackend = Callable[[int, int, Rendezvous], AbstractContextManager[Backend]]
#: Seconds that ranks have to be called while they wait, ten times a second.
_LISTENING_SECONDS = 10.0


def check_backend(
    make: MakeBackend, size: int, *, pool: RankPool | None = None, trimmed: bool = False, timeout: float = 120.0
) -> None:
    """Run the suite with ``size`` ranks.

    Not covered, so for the backend's own tests: ``phase_ended`` (which parts an operation has, if any, is the backend's
    affair), exceptions of listeners, ranks that die, memory that is not enough, and speed.

    Args:
        make: makes a rank's backend. With a pool, a module-level function.
        size: the number of ranks; at least 1.
        pool: runs the ranks. By default they are threads of this process, over an in-memory rendezvous.
        trimmed: leave out cases that other numbers of ranks have shown as well: for large ``size``.
        timeout: seconds for all of it.

    Raises:
        RankError: a case failed; the tracebacks name it.
        AssertionError: ranks got different results.
    """
    if size > 1:
        for body in _CHECKS_OF_WAITING:
            _run(body, make, size, pool, timeout)
    digests = _run(_check_cases, make, size, pool, timeout, trimmed, CaseCache())
    for rank, digest in enumerate(digests):
        different = [name for name, value in digest.items() if value != digests[0][name]]
        assert not different, f"rank {rank} and rank 0 got different results: {', '.join(different)}"


def check_rank(
    make: MakeBackend, rank: int, size: int, rendezvous: Rendezvous, *, trimmed: bool = False
) -> dict[str, str]:
    """Run one rank's part of the suite, for ranks that another program has started, `mpirun` for example.

    All ``size`` ranks call this, with a rendezvous that they share; the rest is as for `check_backend`.

    Returns:
        Hashes of results that must be the same on all ranks, by case: for the caller to compare.

    Raises:
        AssertionError: a case failed.
        CollectiveError: it failed on another rank.
    """
    if size > 1:
        for body in _CHECKS_OF_WAITING:
            body(make, rank, size, PrefixRendezvous(rendezvous, body.__name__))
    return _check_cases(make, rank, size, rendezvous, trimmed, CaseCache())


def _run(
    body: Callable[..., Any], make: MakeBackend, size: int, pool: RankPool | None, timeout: float, *args: object
) -> list[Any]:
    if pool is not None:
        return pool.run(_in_process, body, make, *args, timeout=timeout)
    return run_threads(lambda rank, rendezvous: body(make, rank, size, rendezvous, *args), size, timeout=timeout)


def _in_process(body: Callable[..., Any], make: MakeBackend, *args: object) -> object:
    job = detect_job(os.environ)
    assert job.rendezvous is not None
    assert job.secret is not None
    with closing(RendezvousClient(job.rendezvous, job.secret, job.rank, CASE_TIMEOUT_SECONDS)) as client:
        return body(make, job.rank, job.size, client, *args)


# ---------------------------------------------------------------------------------------------- waiting


def _check_listeners(make: MakeBackend, rank: int, size: int, rendezvous: Rendezvous) -> None:
    """Check that the listeners of ranks that wait for the last one are called, with the ranks that have not come."""
    last = size - 1
    with make(rank, size, rendezvous) as backend, _synchronized_ranks(rendezvous, rank, size):
        if rank == last:
            _stay_away(rendezvous, last)
            backend.barrier(case_deadline())
        else:
            missing = _missing_ranks(backend, rendezvous)
            assert all(missing), f"ranks_missing was called with no ranks: {missing}"
            named = {each for ranks in missing for each in ranks}
            assert named <= set(range(size)) - {rank}, f"ranks_missing was called with {sorted(named)} on rank {rank}"
        if rank == 0:  # a rank may wait for another one that waits
            names_last = [rendezvous.get(f"called with {last}/{other}", CASE_TIMEOUT_SECONDS) for other in range(last)]
            assert any(names_last), f"ranks_missing was called on no rank with {last}, the one that had not come"


def _stay_away(rendezvous: Rendezvous, last: int) -> None:
    """Return when all other ranks have been called as they should, or time is up."""
    until = time.monotonic() + _LISTENING_SECONDS
    with suppress(TimeoutError):  # those that have not been called complain themselves
        for other in range(last):
            rendezvous.get(f"called/{other}", max(0.0, until - time.monotonic()))


def _missing_ranks(backend: Backend, rendezvous: Rendezvous) -> list[list[int]]:
    """Wait in a barrier until the last rank comes; return all that `Backend.ranks_missing` was called with."""
    missing: list[list[int]] = []
    work: list[bytes] = []
    threads: set[int] = set()
    reading, writing = os.pipe()

    def called() -> None:
        threads.add(threading.get_ident())
        if len(missing) >= 2 and len(work) >= 2:
            rendezvous.put(f"called/{backend.rank}", b"")

    def ranks_missing(ranks: Sequence[int]) -> None:
        missing.append(list(ranks))
        if len(missing) == 2:
            os.write(writing, b"2")
        called()

    def progress() -> None:
        work.append(os.read(reading, 1))
        called()

    try:
        os.set_blocking(reading, False)  # work() of a descriptor that is not readable fails
        os.write(writing, b"1")
        backend.ranks_missing, backend.progress_hook = ranks_missing, ProgressHook(reading, progress)
        backend.barrier(case_deadline())
    finally:
        backend.ranks_missing = backend.progress_hook = None
        os.close(reading)
        os.close(writing)
        last = backend.size - 1
        rendezvous.put(f"called with {last}/{backend.rank}", b"yes" if any(last in ranks for ranks in missing) else b"")
        rendezvous.put(f"called/{backend.rank}", b"")  # whatever has happened
    assert len(missing) >= 2, f"ranks_missing was called {len(missing)} times while a rank did not come"
    assert work == [b"1", b"2"], f"the progress hook's work was done {len(work)} times, not whenever there was some"
    assert threads == {threading.get_ident()}, "ranks_missing or the progress hook was called on another thread"
    return missing


def _check_missing_rank(make: MakeBackend, rank: int, size: int, rendezvous: Rendezvous) -> None:
    """Check that the others get an error at their deadline when the last rank does not come."""
    with make(rank, size, rendezvous) as backend, _synchronized_ranks(rendezvous, rank, size):
        if rank != size - 1:
            error = _failure_of_barrier(backend, time.monotonic() + 0.3 + 0.1 * size)  # ranks may be more than cores
            if isinstance(error, DeadlineError):
                assert size - 1 in error.ranks, f"the error names {error.ranks}, not rank {size - 1}"
            else:  # another rank was earlier, and gave up
                assert size > 2, error


def _check_abort(make: MakeBackend, rank: int, size: int, rendezvous: Rendezvous) -> None:
    """Check that all ranks get the reason when rank 0 aborts, long before their deadline."""
    with make(rank, size, rendezvous) as backend, _synchronized_ranks(rendezvous, rank, size):
        if backend.capabilities.abortable and rank == 0:
            backend.abort(CollectiveError("enough is enough", ranks=(0,)))
        elif backend.capabilities.abortable:
            error = _failure_of_barrier(backend, case_deadline())
            assert "enough is enough" in str(error)


def _failure_of_barrier(backend: Backend, deadline: float) -> CollectiveError:
    try:
        backend.barrier(deadline)
    except CollectiveError as error:
        return error
    raise AssertionError("barrier() returned although a rank had not called it")


@contextmanager
def _synchronized_ranks(rendezvous: Rendezvous, rank: int, size: int) -> Iterator[None]:
    """Wait until every rank has opened its backend; in the end, keep it open until every rank is done.

    A rank that gives up while another still connects would rightly report it to that one, too early for these cases.
    A rank that fails lets the others go on.
    """
    rendezvous.put(f"opened/{rank}", b"")
    try:
        for other in range(size):
            rendezvous.get(f"opened/{other}", CASE_TIMEOUT_SECONDS)
        yield
    finally:
        rendezvous.put(f"done/{rank}", b"")
    for other in range(size):
        rendezvous.get(f"done/{other}", CASE_TIMEOUT_SECONDS)


#: Each with a backend of its own: it may be broken then.
_CHECKS_OF_WAITING = (_check_missing_rank, _check_listeners, _check_abort)


# ---------------------------------------------------------------------------------------------- operations


def _check_cases(
    make: MakeBackend, rank: int, size: int, rendezvous: Rendezvous, trimmed: bool, cache: CaseCache
) -> dict[str, str]:
    with make(rank, size, rendezvous) as backend, _synchronized_ranks(rendezvous, rank, size):
        assert (backend.rank, backend.size) == (rank, size)
        conformance = BackendConformance(backend, trimmed, cache)
        for name, case in conformance.cases():
            try:
                case()
            except Exception as error:
                backend.abort(CollectiveError(f"rank {rank} failed in the case {name!r}", ranks=(rank,)))
                error.add_note(f"backend {backend.name!r}, rank {rank} of {size}, case: {name}")
                raise
        return conformance.digests
