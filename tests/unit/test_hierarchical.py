from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.machines import Groups, Machines, soon

from reigen.kernels.reduce import Reduction
from reigen.planes.base import Buffer, DataPlane
from reigen.types import DTYPES, ReduceOp

FLOAT32 = DTYPES["float32"]


def sent_in(machines: Machines, plane: DataPlane, operation: Callable[[], None]) -> int:
    before = machines.hub.num_sent_bytes[plane.rank]
    operation()
    return machines.hub.num_sent_bytes[plane.rank] - before


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("groups", [[[0], [1]], [[0, 1], [2, 3]], [[0, 1, 2], [3]], [[0, 1], [2, 3], [4]]], ids=str)
def test_allreduce_sends_no_more_than_one_rank_a_machine_would(groups: Groups, registered: bool) -> None:
    machines, nbytes = Machines(groups), 960_000

    def body(plane: DataPlane) -> int:
        array, offset = np.zeros(nbytes // 4, np.float32), -1
        if registered and plane.capabilities.registered_memory:
            region = plane.allocate(nbytes, soon())
            array, offset = region.array.view(np.float32), region.offset
        buffer = Buffer(array, array, offset)
        reduction = Reduction(FLOAT32, ReduceOp.SUM, plane.size)
        return sent_in(machines, plane, lambda: plane.allreduce([buffer], reduction, soon()))

    sent = machines.run(body)
    fraction = (len(groups) - 1) / len(groups)
    for group in groups:
        assert sum(sent[rank] for rank in group) == pytest.approx(2 * fraction * nbytes, rel=0.001)


def test_every_lane_carries_its_part() -> None:
    machines = Machines([[0, 1], [2, 3]])

    def body(plane: DataPlane) -> int:
        array = np.zeros(1 << 18, np.float32)
        reduction = Reduction(FLOAT32, ReduceOp.SUM, plane.size)
        return sent_in(machines, plane, lambda: plane.allreduce([Buffer(array, array)], reduction, soon()))

    # half of the megabyte each; half of that to the other machine, and half of the result
    assert machines.run(body) == [1 << 19] * 4
