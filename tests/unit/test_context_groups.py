"""Process sets, groups and join through the whole engine, on ranks that are threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from reigen.context import Context, Handle
from reigen.engine.handle import TensorTableEntry
from reigen.engine.messages import Operation, OperationKind
from reigen.engine.operation_builders import ReductionSpec, build_allgather, build_allreduce, build_reducescatter
from reigen.errors import ArgumentError, JoinedError, MismatchError, SharedMemoryError
from reigen.net.shm_segment import ShmSegment
from reigen.types import DTYPES, ReduceOp
from tests.unit.engine.jobs import between

FLOAT, DOUBLE, INT = DTYPES["float32"], DTYPES["float64"], DTYPES["int64"]


def total(job: Context, value: float, count: int = 3, **options: Any) -> float:
    """The sum of everybody's ``value``; all elements of the result must be equal."""
    x = np.full(count, value, np.float32)
    job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, **options).wait()
    assert (x == x[0]).all()
    return float(x[0])


# -- process sets -----------------------------------------------------------------------------------------------------


def test_sets_that_overlap_work_side_by_side() -> None:
    """Members submit in orders of their own, in all sizes that take different ways through the backend."""

    def act(job: Context) -> list[float]:
        assert job.add_process_set([2, 0]) == 1
        assert job.add_process_set([1, 2, 3]) == 2
        assert dict(job.process_sets) == {0: (0, 1, 2, 3), 1: (0, 2), 2: (1, 2, 3)}
        mine = [number for number, ranks in job.process_sets.items() if job.rank in ranks]
        found = []
        for count in (1, 3000, 300_000):
            handles = []
            for number in sorted(mine, key=lambda n: (n * 7 + job.rank * 3) % 5):
                x = np.full(count, 1.0 + job.rank, np.float32)
                handles.append((number, x, job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="x", process_set=number)))
            for _, x, handle in handles:
                handle.wait()
                assert (x == x[0]).all()
            found += [float(x[0]) for _, x, _ in sorted(handles, key=lambda entry: entry[0])]
        return found

    assert between(4, act) == [[10.0, 4.0] * 3, [10.0, 9.0] * 3, [10.0, 4.0, 9.0] * 3, [10.0, 9.0] * 3]


def test_every_collective_in_a_set() -> None:
    def act(job: Context) -> Any:
        number = job.add_process_set([1, 3])
        if job.rank not in (1, 3):
            with pytest.raises(ArgumentError, match=r"rank \d is not in process set 1, whose ranks are \[1, 3\]"):
                job.barrier(process_set=number)
            return None
        place = (1, 3).index(job.rank)
        mine = np.arange(2 + place, dtype=np.int64) + 10 * job.rank
        gathered = job.allgather(mine, INT, process_set=number).wait().array
        assert gathered is not None
        assert gathered.tolist() == [10, 11, 30, 31, 32]
        x = np.full(2, job.rank, np.int64)
        job.broadcast(x, x, INT, root_rank=3, process_set=number).wait()
        assert x.tolist() == [3, 3]
        with pytest.raises(ArgumentError, match=r"root_rank must be one of the ranks \[1, 3\], not 0"):
            job.broadcast(x, x, INT, root_rank=0, process_set=number)
        outcome = job.alltoall(mine, INT, splits=[1, 1], process_set=number).wait()
        assert outcome.array is not None
        assert outcome.array.tolist() == [10 + place, 30 + place]
        with pytest.raises(ArgumentError, match="2 numbers"):
            job.alltoall(mine, INT, splits=[1, 1, 0, 0], process_set=number)
        part = job.reducescatter(np.arange(3, dtype=np.int64), INT, op=ReduceOp.SUM, process_set=number).wait().array
        assert part is not None
        assert part.tolist() == ([0, 2], [4])[place]
        average = np.full(1, float(job.rank), np.float32)
        job.allreduce(average, average, FLOAT, process_set=number).wait()
        assert average[0] == 2.0
        job.barrier(process_set=number).wait()
        region = job.allocate(4000, name="r", process_set=number)
        y = region.array.view(np.float32)
        y[:] = job.rank
        job.allreduce(y, y, FLOAT, op=ReduceOp.SUM, region=region, process_set=number).wait()
        assert (y == 4.0).all()
        job.free(region, process_set=number)
        return True

    assert between(4, act) == [None, True, None, True]


def test_registered_memory_of_a_set_does_not_disturb_that_of_all() -> None:
    """The members' segments have grown, the others' have not: whatever is registered next still fits together."""

    def act(job: Context) -> float:
        number = job.add_process_set([0, 2])
        if job.rank != 1:
            job.allocate(1 << 16, name="some", process_set=number)
        region = job.allocate(1 << 12, name="all")
        x = region.array.view(np.float32)
        x[:] = 1.0 + job.rank
        job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, region=region).wait()
        assert (x == x[0]).all()
        return float(x[0])

    assert between(3, act) == [6.0] * 3


def test_a_set_can_be_removed_and_its_number_is_used_again() -> None:
    def act(job: Context) -> list[float]:
        found = []
        for round_number in range(6):
            pair = (round_number % 3, 2 if round_number % 3 != 2 else 0)
            number = job.add_process_set(sorted(pair))
            assert number == 1
            if job.rank in pair:
                found.append(total(job, 1.0 + job.rank, name="x", process_set=number))
                found.append(total(job, 1.0 + job.rank, name="x", process_set=number))  # from the response cache
            job.remove_process_set(number)
            assert dict(job.process_sets) == {0: (0, 1, 2)}
            with pytest.raises(ArgumentError, match="there is no process set 1"):
                job.barrier(process_set=number)
        return found

    assert between(3, act) == [[4.0, 4.0] * 4, [5.0, 5.0] * 2, [4.0, 4.0, 5.0, 5.0, 4.0, 4.0] * 2]


def test_a_set_whose_memory_was_used_before_begins_to_count_at_zero() -> None:
    """Else nobody would wait for anybody until the old counts are reached."""

    def act(job: Context) -> bool:
        for number_of_ops in (0, 3, 2):
            number = job.add_process_set([0, 2])
            if job.rank != 1:
                backend: Any = job._engine._process_set_groups[number].backend
                for turnstile in (backend._filled, backend._reduced):
                    assert [turnstile._own.load(), *(word.load() for _, word in turnstile._others)] == [0, 0]
            job.barrier().wait()
            for _ in range(number_of_ops if job.rank != 1 else 0):
                total(job, 1.0, count=50_000, process_set=number)
            job.remove_process_set(number)
        return True

    assert all(between(3, act))


def test_a_set_of_one_rank() -> None:
    def act(job: Context) -> float:
        number = job.add_process_set([1])
        return total(job, 5.0, process_set=number) if job.rank == 1 else 0.0

    assert between(2, act) == [0.0, 5.0]


def test_what_waits_in_a_set_that_is_removed_fails_and_all_else_goes_on() -> None:
    def act(job: Context) -> float:
        number = job.add_process_set([0, 1])
        handle = job.barrier(name="never", process_set=number) if job.rank == 0 else None
        job.remove_process_set(number)
        if handle is not None:
            with pytest.raises(MismatchError, match="process set 1 has been removed"):
                handle.wait()
        return total(job, 1.0)

    assert between(3, act) == [3.0] * 3


def test_sets_that_differ_between_ranks_are_refused_everywhere() -> None:
    def act(job: Context) -> float:
        with pytest.raises(MismatchError, match="the process sets differ") as raised:
            job.add_process_set([0, 1] if job.rank else [0, 2])
        assert raised.value.details == {0: "[0, 2]", 1: "[0, 1]", 2: "[0, 1]"}
        assert dict(job.process_sets) == {0: (0, 1, 2)}
        for wrong in ([], [0, 0], [0, 3], [-1]):
            with pytest.raises(ArgumentError, match="different ranks from 0 to 2"):
                job.add_process_set(wrong)
        with pytest.raises(ArgumentError, match="could be removed"):
            job.remove_process_set(0)
        assert job.add_process_set([0, 1]) == 1
        with pytest.raises(ArgumentError, match=r"there is a process set of the ranks \[0, 1\] already"):
            job.add_process_set((1, 0))
        return total(job, 1.0)

    assert between(3, act) == [3.0] * 3


# -- groups -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", [{}, {"fusion_threshold_bytes": 0}, {"cache_capacity": 0}])
def test_a_group_is_reduced_as_one(knobs: dict[str, Any]) -> None:
    """Members of several types and sizes, beside single tensors, over and over: also through the response cache."""

    def act(job: Context) -> bool:
        for step in range(3):
            sources = [
                np.full(5, 1.0 + job.rank, np.float32),
                np.full((2, 40_000), 2.0 * job.rank + step, np.float64),
                np.empty(0, np.float32),
                np.array(7.0, np.float32),
            ]
            dtypes = [FLOAT, DOUBLE, FLOAT, FLOAT]
            single = np.full(3, 1.0, np.float32)
            handles = [
                job.grouped_allreduce(sources, sources, dtypes, op=ReduceOp.SUM, name="group"),
                job.allreduce(single, single, FLOAT, op=ReduceOp.SUM, name="single"),
            ]
            order = (0, 1) if job.rank % 2 else (1, 0)
            outcome = {index: handles[index].wait() for index in order}[0]
            assert [None if o.array is None else o.array.shape for o in outcome.members] == [
                (5,),
                (2, 40_000),
                (0,),
                (),
            ]
            n = job.size
            assert (sources[0] == n * (n + 1) / 2).all()
            assert (sources[1] == n * (n - 1) + n * step).all()
            assert float(sources[3]) == 7.0 * n
            assert (single == n).all()
        return True

    assert all(between(3, act, **knobs))


def test_gathered_and_scattered_groups() -> None:
    def act(job: Context) -> bool:
        mine = [np.full((job.rank + 1, 2), job.rank, np.int64), np.full(1, 10.0 + job.rank, np.float32)]
        members = job.start_group(build_allgather, mine, [INT, FLOAT]).wait().members
        rows, ten = (o.array for o in members)
        assert rows is not None
        assert ten is not None
        assert rows[:, 0].tolist() == [0, 1, 1]
        assert ten.tolist() == [10.0, 11.0]
        both = [np.arange(3, dtype=np.int64), np.ones((4, 2), np.float32)]
        parts = [
            o.array
            for o in job.start_group(build_reducescatter, both, [INT, FLOAT], (ReduceOp.SUM, 1.0, 1.0)).wait().members
        ]
        assert parts[0] is not None
        assert parts[1] is not None
        assert parts[0].tolist() == ([0, 2], [4])[job.rank]
        assert parts[1].tolist() == [[2.0, 2.0]] * 2
        return True

    assert all(between(2, act))


def test_a_group_that_is_longer_than_a_control_message() -> None:
    def act(job: Context) -> float:
        for _ in range(2):
            xs = [np.full(16, float(i), np.float32) for i in range(3000)]
            job.grouped_allreduce(xs, xs, [FLOAT] * len(xs), op=ReduceOp.SUM, name="many").wait()
            assert all((x == job.size * i).all() for i, x in enumerate(xs))
        return total(job, 1.0)

    assert between(3, act) == [3.0] * 3


def lone(job: Context, x: Any) -> Handle:
    return job.allreduce(x, x, FLOAT, name="g")


def group(job: Context, x: Any) -> Handle:
    return job.grouped_allreduce([x], [x], [FLOAT], name="g")


def test_groups_that_differ_are_refused_as_a_whole_and_all_else_goes_on() -> None:
    def act(job: Context) -> float:
        x, y = np.ones(3, np.float32), np.ones(4, np.float32)
        different = {
            "the groups differ": ([x, y], [x]),
            "the shapes differ between ranks": ([x, y], [x, x]),
            "the data types differ": ([x, y], [x, y.astype(np.float64)]),
        }
        for text, lists in different.items():
            mine = lists[job.rank]
            dtypes = [DTYPES[a.dtype.name] for a in mine]
            with pytest.raises(MismatchError, match=text.replace(" between ranks", " in member 1 of the group")):
                job.grouped_allreduce(mine, mine, dtypes, op=ReduceOp.SUM, name="g").wait()
        with pytest.raises(MismatchError, match="the groups differ"):
            (lone if job.rank else group)(job, x).wait()
        with pytest.raises(ArgumentError, match="at least one tensor"):
            job.grouped_allreduce([], [], [])
        assert (x == 1.0).all()
        return total(job, 1.0)

    assert between(2, act) == [2.0] * 2


def test_tensors_of_a_group_that_have_names_are_told_apart_by_them() -> None:
    def act(job: Context) -> float:
        x = np.ones(3, np.float32)
        for other in (["a", "c"], ["a"], ["a", "b", "c"]):
            labels = ["a", "b"] if job.rank else other
            x_of_all = [x] * len(labels)
            handle = job.start_group(
                build_allreduce, x_of_all, [FLOAT] * len(labels), ReductionSpec(ReduceOp.SUM, 1.0, 1.0),
                targets=[np.empty_like(x) for _ in labels], name="g", labels=labels,
            )  # fmt: skip
            with pytest.raises(MismatchError, match=r"the tensors differ in member [12] of the group") as caught:
                handle.wait()
            assert caught.value.details[1 if len(other) < 3 else 0] in ("b", "c")
        return total(job, 1.0)

    assert between(2, act) == [2.0] * 2


# -- join -------------------------------------------------------------------------------------------------------------


def test_joined_ranks_stand_in_with_neutral_elements() -> None:
    """Rank r has r + 1 steps. The averages divide by all ranks, or by those that have data, as asked for."""

    def act(job: Context) -> tuple[list[tuple[float, ...]], int]:
        found = []
        region = job.allocate(4000, name="r")
        for step in range(job.rank + 1):
            mine = 2.0 + job.rank
            sums, active, low, high, product, bucket = (np.full(1000, mine, np.float32) for _ in range(6))
            bucket = region.array.view(np.float32)
            bucket[:] = mine
            handles = [
                job.allreduce(sums, sums, FLOAT, name="sum"),
                job.allreduce(active, active, FLOAT, name="active", divide_by_active=True),
                job.allreduce(low, low, FLOAT, op=ReduceOp.MIN, name="low"),
                job.allreduce(high, high, FLOAT, op=ReduceOp.MAX, name="high"),
                job.grouped_allreduce([product], [product], [FLOAT], op=ReduceOp.PRODUCT, name="product"),
                job.allreduce(bucket, bucket, FLOAT, op=ReduceOp.SUM, name="bucket", region=region),
            ]
            for handle in handles[:: 1 if step % 2 else -1]:
                handle.wait()
            arrays = (sums, active, low, high, product, bucket)
            assert all((a == a[0]).all() for a in arrays)
            found.append(tuple(round(float(a[0]), 4) for a in arrays))
        return found, job.join().wait().value

    rows = [
        (3.0, 3.0, 2.0, 4.0, 24.0, 9.0),
        (round(7 / 3, 4), 3.5, 3.0, 4.0, 12.0, 7.0),
        (round(4 / 3, 4), 4.0, 4.0, 4.0, 4.0, 4.0),
    ]
    for _ in range(3):
        assert between(3, act) == [(rows[: rank + 1], 2) for rank in range(3)]


def test_after_all_have_joined_everything_is_as_before() -> None:
    def act(job: Context) -> list[float]:
        found = []
        for epoch in range(4):
            last = epoch % job.size
            found.append(total(job, 1.0, name="x"))
            if job.rank == last:
                found.append(total(job, 5.0, name="x"))
                found.append(total(job, 6.0, name="only here"))
            assert job.join(blocking=True).wait().value == last
            gathered = job.allgather(np.array([job.rank]), INT).wait().array
            assert gathered is not None
            assert gathered.tolist() == [0, 1]
        return found

    assert between(2, act) == [[2.0, 5.0, 6.0, 2.0] * 2, [2.0, 2.0, 5.0, 6.0] * 2]


def test_unnamed_operations_match_after_a_join_although_some_ranks_had_more_of_them() -> None:
    def act(job: Context) -> list[float]:
        found = []
        for epoch in range(3):
            found += [total(job, 1.0) for _ in range(1 + 2 * (job.rank == epoch % job.size))]
            job.join(blocking=True).wait()
            found.append(total(job, float(job.rank)))
        return found

    assert between(2, act) == [[2, 1, 1, 1, 2, 1, 2, 1, 1, 1], [2, 1, 2, 1, 1, 1, 2, 1]]


def test_what_zeros_cannot_stand_for_is_refused_on_those_who_asked() -> None:
    def act(job: Context) -> int:
        x = np.ones((2, 2), np.float32)
        if job.rank == 0:
            return job.join(blocking=True).wait().value
        total(job, 1.0)  # now rank 0 has joined
        refused = [
            lambda: job.allgather(x, FLOAT),
            lambda: job.broadcast(x, x, FLOAT, root_rank=1),
            lambda: job.alltoall(np.ones((3, 1), np.float32), FLOAT),
            lambda: job.reducescatter(x, FLOAT),
            job.barrier,
            lambda: job.allreduce(x, x, FLOAT, op=ReduceOp.MAX, prescale=2.0),
        ]
        for submit in refused:
            with pytest.raises(JoinedError, match="have joined, so they have no data for this") as raised:
                submit().wait()
            assert raised.value.ranks == (0,)
        with pytest.raises(JoinedError, match="allocate"):
            job.allocate(10, name="r")
        with pytest.raises(MismatchError, match="shapes"):
            job.allreduce(x[: job.rank], x[: job.rank], FLOAT, name="uneven").wait()
        assert total(job, 2.0) == 4.0
        return job.join(blocking=True).wait().value

    results = between(3, act)
    assert len(set(results)) == 1
    assert results[0] in (1, 2)


def test_a_set_without_the_joined_rank_is_not_concerned() -> None:
    def act(job: Context) -> int:
        number = job.add_process_set([1, 2])
        if job.rank:
            total(job, 1.0)
            gathered = job.allgather(np.array([job.rank]), INT, process_set=number).wait().array
            assert gathered is not None
            assert gathered.tolist() == [1, 2]
        return job.join(blocking=True).wait().value

    assert set(between(3, act)) <= {1, 2}


def test_what_is_outstanding_when_the_last_rank_joins_is_done_first() -> None:
    """Every rank has steps that the others have not, waits for none of them, and joins."""

    def act(job: Context) -> float:
        x = np.full(3, 1.0 + job.rank, np.float32)
        handle = job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name=f"of rank {job.rank}", divide_by_active=True)
        joining = job.join()
        with pytest.raises(ArgumentError, match="this rank has joined"):
            job.barrier()
        joining.wait()
        assert handle.done
        handle.wait()
        job.barrier().wait()
        return float(x[0])

    assert between(3, act) == [1.0, 2.0, 3.0]


def test_a_tensor_cannot_be_called_as_one_of_a_process_set_or_a_join() -> None:
    def act(job: Context) -> float:
        for name in ("x (process set 1)", "join (all ranks)"):
            with pytest.raises(ArgumentError, match="could be taken for another's"):
                job.barrier(name=name)
        return total(job, 1.0, name="join") + total(job, 1.0, name="(process set 1)")

    assert between(2, act) == [4.0] * 2


def test_memory_of_a_set_that_is_over_does_not_free_that_of_the_next_one() -> None:
    """Its number is used again, and its place: what is given back late, or twice, is not the new memory."""

    def act(job: Context) -> bool:
        first = job.add_process_set([0, 1])
        if job.rank < 2:
            old = job.allocate(4096, name="old", process_set=first)
        job.remove_process_set(first)
        second = job.add_process_set([0, 1])
        assert second == first
        if job.rank < 2:
            job.free(old, process_set=second)
            new = job.allocate(4096, name="new", process_set=second)
            assert new.offset == old.offset
            job.free(old, process_set=second)
            job.barrier(process_set=second).wait()
            other = job.allocate(4096, name="other", process_set=second)
            assert other.offset != new.offset
            job.free(other, process_set=second)
            job.free(other, process_set=second)
        return total(job, 1.0) == 3.0

    assert all(between(3, act))


def test_two_threads_that_make_or_unmake_the_same_set() -> None:
    """Both are past the first check when neither is done: the second is refused on all ranks, and nothing breaks."""

    def act(job: Context) -> float:
        add = Operation(OperationKind.ADD_SET, "a", shape=(0, 1))
        remove = Operation(OperationKind.REMOVE_SET, "c", shape=(1,))
        for operation, text in ((add, "there is a process set"), (remove, "process set 1 has been removed")):
            twice = [structs.replace(operation, name=f"{operation.name}{i}") for i in range(2)]
            handles = [job._submit(o, TensorTableEntry(), blocking=False) for o in twice]
            handles[0].wait()
            with pytest.raises(MismatchError, match=text):
                handles[1].wait()
        assert dict(job.process_sets) == {0: (0, 1, 2)}
        return total(job, 1.0)

    assert between(3, act) == [3.0] * 3


def test_a_set_that_finds_no_memory_is_no_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks are told; the number goes to the next set, of which some of them are no members."""
    grow, scarce = ShmSegment.grow, [True]

    def stingy(self: ShmSegment, nbytes: int, what: str, *, sharers: int = 1) -> int:
        if scarce[0] and "process set" in what:
            raise SharedMemoryError.for_request(nbytes, 0, what)
        return grow(self, nbytes, what, sharers=sharers)

    monkeypatch.setattr(ShmSegment, "grow", stingy)

    def act(job: Context) -> float:
        with pytest.raises(SharedMemoryError, match="process set"):
            job.add_process_set([0, 1])
        assert dict(job.process_sets) == {0: (0, 1, 2)}
        job.barrier().wait()
        scarce[0] = False
        assert job.add_process_set([1, 2]) == 1
        return total(job, 1.0, process_set=1) if job.rank else total(job, 1.0, name="alone", process_set=0)

    def with_company(job: Context) -> float:
        found = act(job)
        if job.rank:
            total(job, 1.0, name="alone")
        return found

    assert between(3, with_company) == [3.0, 2.0, 2.0]


@pytest.mark.parametrize("capacity", [0, 1, 1024])
def test_a_full_response_cache_is_told_of_once(capacity: int, caplog: pytest.LogCaptureFixture) -> None:
    def act(job: Context) -> None:
        for _ in range(3):
            for name in "abc":
                total(job, 1.0, name=name)

    between(2, act, cache_capacity=capacity)
    told = [record for record in caplog.records if "raise HOROVOD_CACHE_CAPACITY" in record.getMessage()]
    assert len(told) == (capacity == 1)
