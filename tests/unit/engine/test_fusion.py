"""Which ready operations travel together."""

from __future__ import annotations

from typing import Any

import pytest

from reigen.engine.fusion import fuse_responses
from reigen.engine.messages import Operation, OperationKind, Response
from reigen.types import ReduceOp


def ready(elements: int, name: str = "t", in_place: bool = False, **changes: Any) -> tuple[Operation, Response]:
    values: dict[str, Any] = {"kind": OperationKind.ALLREDUCE, "name": name, "dtype": "float32", "shape": (elements,)}
    return Operation(**values | changes), Response(name, in_place=in_place)


def test_what_fits_travels_together() -> None:
    assert fuse_responses([ready(10), ready(10), ready(10)], 120) == [[0, 1, 2]]


def test_the_threshold_bounds_a_batch() -> None:
    assert fuse_responses([ready(10), ready(10), ready(10)], 119) == [[0, 1], [2]]


def test_the_search_goes_on_behind_what_does_not_fit() -> None:
    assert fuse_responses([ready(10), ready(100), ready(25), ready(10), ready(1)], 100) == [[0, 3, 4], [1], [2]]


def test_larger_than_the_threshold_travels_alone() -> None:
    assert fuse_responses([ready(1), ready(1000), ready(1)], 100) == [[0, 2], [1]]


def test_threshold_zero_turns_fusion_off() -> None:
    assert fuse_responses([ready(1), ready(0), ready(1)], 0) == [[0], [1], [2]]


@pytest.mark.parametrize(
    "other",
    [
        ready(1, dtype="float64"),
        ready(1, op=ReduceOp.MAX),
        ready(1, prescale=0.5),
        ready(1, postscale=0.5),
        ready(1, in_place=True),
        ready(1, device="cuda"),
    ],
)
def test_only_the_same_reduction_is_fused(other: tuple[Operation, Response]) -> None:
    assert fuse_responses([ready(1), other, ready(1)], 1000) == [[0, 2], [1]]


def group(*members: tuple[Operation, Response]) -> tuple[Operation, Response]:
    operations, responses = zip(*members, strict=True)
    return Operation(OperationKind.ALLREDUCE, "g", members=operations), Response("g", members=responses)


def test_a_group_whose_members_are_alike_is_one_tensor_of_their_size() -> None:
    alike = group(ready(5), ready(5))
    assert fuse_responses([ready(10), alike, ready(10)], 80) == [[0, 1], [2]]
    assert fuse_responses([alike, alike], 80) == [[0, 1]]
    assert fuse_responses([alike, ready(1)], 40) == [[0], [1]]
    assert fuse_responses([ready(10), alike, ready(10)], 1000, fuse_groups=False) == [[0, 2], [1]]


def test_a_group_whose_members_differ_travels_alone() -> None:
    mixed = group(ready(5), ready(5, dtype="float64"))
    assert fuse_responses([mixed, ready(1), mixed, ready(1, dtype="float64")], 1000) == [[0], [1], [2], [3]]


def test_what_others_stand_in_for_is_not_fused_with_what_all_have() -> None:
    operation, response = ready(1)
    with_stand_ins = operation, Response("t", num_active=1)
    assert fuse_responses([(operation, response), with_stand_ins, with_stand_ins], 1000) == [[0], [1, 2]]
    in_a_set = ready(1, process_set=1)
    assert fuse_responses([(operation, response), in_a_set], 1000) == [[0], [1]]


@pytest.mark.parametrize("kind", [kind for kind in OperationKind if kind is not OperationKind.ALLREDUCE])
def test_everything_else_travels_alone(kind: OperationKind) -> None:
    assert fuse_responses([ready(1), ready(1, kind=kind), ready(1, kind=kind), ready(1)], 1000) == [[0, 3], [1], [2]]


def test_many_that_share_nothing_stay_affordable() -> None:
    batches = fuse_responses([ready(60) for _ in range(20_000)], 400)
    assert sorted(i for batch in batches for i in batch) == list(range(20_000))
    assert all(len(batch) == 1 for batch in batches)


def test_nothing_is_ready() -> None:
    assert fuse_responses([], 100) == []
