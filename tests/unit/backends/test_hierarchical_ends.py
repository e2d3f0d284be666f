"""Backends of several machines: registered memory, process sets, who is told what, and how everything ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from reigen.backends.base import Backend, ProgressHook, ReduceBuffer
from reigen.backends.hierarchical.backend import HierarchicalBackend
from reigen.backends.null import NullBackend
from reigen.backends.shm.backend import ShmBackend
from reigen.errors import CollectiveError, DeadlineError, SharedMemoryError
from reigen.kernels.reduce import Reduction
from reigen.testing import RankError
from reigen.types import DTYPES, ReduceOp
from tests.machines import Groups, LocalBackend, Machines, soon
from tests.patience import patiently

FLOAT32 = DTYPES["float32"]
TWO_BY_TWO = [[0, 1], [2, 3]]


def total(backend: Backend, count: int = 1, deadline: float | None = None) -> float:
    """The sum of the ranks' numbers in the backend."""
    array = np.full(count, backend.rank, np.float32)
    reduction = Reduction(FLOAT32, ReduceOp.SUM, backend.size)
    backend.allreduce([ReduceBuffer(array, array)], reduction, soon() if deadline is None else deadline)
    assert (array == array[0]).all()
    return float(array[0])


# ---------------------------------------------------------------------------------------------- registered memory


def without_memory(*ranks: int) -> Callable[[int, LocalBackend], None]:
    """Ranks that have no memory for what is larger than a MiB."""

    def refuse(nbytes: int, *_: object) -> Any:
        if nbytes > 1 << 20:
            raise SharedMemoryError.for_request(nbytes, 7, "test")

    def prepare(rank: int, local: LocalBackend) -> None:
        if rank in ranks and isinstance(local, ShmBackend):
            reserve = local._local_peers.reserve
            local._local_peers.reserve = lambda nbytes, what: refuse(nbytes) or reserve(nbytes, what)  # type: ignore[method-assign]
        elif rank in ranks:
            allocate = local.allocate
            local.allocate = lambda nbytes, deadline: refuse(nbytes) or allocate(nbytes, deadline)  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize(
    ("groups", "poor", "told"),
    [(TWO_BY_TWO, 3, 12), (TWO_BY_TWO, 0, 10), ([[0, 1], [2]], 2, 12), ([[0], [1, 2], [3]], 1, 11)],
    ids=str,
)
def test_where_one_machine_has_no_memory_nobody_keeps_any(groups: Groups, poor: int, told: int) -> None:
    reserved: dict[int, Callable[[], int]] = {}
    refusing = without_memory(poor)

    def prepare(rank: int, local: LocalBackend) -> None:
        refusing(rank, local)
        if isinstance(local, ShmBackend):
            reserved[rank] = lambda: local._local_peers.reserved_bytes

    def body(backend: Backend) -> str:
        before = reserved.get(backend.rank, int)()
        for _ in range(2):
            with pytest.raises(SharedMemoryError) as caught:
                backend.allocate(3 << 20, soon())
        assert reserved.get(backend.rank, int)() == before
        small = backend.allocate(1000, soon())  # the backend is as it was
        small.array.view(np.float32)[:] = backend.rank
        backend.barrier(soon())
        values = small.array.view(np.float32)
        backend.allreduce(
            [ReduceBuffer(values, values, small.offset)], Reduction(FLOAT32, ReduceOp.SUM, backend.size), soon()
        )
        assert (values == sum(range(backend.size))).all()
        return str(caught.value)

    messages = Machines(groups, first=10, prepare=prepare).run(body)
    here = next(group for group in groups if poor in group)
    for rank, message in enumerate(messages):
        expected = (
            "not enough shared memory" if rank in here else f"not enough shared memory on the host of rank {told}"
        )
        assert expected in message


def test_memory_that_was_freed_is_used_again_and_kept_when_another_machine_has_none() -> None:
    def body(backend: Backend) -> list[int]:
        first = backend.allocate(2 << 20, soon())
        first.array[:] = 1
        backend.free(first.offset)
        if backend.rank == 2:
            without_memory(2)(2, backend._local.backend)  # type: ignore[attr-defined]
        with pytest.raises(SharedMemoryError):
            backend.allocate(2 << 20, soon())
        backend.barrier(soon())
        kept = backend._local.backend._free if backend.rank < 2 else ()  # type: ignore[attr-defined]
        return [mapped.arrays[0].size for mapped in dict(kept).values()]

    # the machine of rank 2 alone has none
    assert Machines([[0, 1], [2]]).run(body) == [[2 << 20], [2 << 20], []]


def test_a_machine_of_one_rank_that_has_no_memory_says_so() -> None:
    with pytest.raises(SharedMemoryError, match="not enough shared memory for registered memory"):
        NullBackend().allocate(1 << 60, soon())


def test_offsets_name_the_same_memory_on_all_machines() -> None:
    def body(backend: Backend) -> list[int]:
        offsets = [backend.allocate(nbytes, soon()).offset for nbytes in (5000, 1, 64, 65)]
        backend.free(offsets[0])
        return [*offsets, backend.allocate(4000, soon()).offset]

    first, *others = Machines([[0, 1], [2]]).run(body)
    assert others == [first] * 2
    assert len(set(first)) == 5


# ---------------------------------------------------------------------------------------------- process sets


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        ([0, 1], "shm"),
        ([2], "null"),
        ([1, 3], "memory"),
        ([0, 1, 4], "hierarchical"),
        ([1, 2, 3, 4], "hierarchical"),
        ([0, 1, 2, 3, 4], "hierarchical"),
    ],
    ids=str,
)
def test_process_sets_of_any_ranks(ranks: list[int], kind: str) -> None:
    groups = [[0, 1], [2, 3], [4]]

    def body(backend: Backend) -> None:
        for _ in range(2):  # what the first one leaves serves the second
            part = backend.split(ranks, soon())
            assert (part is not None) == (backend.rank in ranks)
            if part is not None:
                assert (part.name, part.size, ranks[part.rank]) == (kind, len(ranks), backend.rank)
                assert total(part, 50_000) == sum(range(len(ranks)))
                part.close()
        assert total(backend) == 10

    Machines(groups).run(body)


def test_where_one_machine_has_no_memory_there_is_no_process_set() -> None:
    def body(backend: Backend) -> None:
        with pytest.raises(SharedMemoryError, match="shared memory"):
            backend.split([0, 1, 2, 3], soon())
        assert total(backend) == 10
        pair = backend.split([0, 2, 4], soon())  # needs no memory
        assert pair is None or total(pair) == 3
        if pair is not None:
            pair.close()

    Machines([[0, 1], [2, 3], [4]], prepare=without_memory(3)).run(body)


# ---------------------------------------------------------------------------------------------- who is told


def test_what_the_caller_wants_to_know_and_to_do_reaches_all_parts() -> None:
    told: dict[int, list[str]] = {}
    nothing, writer = os.pipe()

    def body(backend: Backend) -> None:
        assert isinstance(backend, HierarchicalBackend)
        phases: list[str] = []
        backend.phase_ended = phases.append
        backend.progress_hook = ProgressHook(nothing, lambda: None)
        joined = backend._joined
        assert [part.progress_hook for part in joined] == [backend.progress_hook] * len(joined)
        total(backend, 50_000)
        backend.alltoall(np.zeros(4), [[1] * 4] * 4, np.zeros(4), soon())
        assert len(joined) == 2, "the cross group, and all ranks"
        assert joined[1].progress_hook is backend.progress_hook
        assert joined[1].phase_ended is backend.phase_ended
        told[backend.rank] = phases
        backend.phase_ended = None
        assert backend._local.backend.phase_ended is None
        assert joined[0].phase_ended is None

    Machines(TWO_BY_TWO).run(body)
    os.close(nothing)
    os.close(writer)
    for phases in told.values():
        assert {"MEMCPY_IN_FUSION_BUFFER", "SHM_REDUCE", "MEMCPY_OUT_FUSION_BUFFER"} <= set(phases)


@pytest.mark.parametrize("late", [1, 2, 3])
def test_who_is_lacking_is_told_by_the_numbers_of_the_backend(late: int) -> None:
    seen, enough = set(), threading.Event()

    def body(backend: Backend) -> None:
        def ranks_missing(members: Any) -> None:
            seen.update(members)
            if late in seen:
                enough.set()

        backend.ranks_missing = ranks_missing
        if backend.rank == late:
            assert enough.wait(30.0)
        backend.barrier(soon())

    Machines([[0, 2], [1, 3]], first=10).run(body)
    assert late in seen


def test_who_has_no_cross_group_has_time_for_other_things_too() -> None:
    """Its part is done at once, the others' takes as long as the network does."""
    reader, writer = os.pipe()
    done = threading.Event()

    def work() -> None:
        os.read(reader, 1)
        done.set()

    def body(backend: Backend) -> None:
        if backend.rank == 1:
            backend.progress_hook = ProgressHook(reader, work)
            os.write(writer, b"x")
        elif backend.rank == 2:
            assert done.wait(100.0), "only when the operation was over"
        total(backend)

    Machines([[0, 1], [2]]).run(body)
    os.close(reader)
    os.close(writer)


# ---------------------------------------------------------------------------------------------- ends

OPERATIONS: dict[str, Callable[[Backend, float], object]] = {
    "barrier": lambda backend, deadline: backend.barrier(deadline),
    "small": lambda backend, deadline: total(backend, 10, deadline),
    "large": lambda backend, deadline: total(backend, 50_000, deadline),
}


def error_of(backend: Backend, operation: str, deadline: float) -> CollectiveError:
    with pytest.raises(CollectiveError) as caught:
        OPERATIONS[operation](backend, deadline)
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("missing", [0, 1, 3])
def test_all_are_told_who_did_not_come(missing: int, operation: str) -> None:
    def attempt(seconds: float) -> None:
        done = threading.Barrier(4)

        def body(backend: Backend) -> CollectiveError | None:
            error = None if backend.rank == missing else error_of(backend, operation, soon(seconds))
            done.wait(100.0)
            return error

        errors = Machines(TWO_BY_TWO, first=10).run(body)
        for error in errors[:missing] + errors[missing + 1 :]:
            assert isinstance(error, DeadlineError)
            assert error.ranks == (10 + missing,), str(error)

    patiently(attempt, 0.2)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("groups", [TWO_BY_TWO, [[0, 1, 2], [3]], [[0], [1, 2, 3]]], ids=str)
def test_one_that_gives_up_ends_the_waiting_of_all(groups: Groups, operation: str) -> None:
    done = threading.Barrier(4)

    def body(backend: Backend) -> str:
        if backend.rank == 1:
            backend.abort(CollectiveError("enough is enough", ranks=(11,)))
            done.wait(100.0)
            return "enough is enough"
        began = time.monotonic()
        error = error_of(backend, operation, soon(100.0))
        assert time.monotonic() - began < 40.0
        done.wait(100.0)
        return str(error)

    assert all("enough is enough" in said for said in Machines(groups, first=10).run(body))


def test_a_failure_in_a_process_set_ends_the_waiting_of_its_members() -> None:
    done = threading.Barrier(3)

    def body(backend: Backend) -> str:
        part = backend.split([0, 1, 2], soon())
        if part is None:
            return ""
        if part.rank == 2:
            part.abort(CollectiveError("no more", ranks=(12,)))
            said = "no more"
        else:
            said = str(error_of(part, "large", soon()))
        done.wait(100.0)
        part.close()
        return said

    assert ["no more" in said for said in Machines(TWO_BY_TWO, first=10).run(body)] == [True, True, True, False]


def test_machines_that_cannot_meet_leave_nothing_open() -> None:
    closed: list[int] = []

    def prepare(rank: int, local: LocalBackend) -> None:
        close = local.close
        local.close = lambda: (closed.append(rank), close())[-1]  # type: ignore[method-assign]

    def unreachable(*_: object) -> Backend:
        raise DeadlineError("nobody there", ranks=(2,))

    machines = Machines(TWO_BY_TWO, prepare=prepare)
    machines.among = unreachable
    with pytest.raises(RankError, match="nobody there"):
        machines.run(lambda backend: None)
    assert sorted(closed) == [0, 1, 2, 3]
