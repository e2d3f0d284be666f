"""Control messages: what is written is read, and nothing else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen.engine.messages import (
    Announcement,
    Cause,
    Forget,
    Kind,
    Leave,
    Left,
    Operation,
    Ready,
    Refuse,
    Report,
    Response,
    Run,
    Submit,
    decode_announcements,
    decode_reports,
    encode,
)
from reigen.types import ReduceOp

OPERATION = Operation(
    Kind.ALLTOALL, "näme", "bfloat16", (3, 0, 2**40), ReduceOp.MAX, 0.1, float("inf"), 2, (0, 3), 1 << 45
)


def test_reports_come_back() -> None:
    reports: list[Report] = [Submit(OPERATION), Ready(2**40), Leave(), Submit(Operation(Kind.BARRIER, "b"))]
    assert decode_reports(encode(reports)) == reports


def test_announcements_come_back() -> None:
    announcements: list[Announcement] = [
        Run(((3, Response("a", 4, ((1, 2), (3, 4)), True)), (5,))),
        Refuse("n", Cause.LATE, "why", (0, 2), (1,), ((0, "this"), (1, "that"))),
        Forget((1, 2**33)),
        Left(7),
    ]
    assert decode_announcements(encode(announcements)) == announcements


@given(st.binary(max_size=200))
def test_garbage_is_refused(data: bytes) -> None:
    for decode in (decode_reports, decode_announcements):
        try:
            messages = decode(data)
        except msgspec.DecodeError:
            continue
        assert isinstance(messages, list)  # a list that happens to be valid


@pytest.mark.parametrize(
    "thing",
    [
        None,
        {},
        [1],
        [[1]],
        [[99, 1]],
        [[11, [["a"]]]],
        [[2, "slot"]],
        [[1, [0]]],
        [[1, [77, "a"]]],
        [[1, [0, "a", "float32", [1.5]]]],
    ],
)
def test_what_is_no_message_is_refused(thing: object) -> None:
    data = msgspec.msgpack.encode(thing)
    with pytest.raises(msgspec.DecodeError):
        decode_reports(data)
    with pytest.raises(msgspec.DecodeError):
        decode_announcements(data)


def test_the_two_directions_are_not_mixed_up() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_announcements(encode([Leave()]))
    with pytest.raises(msgspec.DecodeError):
        decode_reports(encode([Left(1)]))


@given(st.integers(0, 200))
def test_half_a_message_is_refused(length: int) -> None:
    data = encode([Submit(OPERATION), Leave()])
    if length < len(data):
        with pytest.raises(msgspec.DecodeError):
            decode_reports(data[:length])


def test_sizes_of_an_operation() -> None:
    assert Operation(Kind.ALLREDUCE, "a", "float64", (3, 5)).nbytes == 120
    assert Operation(Kind.ALLREDUCE, "a", "bfloat16", ()).nbytes == 2
    assert Operation(Kind.ALLREDUCE, "a", "int8", (0, 7)).nbytes == 0
    assert Operation(Kind.BARRIER, "b").nbytes == 0
