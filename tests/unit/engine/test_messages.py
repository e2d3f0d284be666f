"""Control messages: what is written is read, and nothing else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen.engine.messages import (
    Announcement,
    CacheEviction,
    ErrorCause,
    ErrorResponse,
    Operation,
    OperationKind,
    RankShutdown,
    Report,
    Response,
    ResponseList,
    ShutdownRequest,
    SubmitRequest,
    TunedParameters,
    decode_announcements,
    decode_reports,
    encode,
    pack_batches,
    pack_cache_hits,
    unpack_batches,
)
from reigen.types import ReduceOp

OPERATION = Operation(
    OperationKind.ALLTOALL, "näme", "bfloat16", (3, 0, 2**40), ReduceOp.MAX, 0.1, float("inf"), 2, (0, 3), 1 << 45
)


def test_reports_come_back() -> None:
    exchange = Operation(OperationKind.EXCHANGE, "e", payload=b"\0")
    reports: list[Report] = [SubmitRequest(OPERATION), 2**40, ShutdownRequest(), SubmitRequest(exchange)]
    assert decode_reports(encode(reports)) == reports


def test_announcements_come_back() -> None:
    announcements: list[Announcement] = [
        ResponseList(
            ((3, Response("a", 4, ((1, 2), (3, 4)), True)), (5,), (Response("e", payloads=(b"", b"\0\xff")),))
        ),
        ErrorResponse("n", ErrorCause.LATE, "why", (0, 2), (1,), ((0, "this"), (1, "that"))),
        CacheEviction((1, 2**33)),
        RankShutdown(7),
        TunedParameters(3, 1 << 27, 1 << 22, "ordered", 4, True),
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
        [1.5],
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
        decode_announcements(encode([ShutdownRequest()]))
    with pytest.raises(msgspec.DecodeError):
        decode_reports(encode([RankShutdown(1)]))


@given(st.integers(0, 200))
def test_half_a_message_is_refused(length: int) -> None:
    data = encode([SubmitRequest(OPERATION), ShutdownRequest()])
    if length < len(data):
        with pytest.raises(msgspec.DecodeError):
            decode_reports(data[:length])


def test_sizes_of_an_operation() -> None:
    assert Operation(OperationKind.ALLREDUCE, "a", "float64", (3, 5)).nbytes == 120
    assert Operation(OperationKind.ALLREDUCE, "a", "bfloat16", ()).nbytes == 2
    assert Operation(OperationKind.ALLREDUCE, "a", "int8", (0, 7)).nbytes == 0
    assert Operation(OperationKind.BARRIER, "b").nbytes == 0


@pytest.mark.parametrize("batches", [((3,),), ((3, 5), (7,)), ((0,), (1,), (2**31 - 1, 0, 4))])
def test_cached_responses_are_announced_by_integers(batches: tuple[tuple[int, ...], ...]) -> None:
    integers = pack_batches([ResponseList(batches)])
    assert integers is not None
    assert len(integers) == sum(map(len, batches))
    assert all(0 <= integer < 2**32 for integer in integers)
    assert unpack_batches(integers) == [ResponseList(batches)]


@pytest.mark.parametrize(
    "said",
    [
        [ResponseList(((3,), (Response("t"),)))],
        [ResponseList(((2**31,),))],
        [ResponseList((tuple(range(10_000)),))],
        [ResponseList(((3,),)), CacheEviction((4,))],
        [ResponseList(((3,),)), ResponseList(((4,),))],
        [CacheEviction((4,))],
        [RankShutdown(1)],
    ],
)
def test_all_else_is_announced_by_messages(said: list[Announcement]) -> None:
    assert pack_batches(said) is None


def test_only_cache_hits_are_reported_by_integers() -> None:
    assert pack_cache_hits([3, 0, 2**31 - 1]) == [3, 0, 2**31 - 1]
    assert pack_cache_hits([3, 2**31]) is None
    assert pack_cache_hits([3, SubmitRequest(OPERATION)]) is None
    assert pack_cache_hits([ShutdownRequest()]) is None
    assert pack_cache_hits([0] * 10_000) is None


def test_a_batch_without_an_end_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError, match="does not end"):
        unpack_batches([2**31 + 1, 4])
