from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from reigen.backends.base import Backend, ReduceBuffer
from reigen.kernels.reduce import Reduction
from reigen.testing.reference import expected_reduction, from_float64, random_array, to_float64
from reigen.types import DTYPES, DType, ReduceOp
from tests.machines import Groups, Machines, soon

FLOAT32 = DTYPES["float32"]
TWO_BY_TWO = [[0, 1], [2, 3]]
LARGE = 240_000
LAYOUTS = [TWO_BY_TWO, [[0, 1, 2], [3]], [[0, 2], [1, 3], [4]]]


def allreduced(
    backend: Backend, source: NDArray[Any], dtype: DType = FLOAT32, op: ReduceOp = ReduceOp.SUM, **factors: float
) -> NDArray[Any]:
    target = np.empty_like(source)
    backend.allreduce([ReduceBuffer(source, target)], Reduction(dtype, op, backend.size, **factors), soon())
    return target


# ---------------------------------------------------------------------------------------------- bytes between machines


def sent_in(machines: Machines, backend: Backend, operation: Callable[[], object]) -> int:
    before = machines.hub.num_sent_bytes[backend.rank]
    operation()
    return machines.hub.num_sent_bytes[backend.rank] - before


def by_machine(groups: Groups, sent: list[int]) -> list[int]:
    return [sum(sent[rank] for rank in group) for group in groups]


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("groups", [[[0], [1]], *LAYOUTS], ids=str)
def test_allreduce_sends_no_more_than_one_rank_a_machine_would(groups: Groups, registered: bool) -> None:
    machines = Machines(groups)

    def body(backend: Backend) -> int:
        array, offset = np.zeros(LARGE, np.float32), -1
        if registered and backend.capabilities.registered_memory:
            region = backend.allocate(array.nbytes, soon())
            array, offset = region.array.view(np.float32), region.offset
        reduction = Reduction(FLOAT32, ReduceOp.SUM, backend.size)
        return sent_in(
            machines, backend, lambda: backend.allreduce([ReduceBuffer(array, array, offset)], reduction, soon())
        )

    fraction = (len(groups) - 1) / len(groups)
    for sent in by_machine(groups, machines.run(body)):
        assert sent == pytest.approx(2 * fraction * 4 * LARGE, rel=0.001)


@pytest.mark.parametrize("groups", LAYOUTS, ids=str)
def test_a_reduction_to_owners_sends_what_an_allreduce_does(groups: Groups) -> None:
    machines = Machines(groups)

    def body(backend: Backend) -> int:
        region = backend.allocate(4 * LARGE, soon())
        array = region.array.view(np.float32)
        counts = [LARGE // len(region.owned)] * len(region.owned)
        counts[-1] += LARGE - sum(counts)
        buffer, reduction = ReduceBuffer(array, array, region.offset), Reduction(FLOAT32, ReduceOp.SUM, backend.size)
        return sent_in(machines, backend, lambda: backend.reduce_to_owners(buffer, counts, reduction, soon()))

    fraction = (len(groups) - 1) / len(groups)
    for sent in by_machine(groups, machines.run(body)):
        assert sent == pytest.approx(2 * fraction * 4 * LARGE, rel=0.001)


def test_every_cross_group_carries_its_part() -> None:
    machines = Machines(TWO_BY_TWO)

    def body(backend: Backend) -> int:
        return sent_in(machines, backend, lambda: allreduced(backend, np.zeros(1 << 18, np.float32)))

    # half of the megabyte each; half of that to the other machine, and half of the result
    assert machines.run(body) == [1 << 19] * 4


@pytest.mark.parametrize("groups", LAYOUTS, ids=str)
def test_what_a_machine_gets_of_a_reducescatter_comes_to_it_once_from_each(groups: Groups) -> None:
    machines, part = Machines(groups), 30_000

    def body(backend: Backend) -> int:
        counts = [part] * backend.size
        source, target = np.zeros(sum(counts), np.float32), np.empty(part, np.float32)
        reduction = Reduction(FLOAT32, ReduceOp.SUM, backend.size)
        return sent_in(machines, backend, lambda: backend.reduce_scatter(source, counts, target, reduction, soon()))

    sent = by_machine(groups, machines.run(body))
    assert sent == [4 * part * (machines.size - len(group)) for group in groups]


@pytest.mark.parametrize("groups", LAYOUTS, ids=str)
def test_what_a_machine_has_goes_once_to_each_other_in_an_allgather(groups: Groups) -> None:
    machines, part = Machines(groups), 30_000

    def body(backend: Backend) -> int:
        source, target = np.zeros(part, np.float32), np.empty(part * backend.size, np.float32)
        return sent_in(machines, backend, lambda: backend.allgather(source, [part] * backend.size, target, soon()))

    sent = by_machine(groups, machines.run(body))
    assert sent == [4 * part * len(group) * (len(groups) - 1) for group in groups]


@pytest.mark.parametrize("root", [0, 1, 3])
@pytest.mark.parametrize("groups", LAYOUTS, ids=str)
def test_a_broadcast_goes_once_to_each_other_machine(groups: Groups, root: int) -> None:
    machines = Machines(groups)

    def body(backend: Backend) -> int:
        target = np.zeros(LARGE, np.float32)
        source = target if backend.rank == root else None
        return sent_in(machines, backend, lambda: backend.broadcast(source, target, root, soon()))

    sent = by_machine(groups, machines.run(body))
    assert sent == [4 * LARGE * (len(groups) - 1) if root in group else 0 for group in groups]


def test_alltoall_sends_nothing_that_stays_on_its_machine() -> None:
    machines = Machines([[0, 2], [1]])

    def body(backend: Backend) -> int:
        counts = [[100 * (i + 1)] * 3 for i in range(3)]
        source, target = np.zeros(300 * (backend.rank + 1), np.float32), np.empty(600, np.float32)
        backend.alltoall(source, counts, target, soon())  # joins the backend of all ranks
        return sent_in(machines, backend, lambda: backend.alltoall(source, counts, target, soon()))

    assert machines.run(body) == [400, 2 * 800, 1200]


@pytest.mark.parametrize(("op", "times"), [(ReduceOp.SUM, 3), (ReduceOp.MAX, 2)])
def test_sums_of_half_types_cost_half_as_much_again(op: ReduceOp, times: int) -> None:
    machines, count = Machines(TWO_BY_TWO), 1 << 18

    def body(backend: Backend) -> int:
        return sent_in(
            machines, backend, lambda: allreduced(backend, np.zeros(count, np.float16), DTYPES["float16"], op)
        )

    # there and back, half of it to the other machine: as float32 there only
    assert by_machine(TWO_BY_TWO, machines.run(body)) == [times * count * 2 // 2] * 2


# ---------------------------------------------------------------------------------------------- numbers


def by_machine_order(groups: Groups, inputs: list[NDArray[Any]]) -> NDArray[Any]:
    """Sums of float32, machine by machine, in float64 rounded after each step."""
    total = None
    for group in groups:
        partial = expected_reduction([inputs[rank] for rank in group], FLOAT32, ReduceOp.SUM)
        total = partial if total is None else expected_reduction([total, partial], FLOAT32, ReduceOp.SUM)
    assert total is not None
    return total


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("groups", [*LAYOUTS, [[0, 5], [1, 4], [2, 3]]], ids=str)
def test_bits_depend_on_the_layout_alone(groups: Groups, direct: bool) -> None:
    size = sum(map(len, groups))
    inputs = [random_array(FLOAT32, LARGE, (7, rank)) for rank in range(size)]
    cuts = [0, 1, 5, 5, 1000, 9000, 150_001, LARGE]
    truth = by_machine_order(groups, inputs)

    def body(backend: Backend) -> None:
        reduction = Reduction(FLOAT32, ReduceOp.SUM, backend.size)
        own = inputs[backend.rank]
        np.testing.assert_array_equal(allreduced(backend, own), truth)
        spans = list(itertools.pairwise(cuts))
        parts = [own[a:b].copy() for a, b in spans]
        for part, (a, b) in zip(parts, spans, strict=True):  # each alone
            np.testing.assert_array_equal(allreduced(backend, part), truth[a:b])
        backend.allreduce([ReduceBuffer(part, part) for part in parts], reduction, soon())  # fused, in place
        np.testing.assert_array_equal(np.concatenate(parts), truth)
        region = backend.allocate(4 * LARGE, soon())
        values = region.array.view(np.float32)
        values[:] = own
        backend.barrier(soon())
        buffers = [ReduceBuffer(values[a:b], values[a:b], region.offset + 4 * a) for a, b in spans]
        backend.allreduce(buffers, reduction, soon())
        np.testing.assert_array_equal(values, truth)

    Machines(groups, chunk_bytes=1 << 17, direct=direct).run(body)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("count", [100, LARGE])
def test_sums_of_half_types_are_rounded_once(name: str, count: int) -> None:
    dtype = DTYPES[name]
    inputs = [random_array(dtype, count, (8, rank)) for rank in range(4)]
    exact = by_machine_order(TWO_BY_TWO, [to_float64(array, dtype).astype(np.float32) for array in inputs])
    truth = from_float64(exact.astype(np.float64), dtype)
    average = from_float64(np.float32(0.25) * exact.astype(np.float64), dtype)

    def body(backend: Backend) -> None:
        own = inputs[backend.rank]
        np.testing.assert_array_equal(allreduced(backend, own, dtype), truth)
        np.testing.assert_array_equal(allreduced(backend, own, dtype, ReduceOp.AVERAGE), average)
        region = backend.allocate(2 * count, soon())
        values = region.array.view(dtype.storage)
        values[:] = own
        backend.barrier(soon())
        backend.allreduce([ReduceBuffer(values, values, region.offset)], Reduction(dtype, ReduceOp.SUM, 4), soon())
        np.testing.assert_array_equal(values, truth)
        part = np.empty(count // 4, dtype.storage)
        backend.reduce_scatter(own, [count // 4] * 4, part, Reduction(dtype, ReduceOp.AVERAGE, 4), soon())
        np.testing.assert_array_equal(part, average[backend.rank * (count // 4) :][: count // 4])

    Machines(TWO_BY_TWO, chunk_bytes=1 << 16).run(body)


def test_an_average_does_not_overflow_where_it_does_not_on_one_host() -> None:
    def body(backend: Backend) -> float:
        large = np.full(10, 40_000, np.float16)  # twice that is no float16
        return float(allreduced(backend, large, DTYPES["float16"], ReduceOp.AVERAGE)[0])

    assert Machines(TWO_BY_TWO).run(body) == [40_000.0] * 4


def test_integers_are_truncated_once_at_the_end() -> None:
    inputs = [3, 4, 5, -1]

    def body(backend: Backend) -> tuple[int, int]:
        own = np.array([inputs[backend.rank]], np.int32)
        return (
            int(allreduced(backend, own, DTYPES["int32"], ReduceOp.AVERAGE)[0]),
            int(allreduced(backend, own, DTYPES["int32"], ReduceOp.AVERAGE, prescale=1.5, postscale=2.5)[0]),
        )

    # 11 / 4; and (4 + 6 + 7 - 1) / 4 * 2.5
    assert Machines(TWO_BY_TWO).run(body) == [(2, 10)] * 4


@pytest.mark.parametrize(("groups", "ordered"), [(TWO_BY_TWO, False), ([[0, 1, 2], [3], [4]], True)], ids=str)
def test_what_the_network_can_do_is_known_to_ranks_that_have_no_cross_group(groups: Groups, ordered: bool) -> None:
    def body(backend: Backend) -> tuple[bool, bool, bool]:
        can = backend.capabilities
        return can.registered_memory, can.ordered_sums, can.abortable

    machines = Machines(groups)
    assert machines.run(body) == [(True, ordered, True)] * machines.size


@pytest.mark.parametrize("direct", [False, True])
def test_ranks_that_get_nothing_do_not_run_ahead(direct: bool) -> None:
    """The second machine gets nothing, so that nothing brings its ranks together after its part is sent."""

    def body(backend: Backend) -> None:
        reduction = Reduction(FLOAT32, ReduceOp.SUM, backend.size)
        for turn in range(50):
            source = np.full(1000, 10 * turn + backend.rank, np.float32)
            target = np.empty(1000 if backend.rank == 0 else 0, np.float32)
            backend.reduce_scatter(source, [1000, 0, 0, 0, 0], target, reduction, soon())
            assert (target == 50 * turn + 10).all()

    Machines([[0, 1], [2, 3, 4]], direct=direct).run(body)
