"""Planes of several machines: registered memory, process sets, who is told what, and how everything ends."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.machines import Groups, LocalPlane, Machines, soon
from tests.patience import patiently

from reigen.errors import CollectiveError, DeadlineError, SharedMemoryError
from reigen.kernels.reduce import Reduction
from reigen.planes.base import Buffer, DataPlane, Meanwhile
from reigen.planes.hierarchical import HierarchicalPlane
from reigen.planes.null import NullPlane
from reigen.planes.shm import ShmPlane
from reigen.testing import RankError
from reigen.types import DTYPES, ReduceOp

FLOAT32 = DTYPES["float32"]
TWO_BY_TWO = [[0, 1], [2, 3]]


def total(plane: DataPlane, count: int = 1, deadline: float | None = None) -> float:
    """The sum of the ranks' numbers in the plane."""
    array = np.full(count, plane.rank, np.float32)
    reduction = Reduction(FLOAT32, ReduceOp.SUM, plane.size)
    plane.allreduce([Buffer(array, array)], reduction, soon() if deadline is None else deadline)
    assert (array == array[0]).all()
    return float(array[0])


# ---------------------------------------------------------------------------------------------- registered memory


def without_memory(*ranks: int) -> Callable[[int, LocalPlane], None]:
    """Ranks that have no memory for what is larger than a MiB."""

    def refuse(nbytes: int, *_: object) -> Any:
        if nbytes > 1 << 20:
            raise SharedMemoryError.for_request(nbytes, 7, "test")

    def prepare(rank: int, local: LocalPlane) -> None:
        if rank in ranks and isinstance(local, ShmPlane):
            reserve = local._neighbours.reserve
            local._neighbours.reserve = lambda nbytes, what: refuse(nbytes) or reserve(nbytes, what)  # type: ignore[method-assign]
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

    def prepare(rank: int, local: LocalPlane) -> None:
        refusing(rank, local)
        if isinstance(local, ShmPlane):
            reserved[rank] = lambda: local._neighbours.reserved_bytes

    def body(plane: DataPlane) -> str:
        before = reserved.get(plane.rank, int)()
        for _ in range(2):
            with pytest.raises(SharedMemoryError) as caught:
                plane.allocate(3 << 20, soon())
        assert reserved.get(plane.rank, int)() == before
        small = plane.allocate(1000, soon())  # the plane is as it was
        small.array.view(np.float32)[:] = plane.rank
        plane.barrier(soon())
        values = small.array.view(np.float32)
        plane.allreduce([Buffer(values, values, small.offset)], Reduction(FLOAT32, ReduceOp.SUM, plane.size), soon())
        assert (values == sum(range(plane.size))).all()
        return str(caught.value)

    messages = Machines(groups, first=10, prepare=prepare).run(body)
    here = next(group for group in groups if poor in group)
    for rank, message in enumerate(messages):
        expected = (
            "not enough shared memory" if rank in here else f"not enough shared memory on the host of rank {told}"
        )
        assert expected in message


def test_memory_that_was_freed_is_used_again_and_kept_when_another_machine_has_none() -> None:
    def body(plane: DataPlane) -> list[int]:
        first = plane.allocate(2 << 20, soon())
        first.array[:] = 1
        plane.free(first.offset)
        if plane.rank == 2:
            without_memory(2)(2, plane._local.plane)  # type: ignore[attr-defined]
        with pytest.raises(SharedMemoryError):
            plane.allocate(2 << 20, soon())
        plane.barrier(soon())
        kept = plane._local.plane._free if plane.rank < 2 else ()  # type: ignore[attr-defined]
        return [mapped.arrays[0].size for mapped in dict(kept).values()]

    # the machine of rank 2 alone has none
    assert Machines([[0, 1], [2]]).run(body) == [[2 << 20], [2 << 20], []]


def test_a_machine_of_one_rank_that_has_no_memory_says_so() -> None:
    with pytest.raises(SharedMemoryError, match="not enough shared memory for registered memory"):
        NullPlane().allocate(1 << 60, soon())


def test_offsets_name_the_same_memory_on_all_machines() -> None:
    def body(plane: DataPlane) -> list[int]:
        offsets = [plane.allocate(nbytes, soon()).offset for nbytes in (5000, 1, 64, 65)]
        plane.free(offsets[0])
        return [*offsets, plane.allocate(4000, soon()).offset]

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

    def body(plane: DataPlane) -> None:
        for _ in range(2):  # what the first one leaves serves the second
            part = plane.split(ranks, soon())
            assert (part is not None) == (plane.rank in ranks)
            if part is not None:
                assert (part.name, part.size, ranks[part.rank]) == (kind, len(ranks), plane.rank)
                assert total(part, 50_000) == sum(range(len(ranks)))
                part.close()
        assert total(plane) == 10

    Machines(groups).run(body)


def test_where_one_machine_has_no_memory_there_is_no_process_set() -> None:
    def body(plane: DataPlane) -> None:
        with pytest.raises(SharedMemoryError, match="shared memory"):
            plane.split([0, 1, 2, 3], soon())
        assert total(plane) == 10
        pair = plane.split([0, 2, 4], soon())  # needs no memory
        assert pair is None or total(pair) == 3
        if pair is not None:
            pair.close()

    Machines([[0, 1], [2, 3], [4]], prepare=without_memory(3)).run(body)


# ---------------------------------------------------------------------------------------------- who is told


def test_what_the_caller_wants_to_know_and_to_do_reaches_all_parts() -> None:
    told: dict[int, list[str]] = {}
    nothing, writer = os.pipe()

    def body(plane: DataPlane) -> None:
        assert isinstance(plane, HierarchicalPlane)
        phases: list[str] = []
        plane.phase_ended = phases.append
        plane.meanwhile = Meanwhile(nothing, lambda: None)
        joined = plane._joined
        assert [part.meanwhile for part in joined] == [plane.meanwhile] * len(joined)
        total(plane, 50_000)
        plane.alltoall(np.zeros(4), [[1] * 4] * 4, np.zeros(4), soon())
        assert len(joined) == 2, "the lane, and all ranks"
        assert joined[1].meanwhile is plane.meanwhile
        assert joined[1].phase_ended is plane.phase_ended
        told[plane.rank] = phases
        plane.phase_ended = None
        assert plane._local.plane.phase_ended is None
        assert joined[0].phase_ended is None

    Machines(TWO_BY_TWO).run(body)
    os.close(nothing)
    os.close(writer)
    for phases in told.values():
        assert {"MEMCPY_IN_FUSION_BUFFER", "SHM_REDUCE", "MEMCPY_OUT_FUSION_BUFFER"} <= set(phases)


@pytest.mark.parametrize("late", [1, 2, 3])
def test_who_is_lacking_is_told_by_the_numbers_of_the_plane(late: int) -> None:
    seen, enough = set(), threading.Event()

    def body(plane: DataPlane) -> None:
        def lacking(members: Any) -> None:
            seen.update(members)
            if late in seen:
                enough.set()

        plane.lacking = lacking
        if plane.rank == late:
            assert enough.wait(30.0)
        plane.barrier(soon())

    Machines([[0, 2], [1, 3]], first=10).run(body)
    assert late in seen


def test_who_has_no_lane_has_time_for_other_things_too() -> None:
    """Its part is done at once, the others' takes as long as the network does."""
    reader, writer = os.pipe()
    done = threading.Event()

    def work() -> None:
        os.read(reader, 1)
        done.set()

    def body(plane: DataPlane) -> None:
        if plane.rank == 1:
            plane.meanwhile = Meanwhile(reader, work)
            os.write(writer, b"x")
        elif plane.rank == 2:
            assert done.wait(100.0), "only when the operation was over"
        total(plane)

    Machines([[0, 1], [2]]).run(body)
    os.close(reader)
    os.close(writer)


# ---------------------------------------------------------------------------------------------- ends

OPERATIONS: dict[str, Callable[[DataPlane, float], object]] = {
    "barrier": lambda plane, deadline: plane.barrier(deadline),
    "small": lambda plane, deadline: total(plane, 10, deadline),
    "large": lambda plane, deadline: total(plane, 50_000, deadline),
}


def error_of(plane: DataPlane, operation: str, deadline: float) -> CollectiveError:
    with pytest.raises(CollectiveError) as caught:
        OPERATIONS[operation](plane, deadline)
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("missing", [0, 1, 3])
def test_all_are_told_who_did_not_come(missing: int, operation: str) -> None:
    def attempt(seconds: float) -> None:
        done = threading.Barrier(4)

        def body(plane: DataPlane) -> CollectiveError | None:
            error = None if plane.rank == missing else error_of(plane, operation, soon(seconds))
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

    def body(plane: DataPlane) -> str:
        if plane.rank == 1:
            plane.abort(CollectiveError("enough is enough", ranks=(11,)))
            done.wait(100.0)
            return "enough is enough"
        began = time.monotonic()
        error = error_of(plane, operation, soon(100.0))
        assert time.monotonic() - began < 40.0
        done.wait(100.0)
        return str(error)

    assert all("enough is enough" in said for said in Machines(groups, first=10).run(body))


def test_a_failure_in_a_process_set_ends_the_waiting_of_its_members() -> None:
    done = threading.Barrier(3)

    def body(plane: DataPlane) -> str:
        part = plane.split([0, 1, 2], soon())
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

    def prepare(rank: int, local: LocalPlane) -> None:
        close = local.close
        local.close = lambda: (closed.append(rank), close())[-1]  # type: ignore[method-assign]

    def unreachable(*_: object) -> DataPlane:
        raise DeadlineError("nobody there", ranks=(2,))

    machines = Machines(TWO_BY_TWO, prepare=prepare)
    machines.among = unreachable
    with pytest.raises(RankError, match="nobody there"):
        machines.run(lambda plane: None)
    assert sorted(closed) == [0, 1, 2, 3]
