"""Do the ranks want the same thing, and what does it come to?"""

from __future__ import annotations

from typing import Any

import pytest

from reigen.engine.messages import Operation, OperationKind
from reigen.engine.validation import build_response, find_mismatch
from reigen.types import ReduceOp


def operation(kind: OperationKind = OperationKind.ALLREDUCE, **changes: Any) -> Operation:
    values: dict[str, Any] = {"kind": kind, "name": "t", "dtype": "float32", "shape": (4, 3)}
    return Operation(**values | changes)


def told(*operations: Operation) -> tuple[str, dict[int, str]] | None:
    differing = find_mismatch(dict(enumerate(operations)))
    if differing is None:
        return None
    what, show = differing
    return what, {rank: show(o) for rank, o in enumerate(operations)}


@pytest.mark.parametrize(
    ("kind", "changes", "what", "first", "second"),
    [
        (OperationKind.ALLREDUCE, {"dtype": "int64"}, "the data types differ", "float32", "int64"),
        (OperationKind.ALLREDUCE, {"kind": OperationKind.ALLGATHER}, "the operations differ", "allreduce", "allgather"),
        (
            OperationKind.ALLREDUCE,
            {"device": "cuda"},
            "the devices differ",
            "cpu (or staged there: see `reigen check`)",
            "cuda",
        ),
        (OperationKind.ALLREDUCE, {"shape": (12,)}, "the shapes differ", "[4, 3]", "[12]"),
        (OperationKind.ALLREDUCE, {"shape": (4, 3, 1)}, "the shapes differ", "[4, 3]", "[4, 3, 1]"),
        (
            OperationKind.ALLREDUCE,
            {"prescale": 0.5},
            "the scale factors differ",
            "prescale 1.0, postscale 1.0",
            "prescale 0.5, postscale 1.0",
        ),
        (
            OperationKind.REDUCESCATTER,
            {"postscale": 2.0},
            "the scale factors differ",
            "prescale 1.0, postscale 1.0",
            "prescale 1.0, postscale 2.0",
        ),
        (OperationKind.ALLREDUCE, {"op": ReduceOp.MIN}, "the reduction operators differ", "sum", "min"),
        (OperationKind.REDUCESCATTER, {"shape": (5, 3)}, "the shapes differ", "[4, 3]", "[5, 3]"),
        (OperationKind.BROADCAST, {"shape": (3, 4)}, "the shapes differ", "[4, 3]", "[3, 4]"),
        (OperationKind.BROADCAST, {"root": 1}, "the root ranks differ", "root_rank -1", "root_rank 1"),
        (OperationKind.EXCHANGE, {"root": 1}, "the root ranks differ", "no root_rank", "root_rank 1"),
        (
            OperationKind.ALLGATHER,
            {"shape": (4, 2)},
            "the shapes differ in more than the first dimension",
            "[4, 3]",
            "[4, 2]",
        ),
        (
            OperationKind.ALLTOALL,
            {"shape": (4,)},
            "the shapes differ in more than the first dimension",
            "[4, 3]",
            "[4]",
        ),
        (OperationKind.ALLOCATE, {"shape": (5,)}, "the shapes differ", "[4, 3]", "[5]"),
        (OperationKind.FREE, {"offset": 64}, "the regions differ", "offset -1", "offset 64"),
        (OperationKind.BARRIER, {"dtype": ""}, "the data types differ", "float32", "no elements"),
    ],
)
def test_the_difference_is_told_of_each_rank(
    kind: OperationKind, changes: dict[str, Any], what: str, first: str, second: str
) -> None:
    one, other = operation(kind), operation(changes.pop("kind", kind), **changes)
    assert told(one, one, other) == (what, {0: first, 1: first, 2: second})
    assert told(other, one) == (what, {0: second, 1: first})


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (OperationKind.ALLREDUCE, {"offset": 64}),
        (OperationKind.ALLREDUCE, {"root": 1}),
        (OperationKind.BROADCAST, {"prescale": 2.0, "op": ReduceOp.MAX}),
        (OperationKind.ALLGATHER, {"shape": (0, 3)}),
        (OperationKind.ALLTOALL, {"shape": (9, 3), "splits": (4, 5)}),
        (OperationKind.BARRIER, {"shape": (7,)}),
    ],
)
def test_what_a_kind_does_not_use_may_differ(kind: OperationKind, changes: dict[str, Any]) -> None:
    assert told(operation(kind), operation(kind, **changes)) is None


def test_the_first_difference_in_the_order_of_checks_is_told() -> None:
    [what, _] = told(operation(), operation(OperationKind.BROADCAST, dtype="int32", shape=(1,))) or ("", {})
    assert what == "the data types differ"


def test_a_gather_is_told_everybodys_rows_in_order_of_ranks() -> None:
    operations = {
        2: operation(OperationKind.ALLGATHER, shape=(7, 3)),
        0: operation(OperationKind.ALLGATHER, shape=(0, 3)),
    }
    operations[1] = operation(OperationKind.ALLGATHER, shape=(5, 3))
    assert build_response(operations, 3).sizes == ((0, 5, 7),)
    assert build_response(operations, 3).slot == 3


def test_an_exchange_is_told_everybodys_splits() -> None:
    operations = {r: operation(OperationKind.ALLTOALL, shape=(3, 3), splits=(r, 3 - r)) for r in (1, 0)}
    assert build_response(operations, -1).sizes == ((0, 3), (1, 2))


@pytest.mark.parametrize(
    ("offsets", "in_place"), [((64, 64), True), ((64, 128), False), ((64, -1), False), ((-1, -1), False)]
)
def test_in_place_only_where_all_gave_the_same_registered_memory(offsets: tuple[int, int], in_place: bool) -> None:
    operations = {rank: operation(offset=offset) for rank, offset in enumerate(offsets)}
    assert build_response(operations, 0).in_place is in_place


def test_factors_that_are_no_numbers_are_the_same_everywhere() -> None:
    nan = Operation(OperationKind.ALLREDUCE, "x", "float32", (2,), prescale=float("nan"))
    other = Operation(OperationKind.ALLREDUCE, "x", "float32", (2,), prescale=float("nan"))
    assert find_mismatch({0: nan, 1: other}) is None
