"""Do the ranks want the same thing, and what does it come to?"""

from __future__ import annotations

from typing import Any

import pytest

from reigen.engine.agreement import disagreement, respond
from reigen.engine.messages import Kind, Operation
from reigen.types import ReduceOp


def operation(kind: Kind = Kind.ALLREDUCE, **changes: Any) -> Operation:
    values: dict[str, Any] = {"kind": kind, "name": "t", "dtype": "float32", "shape": (4, 3)}
    return Operation(**values | changes)


def told(*operations: Operation) -> tuple[str, dict[int, str]] | None:
    differing = disagreement(dict(enumerate(operations)))
    if differing is None:
        return None
    what, show = differing
    return what, {rank: show(o) for rank, o in enumerate(operations)}


@pytest.mark.parametrize(
    ("kind", "changes", "what", "first", "second"),
    [
        (Kind.ALLREDUCE, {"dtype": "int64"}, "the data types differ", "float32", "int64"),
        (Kind.ALLREDUCE, {"kind": Kind.ALLGATHER}, "the operations differ", "allreduce", "allgather"),
        (Kind.ALLREDUCE, {"device": "cuda"}, "the devices differ", "cpu (or staged there: see `reigen check`)", "cuda"),
        (Kind.ALLREDUCE, {"shape": (12,)}, "the shapes differ", "[4, 3]", "[12]"),
        (Kind.ALLREDUCE, {"shape": (4, 3, 1)}, "the shapes differ", "[4, 3]", "[4, 3, 1]"),
        (
            Kind.ALLREDUCE,
            {"prescale": 0.5},
            "the scale factors differ",
            "prescale 1.0, postscale 1.0",
            "prescale 0.5, postscale 1.0",
        ),
        (
            Kind.REDUCESCATTER,
            {"postscale": 2.0},
            "the scale factors differ",
            "prescale 1.0, postscale 1.0",
            "prescale 1.0, postscale 2.0",
        ),
        (Kind.ALLREDUCE, {"op": ReduceOp.MIN}, "the reduction operators differ", "sum", "min"),
        (Kind.REDUCESCATTER, {"shape": (5, 3)}, "the shapes differ", "[4, 3]", "[5, 3]"),
        (Kind.BROADCAST, {"shape": (3, 4)}, "the shapes differ", "[4, 3]", "[3, 4]"),
        (Kind.BROADCAST, {"root": 1}, "the root ranks differ", "root_rank -1", "root_rank 1"),
        (
            Kind.ALLGATHER,
            {"shape": (4, 2)},
            "the shapes differ in more than the first dimension",
            "[4, 3]",
            "[4, 2]",
        ),
        (Kind.ALLTOALL, {"shape": (4,)}, "the shapes differ in more than the first dimension", "[4, 3]", "[4]"),
        (Kind.ALLOCATE, {"shape": (5,)}, "the shapes differ", "[4, 3]", "[5]"),
        (Kind.FREE, {"offset": 64}, "the regions differ", "offset -1", "offset 64"),
        (Kind.BARRIER, {"dtype": ""}, "the data types differ", "float32", "no elements"),
    ],
)
def test_the_difference_is_told_of_each_rank(
    kind: Kind, changes: dict[str, Any], what: str, first: str, second: str
) -> None:
    one, other = operation(kind), operation(changes.pop("kind", kind), **changes)
    assert told(one, one, other) == (what, {0: first, 1: first, 2: second})
    assert told(other, one) == (what, {0: second, 1: first})


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Kind.ALLREDUCE, {"offset": 64}),
        (Kind.ALLREDUCE, {"root": 1}),
        (Kind.BROADCAST, {"prescale": 2.0, "op": ReduceOp.MAX}),
        (Kind.ALLGATHER, {"shape": (0, 3)}),
        (Kind.ALLTOALL, {"shape": (9, 3), "splits": (4, 5)}),
        (Kind.BARRIER, {"shape": (7,)}),
    ],
)
def test_what_a_kind_does_not_use_may_differ(kind: Kind, changes: dict[str, Any]) -> None:
    assert told(operation(kind), operation(kind, **changes)) is None


def test_the_first_difference_in_the_order_of_checks_is_told() -> None:
    [what, _] = told(operation(), operation(Kind.BROADCAST, dtype="int32", shape=(1,))) or ("", {})
    assert what == "the data types differ"


def test_a_gather_is_told_everybodys_rows_in_order_of_ranks() -> None:
    operations = {2: operation(Kind.ALLGATHER, shape=(7, 3)), 0: operation(Kind.ALLGATHER, shape=(0, 3))}
    operations[1] = operation(Kind.ALLGATHER, shape=(5, 3))
    assert respond(operations, 3).sizes == ((0, 5, 7),)
    assert respond(operations, 3).slot == 3


def test_an_exchange_is_told_everybodys_splits() -> None:
    operations = {r: operation(Kind.ALLTOALL, shape=(3, 3), splits=(r, 3 - r)) for r in (1, 0)}
    assert respond(operations, -1).sizes == ((0, 3), (1, 2))


@pytest.mark.parametrize(
    ("offsets", "in_place"), [((64, 64), True), ((64, 128), False), ((64, -1), False), ((-1, -1), False)]
)
def test_in_place_only_where_all_gave_the_same_registered_memory(offsets: tuple[int, int], in_place: bool) -> None:
    operations = {rank: operation(offset=offset) for rank, offset in enumerate(offsets)}
    assert respond(operations, 0).in_place is in_place


def test_factors_that_are_no_numbers_are_the_same_everywhere() -> None:
    nan = Operation(Kind.ALLREDUCE, "x", "float32", (2,), prescale=float("nan"))
    other = Operation(Kind.ALLREDUCE, "x", "float32", (2,), prescale=float("nan"))
    assert disagreement({0: nan, 1: other}) is None
