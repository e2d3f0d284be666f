"""A server's part of the protocol, over real sockets: rounds, errors, lost and resent messages, lost workers."""

import contextlib
import errno
import os
import re
import shutil
import socket
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reigen.cluster.membership.messages import MAX_SAVED_JOBS, MemberLeft, MemberLost, MemberReturned, SavedJob
from reigen.compression import from_params
from reigen.config import Config
from reigen.errors import (
    ArgumentError,
    AuthenticationError,
    CollectiveError,
    ConfigError,
    DeadlineError,
    MismatchError,
    PeerLostError,
    SharedMemoryError,
    UnsupportedError,
    UnsupportedTypeError,
    WireError,
)
from reigen.kv.protocol import (
    COUNT_UNKNOWN,
    DECLARE_CODEC,
    DTYPE_NUMBERS,
    PURPOSE,
    DeclareKey,
    KeySpec,
    MessageFlag,
    MessageHeader,
    MessageKind,
    ShardRange,
    pack_counts,
    unpack_counts,
)
from reigen.kv.receive_window import MIN_WINDOW_BYTES
from reigen.kv.server.server import KVServer
from reigen.kv.server.snapshots import SnapshotDirectory, find_saved_jobs
from reigen.net.auth import Identity, ProcessRole
from reigen.net.connection import open_connection
from reigen.net.listener import open_listening_socket
from reigen.optim import LARS, SGD, Adam, FactorScheduler, States, Test, unpacked
from tests.kv.serving import SECONDS, SECRET, FakeMember, RawWorker, Serving, refused_connection, start

pytestmark = pytest.mark.slow
TOP_2 = {"type": "topk", "k": 2, "ef": False}


@contextlib.contextmanager
def job(num_workers=2, config=None, *, shares=False, server=None, **facts):
    """A server and its workers."""
    serving = Serving(num_workers, config, **(server or {}))
    workers = []
    try:
        for number in range(num_workers):
            host_id = serving.server.host_id if shares else ""
            workers.append(serving.worker(number, shares=shares, host_id=host_id, **facts))
        yield serving, workers
    finally:
        for worker in workers:
            worker.close()
        serving.stop()


def push(worker, name, round_, value, kind=MessageKind.PUSH, **facts):
    return worker.begin(kind, key=name, round=round_, body=np.asarray(value, np.float32), **facts)


def set_optimizer(workers, optimizer):
    asked = [worker.command("set_optimizer", wait=False, spec=optimizer.to_spec()) for worker in workers]
    for worker, request in zip(workers, asked, strict=True):
        worker.end(request, MessageKind.DONE)


# ---------------------------------------------------------------- rounds


@pytest.mark.parametrize("shares", [False, True], ids=["sockets", "memory"])
@pytest.mark.parametrize("length", [1, 1000, 300_000])
def test_a_round_is_the_sum_of_all_workers(shares, length):
    with job(3, shares=shares) as (_, workers):
        start(workers, "w", np.full(length, 5, np.float32))
        assert (workers[2].pull("w", 0) == 5).all()
        for round_ in (1, 2, 3):
            asked = [
                push(worker, "w", round_, np.full(length, round_ * 10.0**worker.number), MessageKind.PUSHPULL)
                for worker in workers
            ]
            for worker, request in zip(workers, asked, strict=True):
                assert (worker.value(request) == round_ * 111).all()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_that_share_the_wire_of_a_server_have_bounded_windows(monkeypatch, num_workers):
    bounds = {}
    monkeypatch.setattr(
        "reigen.kv.receive_window.limit_receive_window",
        lambda connection, nbytes: bounds.setdefault(connection, []).append(nbytes),
    )
    with job(num_workers) as (_, workers):
        start(workers, "w", np.zeros(1, np.float32))
        for worker in workers:
            worker.value(worker.begin(MessageKind.PULL, key="w"))
        assert not bounds, "small messages pay nothing"
        start(workers, "v", np.zeros(1 << 18, np.float32))
        asked = [push(worker, "v", 1, np.ones(1 << 18), MessageKind.PUSHPULL) for worker in workers]
        for worker, request in zip(workers, asked, strict=True):
            assert (worker.value(request) == num_workers).all()
        assert len(bounds) == (num_workers if num_workers > 1 else 0)
        assert all(nbytes >= MIN_WINDOW_BYTES for each in bounds.values() for nbytes in each)


def test_a_push_is_answered_when_its_round_is_applied_and_a_pull_sees_it():
    with job() as (_, (zero, one)):
        start([zero, one], "w", np.zeros(4, np.float32))
        pushed = push(zero, "w", 1, [1, 2, 3, 4])
        pulled = zero.begin(MessageKind.PULL, key="w", round=1)
        assert (one.pull("w", 0) == 0).all()  # a worker that has not pushed reads what was there
        zero.line.receive()
        assert not zero.messages
        push(one, "w", 1, [10, 20, 30, 40])
        zero.end(pushed, MessageKind.DONE)
        assert list(zero.value(pulled)) == [11, 22, 33, 44]


def test_a_round_counts_workers_not_requests():
    with job() as (_, (zero, one)):
        start([zero, one], "w", np.zeros(1, np.float32))
        asked = [push(zero, "w", 1, [5]) for _ in range(4)]  # resent with other ids
        asked += [push(zero, "w", 1, [5], request=asked[-1])]  # and with the same one
        assert list(one.value(push(one, "w", 1, [7], MessageKind.PUSHPULL))) == [12]
        zero.end(asked[-1], MessageKind.DONE)
        late = push(zero, "w", 1, [5], MessageKind.PUSHPULL)  # when the round is over
        assert list(zero.value(late)) == [12]
        assert list(one.pull("w", 1)) == [12]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8"])
def test_every_dtype(dtype):
    storage = "uint16" if dtype == "bfloat16" else dtype
    numbers = np.arange(1, 6)
    given = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else None
    value = numbers.astype(storage) if given is None else given
    double = (2 * numbers).astype(storage)
    if dtype == "bfloat16":
        double = ((2 * numbers).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with job() as (_, workers):
        start(workers, "w", value, dtype=dtype)
        asked = [worker.begin(MessageKind.PUSHPULL, key="w", round=1, body=value) for worker in workers]
        for worker, request in zip(workers, asked, strict=True):
            assert list(worker.value(request, storage)) == list(double)


def test_a_key_of_several_shards_and_an_empty_one():
    places = (ShardRange(0, 0, 32, 0), ShardRange(1, 32, 50, 0))
    with job() as (_, workers):
        start(workers, "w", np.arange(50, dtype=np.float32), places)
        assert list(workers[1].pull("w", 0, shard=1)) == list(range(32, 50))
        start(workers, "empty", np.empty((0, 3), np.float32))
        asked = [push(worker, "empty", 1, [], MessageKind.PUSHPULL) for worker in workers]
        assert [len(worker.value(request)) for worker, request in zip(workers, asked, strict=True)] == [0, 0]


def test_a_value_that_is_being_read_does_not_change():
    length = 100_000
    with job(1, shares=True) as (_, (worker,)):
        start([worker], "w", np.full(length, 1, np.float32))
        worker.end(push(worker, "w", 1, np.full(length, 2)), MessageKind.DONE)
        views = {}
        arrived = worker.arrived

        def keep(line, header, body):
            if header.flags & MessageFlag.IN_MEMORY:
                views[header.request] = worker.peer.view(header.offset, header.memory_bytes).view(np.float32)
            arrived(line, header, body)

        worker.arrived = keep
        first = worker.begin(MessageKind.PULL, key="w", round=1, flags=MessageFlag.ANSWER_IN_MEMORY)
        worker.end(first, MessageKind.VALUE)
        assert (views[first] == 2).all()
        worker.end(push(worker, "w", 2, np.full(length, 3)), MessageKind.DONE)
        second = worker.begin(MessageKind.PULL, key="w", round=2, flags=MessageFlag.ANSWER_IN_MEMORY)
        worker.end(second, MessageKind.VALUE)
        assert (views[first] == 2).all(), "the value changed while it was being read"
        assert (views[second] == 3).all()
        worker.line.send(
            MessageHeader(MessageKind.RELEASE, body_bytes=16), np.array([first, second], np.uint64).tobytes()
        )
        for round_ in range(3, 8):
            worker.end(push(worker, "w", round_, np.full(length, round_)), MessageKind.DONE)
        used = [worker.begin(MessageKind.PULL, key="w", round=7, flags=MessageFlag.ANSWER_IN_MEMORY) for _ in range(2)]
        for request in used:
            worker.end(request, MessageKind.VALUE)
        assert views[used[0]].ctypes.data in {views[first].ctypes.data, views[second].ctypes.data}, (
            "memory was used again"
        )


# ---------------------------------------------------------------- keys


def test_workers_that_mean_different_things_by_a_key_are_all_told():
    with job(3) as (_, workers):
        asked = [
            workers[0].declare("w", (2, 3), wait=False),
            workers[1].declare("w", (2, 3), wait=False),
            workers[2].declare("w", (3, 2), "float16", wait=False),
        ]
        for worker, request in zip(workers, asked, strict=True):
            with pytest.raises(MismatchError) as caught:
                worker.end(request)
            assert caught.value.ranks == (2,)
            assert caught.value.details == {
                0: "'w': float32 (2, 3)",
                1: "'w': float32 (2, 3)",
                2: "'w': float16 (3, 2)",
            }
        start(workers, "w", np.zeros((2, 3), np.float32))  # they may try again


def test_a_worker_that_comes_later_is_told_what_the_key_is():
    with job() as (_, workers):
        start(workers, 7, np.arange(3, dtype=np.float32))
        told = workers[1].declare(7, (3,))
        assert told.was_initialised
        assert told.places == (ShardRange(0, 0, 3, 0),)
        with pytest.raises(MismatchError, match="means something else"):
            workers[1].declare(7, (4,))
        again = workers[0].declare(7, (3,))  # worker 0, started anew
        assert again.was_initialised
        workers[0].ask(MessageKind.INIT, key=7, body=np.full(3, 9, np.float32))
        assert list(workers[1].pull(7, 0)) == [0, 1, 2], "the value of a key that exists was replaced"


def test_a_key_is_declared_anew_before_the_first_push_only():
    cut = (ShardRange(0, 0, 32, 0), ShardRange(1, 32, 64, 0))
    with job() as (_, workers):
        value = np.arange(64, dtype=np.float32)
        start(workers, "w", value, cut)
        start(workers, "w", value, generation=1)
        assert list(workers[1].pull("w", 0)) == list(value)
        with pytest.raises(ArgumentError, match="no shard 1 of a key"):
            workers[1].pull("w", 0, shard=1)
        push(workers[0], "w", 1, value)
        workers[0].pull("w", 0)  # so the push has arrived
        with pytest.raises(ArgumentError, match="was pushed; it cannot be declared again"):
            workers[1].declare("w", (64,), generation=2)


@pytest.mark.parametrize(
    ("kind", "facts", "says"),
    [
        (MessageKind.PULL, {}, "no shard 0 of a key"),
        (MessageKind.PUSH, {"round": 1, "body": bytes(4)}, "never initialised"),
        (MessageKind.INIT, {"body": bytes(4)}, "was never declared on server 0"),
    ],
)
def test_what_was_never_initialised(kind, facts, says):
    with job(1) as (_, (worker,)), pytest.raises(ArgumentError, match=says):
        worker.ask(kind, key="w", **facts)


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize("length", [5, 200_000])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_closed_form_with_the_test_optimizer(dtype, length):
    rate, num_workers, num_rounds = 2.0, 3, 4
    with job(num_workers) as (_, workers):
        start(workers, "w", np.ones(length, dtype))
        set_optimizer(workers, Test(rescale_grad=rate))
        for round_ in range(1, num_rounds + 1):
            for worker in workers:
                worker.begin(MessageKind.PUSH, key="w", round=round_, body=np.full(length, worker.number + 1, dtype))
        for worker in workers:
            expected = 1 + rate * num_rounds * num_workers * (num_workers + 1) / 2
            assert (worker.pull("w", num_rounds, dtype) == expected).all()


def test_sgd_and_the_learning_rate():
    with job() as (_, workers):
        start(workers, "w", np.array([1, 2], np.float32))
        set_optimizer(workers, SGD(learning_rate=0.5, momentum=0.5, lr_mult={"w": 2.0}))
        for worker in workers:
            push(worker, "w", 1, [0.5, 1])
        assert list(workers[0].pull("w", 1)) == [0, 0]  # 1 - 1 * (0.5 + 0.5)
        workers[1].command("set_learning_rate", learning_rate=0.25)
        asked = [push(worker, "w", 2, [1, 1], MessageKind.PUSHPULL) for worker in workers]
        # the momentum is half of [1, 2], and half of [2, 2]
        assert list(workers[0].value(asked[0])) == [-1.5, -2]
        assert workers[0].command("get_optimizer")["learning_rate"] == 0.25


def test_small_updates_of_half_weights_add_up_in_their_float32_copy():
    with job(1) as (_, (worker,)):
        start([worker], "w", np.ones(3, np.float16))
        set_optimizer([worker], SGD(learning_rate=2.0**-14, multi_precision=True))
        for round_ in range(1, 33):
            worker.end(
                worker.begin(MessageKind.PUSH, key="w", round=round_, body=np.ones(3, np.float16)), MessageKind.DONE
            )
        assert list(worker.pull("w", 32, np.float16)) == [1 - 2.0**-9] * 3  # one of them alone is less than half an ulp
        (piece,) = States.from_bytes(worker.ask(MessageKind.GET_STATES, key="w")[1]).of("w")
        assert piece.count == 32
        assert piece.arrays["master"].dtype == np.float32


def test_layers_that_are_whole_have_their_norms():
    value, gradient = np.array([3.0, 4.0], np.float32), np.array([0.6, 0.8], np.float32)
    with job(1) as (_, (worker,)):
        start([worker], "w", value)
        set_optimizer([worker], LARS(learning_rate=1.0, momentum=0.0, eta=0.1))
        worker.end(push(worker, "w", 1, gradient), MessageKind.DONE)
        np.testing.assert_allclose(worker.pull("w", 1), value - 0.1 * 5 * gradient, rtol=1e-6)


def test_layers_that_are_cut_cannot_be_updated_by_an_optimizer_that_needs_the_whole():
    with job(1) as (_, (worker,)):
        start([worker], "w", np.ones(64, np.float32), (ShardRange(0, 0, 32, 0), ShardRange(1, 32, 64, 0)))
        set_optimizer([worker], LARS())
        with pytest.raises(ArgumentError, match="lars needs the whole value, and this key is cut"):
            worker.end(push(worker, "w", 1, np.ones(32), shard=1))


@pytest.mark.parametrize("first", ["the optimizer", "the key"])
def test_whole_numbers_are_stored_beside_what_an_optimizer_updates(first):
    with job(1) as (_, (worker,)):
        if first == "the optimizer":
            set_optimizer([worker], SGD())
        start([worker], "steps", np.arange(3))
        start([worker], "w", np.ones(1, np.float32))
        if first == "the key":
            set_optimizer([worker], SGD())
        assert list(worker.pull("steps", 0, np.int64)) == [0, 1, 2]
        with pytest.raises(UnsupportedTypeError, match="cannot update int64 values"):
            worker.end(worker.begin(MessageKind.PUSH, key="steps", round=1, body=np.arange(3)))
        worker.end(push(worker, "w", 1, [1]), MessageKind.DONE)


def test_an_optimizer_that_does_not_hold_for_all():
    with job() as (_, workers):
        start(workers, "w", np.zeros(1, np.float32))
        asked = [
            workers[0].command("set_optimizer", wait=False, spec=SGD(learning_rate=0.1).to_spec()),
            workers[1].command("set_optimizer", wait=False, spec=SGD(learning_rate=0.2).to_spec()),
        ]
        for worker, request in zip(workers, asked, strict=True):
            with pytest.raises(MismatchError, match="do not agree on the optimizer") as caught:
                worker.end(request)
            assert "learning_rate=0.2" in caught.value.details[1]
        with pytest.raises(ConfigError, match="no optimizer is called 'evil'"):
            workers[0].command("set_optimizer", spec={"name": "evil"})
        with pytest.raises(ConfigError, match="needs a dict"):
            workers[0].command("set_optimizer", spec="sgd")
        with pytest.raises(ArgumentError, match="know no command 'stop'"):
            workers[0].command("stop")
        with pytest.raises(ArgumentError, match="there is no optimizer"):
            workers[0].command("set_learning_rate", learning_rate=1.0)


def test_nothing_is_set_after_the_first_push():
    with job() as (_, workers):
        start(workers, "w", np.zeros(1, np.float32))
        push(workers[0], "w", 1, [1])
        workers[0].pull("w", 0)
        with pytest.raises(ArgumentError, match="the optimizer can be set only before the first push"):
            workers[0].command("set_optimizer", spec=SGD().to_spec())
    with job() as (_, workers):
        start(workers, "w", np.zeros(1, np.float32))
        set_optimizer(workers, Test())
        push(workers[0], "w", 1, [1])
        workers[0].pull("w", 0)
        workers[1].command("set_optimizer", spec=Test().to_spec())  # as it was: a worker that was started anew
        with pytest.raises(MismatchError, match="was set otherwise before the first push"):
            workers[1].command("set_optimizer", spec=Test(rescale_grad=2.0).to_spec())


def test_two_bit_codes_both_ways():
    first, second = [0.6, -0.7, 0.2, 0.5, -0.5], [0.4, -0.1, 0.2, 0, 0.1]
    codes = bytes.fromhex("e3800000"), bytes.fromhex("c0000000")  # MXNet's, for a threshold of 0.5
    with job() as (_, workers):
        start(workers, "w", np.zeros(5, np.float32))
        asked = [worker.command("set_gradient_compression", False, params={"type": "2bit"}) for worker in workers]
        for worker, request in zip(workers, asked, strict=True):
            worker.end(request, MessageKind.DONE)
        assert len(first) == len(second) == 5
        sums = ([1, -1, 0, 1, -1], [1, 0, 0, 0, 0])
        for round_, (code, total) in enumerate(zip(codes, sums, strict=True), 1):
            flags = MessageFlag.ENCODED | MessageFlag.ENCODE_ANSWER
            facts = {"key": "w", "round": round_, "body": code, "flags": flags}
            asked = [worker.begin(MessageKind.PUSHPULL, **facts) for worker in workers]
            for worker, request in zip(workers, asked, strict=True):
                header, body = worker.end(request, MessageKind.VALUE)
                assert header.flags & MessageFlag.ENCODED
                decoded = np.empty(5, np.float32)
                from_params({"type": "2bit", "threshold": 1.0}).decode(body, decoded)  # twice the workers' threshold
                assert list(decoded) == total
            assert list(workers[0].pull("w", round_)) == total


def test_compression_that_there_is_not():
    with job(1) as (_, (worker,)), pytest.raises(ArgumentError, match="unknown type of compression 'zip'"):
        worker.command("set_gradient_compression", params={"type": "zip"})


# ---------------------------------------------------------------- rows


def rows(numbers, values):
    return np.asarray(numbers, np.int64).tobytes() + np.asarray(values, np.float32).tobytes()


def test_rows():
    with job() as (_, workers):
        start(workers, "e", np.arange(12, dtype=np.float32).reshape(6, 2), stype="row_sparse")
        pulled = workers[0].begin(MessageKind.ROW_PULL, key="e", body=np.array([1, 4], np.int64))
        assert list(workers[0].value(pulled)) == [2, 3, 8, 9]
        set_optimizer(workers, SGD(learning_rate=1.0))
        asked = [
            workers[0].begin(MessageKind.ROW_PUSH, key="e", round=1, body=rows([1, 3], [[1, 1], [2, 2]])),
            workers[1].begin(MessageKind.ROW_PUSH, key="e", round=1, body=rows([3, 5], [[4, 4], [8, 8]])),
        ]
        for worker, request in zip(workers, asked, strict=True):
            worker.end(request, MessageKind.DONE)
        assert list(workers[0].pull("e", 1)) == [0, 1, 1, 2, 4, 5, 0, 1, 8, 9, 2, 3]
        asked = [  # one has no rows, the other all of them
            workers[0].begin(MessageKind.ROW_PUSH, key="e", round=2),
            push(workers[1], "e", 2, np.ones(12)),
        ]
        workers[0].end(asked[0], MessageKind.DONE)
        assert list(workers[0].pull("e", 2)) == [-1, 0, 0, 1, 3, 4, -1, 0, 7, 8, 1, 2]


def test_rows_without_an_optimizer_take_the_place_of_all():
    with job(1) as (_, (worker,)):
        start([worker], "e", np.ones((4, 1), np.float32), stype="row_sparse")
        worker.begin(MessageKind.ROW_PUSH, key="e", round=1, body=rows([2], [[5]]))
        assert list(worker.pull("e", 1)) == [0, 0, 5, 0]


# ---------------------------------------------------------------- workers that are not synchronous


def test_asynchronous_pushes_are_applied_at_once():
    with job(staleness=None) as (_, workers):
        start(workers, "w", np.zeros(2, np.float32))
        with pytest.raises(UnsupportedError, match="call set_optimizer"):
            workers[0].end(push(workers[0], "w", 1, [1, 1]))
        set_optimizer(workers, Test())
        for round_ in (1, 2, 3):
            workers[0].end(push(workers[0], "w", round_, [1, 2]), MessageKind.DONE)
        assert list(workers[1].pull("w", 0)) == [3, 6]


def test_a_schedule_does_not_run_faster_because_there_are_more_workers():
    schedule = FactorScheduler(step=2, factor=0.5, base_lr=1.0)
    with job(staleness=None) as (_, workers):
        start(workers, "w", np.zeros(1, np.float32))
        set_optimizer(workers, SGD(lr_scheduler=schedule))
        for round_ in (1, 2, 3):
            for worker in workers:
                worker.end(push(worker, "w", round_, [-1]), MessageKind.DONE)
        assert list(workers[0].pull("w", 3)) == [2 * (1 + 1 + 0.5)]
        parcel = workers[0].ask(MessageKind.GET_STATES, key="w")[1]
    with job(staleness=None) as (_, workers):  # training goes on
        start(workers, "w", np.zeros(1, np.float32))
        set_optimizer(workers, SGD(lr_scheduler=schedule))
        workers[0].ask(MessageKind.PUT_STATES, key="w", body=parcel)
        for round_ in (1, 2):
            for worker in workers:
                worker.end(push(worker, "w", round_, [-1]), MessageKind.DONE)
        assert list(workers[0].pull("w", 2)) == [2 * (0.5 + 0.25)]


def test_a_stale_worker_is_waited_for_in_the_end():
    with job(staleness=2) as (_, (zero, one)):
        start([zero, one], "w", np.zeros(1, np.float32))
        set_optimizer([zero, one], Test())
        for round_ in (1, 2, 3):
            zero.end(push(zero, "w", round_, [1]), MessageKind.DONE)
        assert list(zero.pull("w", 2)) == [3]
        waits = zero.begin(MessageKind.PULL, key="w", round=3)
        assert list(one.pull("w", 0)) == [3]
        zero.line.receive()
        assert not zero.messages.get(waits)
        one.end(push(one, "w", 1, [10]), MessageKind.DONE)
        assert list(zero.value(waits)) == [13]


def test_workers_must_open_the_same_type_of_store():
    with job(1) as (serving, _):
        other = serving.worker(0, staleness=3)
        assert isinstance(other.notices[0].problem.raised(), MismatchError)
        assert "a staleness of 3" in str(other.notices[0].problem.raised())
        other.close()


def test_stores_do_not_share_keys():
    with job() as (serving, workers):
        others = [serving.worker(number, store=1, staleness=None) for number in range(2)]
        start(workers, "w", np.zeros(3, np.float32))
        start(others, "w", np.ones(2, np.float32))
        assert list(workers[1].pull("w", 0)) == [0, 0, 0]
        assert list(others[1].pull("w", 0)) == [1, 1]
        for other in others:
            other.close()


# ---------------------------------------------------------------- workers that go


def lose(serving, worker, reason="its process ended"):
    worker.line.close()
    serving.member.tell(MemberLost("worker", worker.number, "there", reason))


def test_a_lost_worker_is_named_to_all():
    with job(3) as (serving, (zero, one, two)):
        start([zero, one, two], "fc.weight", np.zeros(1, np.float32))
        waits = push(zero, "fc.weight", 1, [1], MessageKind.PUSHPULL)
        lose(serving, two)
        with pytest.raises(PeerLostError) as caught:
            zero.end(waits)
        assert caught.value.ranks == (2,)
        assert str(caught.value) == (
            "key 'fc.weight': worker 2 was lost in round 1; worker 2 on host there is lost: its process ended"
        )
        one.until(lambda: one.notices)
        assert one.notices[0].what == "lost"
        assert (one.notices[0].worker, one.notices[0].host) == (2, "there")
        assert one.notices[0].problem.raised().ranks == (2,)
        with pytest.raises(PeerLostError, match="worker 2 was lost in round 1"):
            one.end(push(one, "fc.weight", 1, [1]))
        with pytest.raises(PeerLostError, match="worker 2 on host there"):
            one.declare("another", (1,))


def test_the_others_go_on_without_a_lost_worker_and_make_up_for_it():
    with job(3, Config(kv_on_worker_loss="continue")) as (serving, (zero, one, two)):
        start([zero, one, two], "w", np.zeros(1, np.float32))
        asked = [push(zero, "w", 1, [2], MessageKind.PUSHPULL), push(one, "w", 1, [4], MessageKind.PUSHPULL)]
        lose(serving, two)
        assert list(zero.value(asked[0])) == [9]  # 3/2 of the sum
        assert list(one.value(asked[1])) == [9]
        start([zero, one], "later", np.zeros(1, np.float32))
        push(zero, "later", 1, [1])
        assert list(one.value(push(one, "later", 1, [1], MessageKind.PUSHPULL))) == [3]


@pytest.mark.parametrize("event_first", [True, False])
def test_a_worker_that_takes_the_place_of_a_lost_one_goes_on_where_that_was(event_first):
    with job(2, Config(kv_on_worker_loss="wait")) as (serving, (zero, one)):
        start([zero, one], "w", np.ones(1, np.float32))
        set_optimizer([zero, one], Test())
        for worker in (zero, one):
            push(worker, "w", 1, [worker.number + 1])
        assert list(one.pull("w", 1)) == [4]
        push(one, "w", 2, [2])
        one.pull("w", 1)  # so the push has arrived
        waits = push(zero, "w", 2, [1], MessageKind.PUSHPULL) if event_first else None
        lose(serving, one)
        if event_first:
            zero.until(lambda: zero.notices)
            assert zero.notices[0].problem is None
        new = serving.worker(1, incarnation=2)
        assert new.declare("w", (1,)).was_initialised
        new.command("set_optimizer", spec=Test().to_spec())
        key = next(iter(serving.server._stores[0].shards))[0]
        _, body = new.ask(MessageKind.RESUME, body=pack_counts([(key, 0, COUNT_UNKNOWN)]))
        if waits is None:  # who else could push it again if the server died now?
            assert unpack_counts(body) == [(key, 0, 1)]
            push(new, "w", 2, [2])
            waits = push(zero, "w", 2, [1], MessageKind.PUSHPULL)
        else:
            assert unpack_counts(body) == [(key, 0, 2)], "the push of the lost worker counts"
        assert list(zero.value(waits)) == [7]
        asked = [push(worker, "w", 3, [worker.number + 1], MessageKind.PUSHPULL) for worker in (zero, new)]
        assert list(new.value(asked[1])) == [10]
        new.close()


def test_a_worker_that_was_only_silent_goes_on():
    with job(2, Config(kv_on_worker_loss="continue")) as (serving, (zero, one)):
        start([zero, one], "w", np.zeros(1, np.float32))
        serving.member.tell(MemberLost("worker", 1, "there", "nothing was heard of it for 20 s"))
        assert list(zero.value(push(zero, "w", 1, [3], MessageKind.PUSHPULL))) == [6]
        serving.member.tell(MemberReturned("worker", 1, "there", 1))
        zero.until(lambda: len(zero.notices) == 2)
        assert [notice.what for notice in zero.notices] == ["lost", "returned"]
        asked = push(zero, "w", 2, [3], MessageKind.PUSHPULL)
        assert list(one.value(push(one, "w", 2, [1], MessageKind.PUSHPULL))) == [4]
        assert list(zero.value(asked)) == [4]


def test_a_loss_that_is_told_late_is_not_that_of_the_process_that_has_come_since():
    with job(2, Config(kv_on_worker_loss="wait")) as (serving, (zero, one)):
        start([zero, one], "w", np.zeros(1, np.float32))
        one.line.close()
        new = serving.worker(1, incarnation=2)
        new.pull("w", 0)
        serving.member.tell(MemberLost("worker", 1, "there", "its process ended", True, 1))
        serving.member.tell(MemberReturned("worker", 1, "there", 2))
        asked = push(new, "w", 1, [1], MessageKind.PUSHPULL)
        assert list(zero.value(push(zero, "w", 1, [1], MessageKind.PUSHPULL))) == [2]
        assert list(new.value(asked)) == [2]
        new.close()


def test_a_worker_that_has_left_and_was_silent_is_not_waited_for():
    with job(2, Config(kv_on_worker_loss="wait")) as (serving, (zero, one)):
        start([zero, one], "w", np.zeros(1, np.float32))
        one.ask(MessageKind.GOODBYE)
        serving.member.tell(MemberLost("worker", 1, "there", "nothing was heard of it for 20 s", True, 1))
        serving.member.tell(MemberReturned("worker", 1, "there", 1))
        assert list(zero.value(push(zero, "w", 1, [1], MessageKind.PUSHPULL))) == [1]


def test_a_server_hears_of_a_worker_that_has_left_from_the_scheduler_too():
    with job(2) as (serving, (zero, one)):
        start([zero, one], "w", np.zeros(1, np.float32))
        asked = push(zero, "w", 1, [1], MessageKind.PUSHPULL)
        one.line.close()
        serving.member.tell(MemberLeft("worker", 1, "there"))
        assert list(zero.value(asked)) == [1]


@pytest.mark.parametrize("policy", ["continue", "wait"])
def test_a_worker_that_leaves_while_it_is_thought_to_be_lost_is_not_waited_for(policy):
    with job(2, Config(kv_on_worker_loss=policy)) as (serving, (zero, one)):
        start([zero, one], "w", np.zeros(1, np.float32))
        serving.member.tell(MemberLost("worker", 1, "there", "nothing was heard of it for 20 s", True, 1))
        one.ask(MessageKind.GOODBYE)
        serving.member.tell(MemberReturned("worker", 1, "there", 1))
        assert list(zero.value(push(zero, "w", 1, [1], MessageKind.PUSHPULL))) == [1]
        assert list(zero.value(push(zero, "w", 2, [2], MessageKind.PUSHPULL))) == [2]


def test_a_worker_that_has_left_is_not_waited_for():
    with job(3) as (serving, (zero, one, two)):
        start([zero, one, two], "w", np.zeros(1, np.float32))
        asked = [push(zero, "w", 1, [1], MessageKind.PUSHPULL), push(one, "w", 1, [2], MessageKind.PUSHPULL)]
        two.ask(MessageKind.GOODBYE)
        assert [list(zero.value(asked[0])), list(one.value(asked[1]))] == [[3], [3]]
        assert list(two.pull("w", 0)) == [3]
        zero.until(lambda: zero.notices)
        assert zero.notices[0].what == "left"
        lose(serving, two)  # nobody minds
        asked = [push(zero, "w", 2, [1], MessageKind.PUSHPULL), push(one, "w", 2, [1], MessageKind.PUSHPULL)]
        assert [list(zero.value(asked[0])), list(one.value(asked[1]))] == [[2], [2]]


def test_a_worker_that_connects_again_sends_again_what_was_not_answered():
    with job() as (serving, (zero, one)):
        start([zero, one], "w", np.zeros(1, np.float32))
        push(zero, "w", 1, [5])
        zero.pull("w", 0)
        zero.line.close()
        again = serving.worker(0)
        asked = push(again, "w", 1, [5], MessageKind.PUSHPULL)
        assert list(one.value(push(one, "w", 1, [7], MessageKind.PUSHPULL))) == [12]
        assert list(again.value(asked)) == [12]
        again.close()


def test_a_worker_may_connect_again_before_its_old_connection_has_ended():
    with job() as (serving, (zero, one)):
        start([zero, one], "w", np.zeros(1, np.float32))
        push(zero, "w", 1, [5])
        zero.pull("w", 0)
        strangers = [socket.socket() for _ in range(4)]
        again = serving.worker(0)
        host, _, port = serving.address.rpartition(":")
        for each in strangers:  # their connections are given the descriptor that is free now
            each.connect((host, int(port)))
        with pytest.raises(ConnectionError):
            zero.until(lambda: False)
        asked = push(again, "w", 1, [5], MessageKind.PUSHPULL)
        assert list(one.value(push(one, "w", 1, [7], MessageKind.PUSHPULL))) == [12]
        assert list(again.value(asked)) == [12]
        for each in [again, *strangers]:
            each.close()


def test_who_is_missing_when_the_deadline_is_over():
    with job(3, Config(deadline_seconds=0.2)) as (_, (zero, one, two)):
        with pytest.raises(DeadlineError, match="what the key 'x' is") as caught:
            two.declare("x", (1,))
        assert caught.value.ranks == (0, 1)
        with pytest.raises(DeadlineError, match="the optimizer") as caught:
            one.command("set_optimizer", spec=SGD().to_spec())
        assert caught.value.ranks == (0, 2)
    with job(3, Config(deadline_seconds=5.0)) as (_, (zero, one, two)):  # the key, and two's push, are there by then
        start([zero, one, two], "w", np.zeros(1, np.float32))
        asked = push(zero, "w", 1, [1], MessageKind.PUSHPULL)
        push(two, "w", 1, [1])
        with pytest.raises(DeadlineError, match="round 1 waits for worker") as caught:
            zero.end(asked)
        assert caught.value.ranks == (1,)
        assert caught.value.tensor == "key 'w'"


def test_a_server_that_did_not_run_listens_before_it_says_who_is_late():
    with (
        contextlib.closing(FakeMember()) as member,
        contextlib.closing(KVServer(member, Config(), open_listening_socket("127.0.0.1")[0])) as server,
    ):
        looks = []
        server._stores[0] = SimpleNamespace(
            layout_version=0, shards={}, expire=lambda: looks.append(True), waiting=lambda before: ()
        )
        now = time.monotonic()
        for later, num_looks in (
            (0.6, 1),
            (1000, 1),
            (1000.6, 2),
            (2000, 2),
            (3000, 3),
        ):  # it looks, however late it is
            server._tick(now + later)
            assert len(looks) == num_looks


def test_nobody_waits_for_a_value_that_worker_0_cannot_give_any_more():
    with job(2, Config(kv_on_worker_loss="continue")) as (serving, (zero, one)):
        waits = one.declare("w", (1,), wait=False)
        lose(serving, zero)
        with pytest.raises(PeerLostError, match="worker 0, whose value counts, has gone") as caught:
            one.end(waits)
        assert caught.value.ranks == (0,)


# ---------------------------------------------------------------- what is sent again


def test_receipts_and_questions():
    with job(2, Config(kv_resend=True)) as (_, (zero, one)):
        start([zero, one], "w", np.zeros(1, np.float32))

        def kinds(worker, request):
            worker.until(lambda: worker.messages.get(request))
            return [MessageKind(header.kind) for header, _ in worker.messages.pop(request)]

        request = push(zero, "w", 1, [3], MessageKind.PUSHPULL)
        assert kinds(zero, request) == [MessageKind.RECEIVED]
        facts = {"key": "w", "round": 1, "about": MessageKind.PUSHPULL}
        zero.begin(MessageKind.QUERY, request=request, **facts)
        assert kinds(zero, request) == [MessageKind.RECEIVED]
        assert list(one.value(push(one, "w", 1, [4], MessageKind.PUSHPULL))) == [7]
        assert list(zero.value(request)) == [7]
        zero.begin(MessageKind.QUERY, request=request, **facts)  # as if the answer had been lost
        assert list(zero.value(request)) == [7]
        zero.begin(MessageKind.QUERY, request=1000, key="w", round=2, about=MessageKind.PUSH)
        header, _ = zero.end(1000, MessageKind.RECEIVED)
        assert header.flags & MessageFlag.UNKNOWN
        assert header.about == MessageKind.PUSH
        zero.begin(MessageKind.QUERY, request=1001, key="w", round=1, about=MessageKind.PULL)
        assert list(zero.value(1001)) == [7]


def test_an_answer_that_waits_for_its_turn_on_the_wire_is_not_given_twice():
    size = 16 << 20  # 64 MiB: more than the kernel takes
    with job(1, Config(kv_resend=True)) as (_, (worker,)):
        start([worker], "w", np.full(size, 3, np.float32))
        request = worker.begin(MessageKind.PULL, key="w")
        for kind in (MessageKind.PULL, MessageKind.QUERY):
            worker.begin(kind, request=request, key="w", about=MessageKind.PULL)
        worker.until(lambda: len(worker.messages.get(request, ())) == 3)
        after = worker.begin(MessageKind.PULL, key="w")
        worker.until(lambda: any(header.kind == MessageKind.VALUE for header, _ in worker.messages.get(after, ())))
        kinds = [MessageKind(header.kind) for header, _ in worker.messages[request]]
        assert sorted(kinds) == sorted([MessageKind.VALUE, MessageKind.RECEIVED, MessageKind.RECEIVED])


# ---------------------------------------------------------------- what no worker sends


@pytest.mark.parametrize(
    "message",
    [
        {"kind": MessageKind.PUSH, "key": "w", "round": 1, "body": bytes(8)},
        {"kind": MessageKind.PUSH, "key": "w", "round": 0, "body": bytes(4)},
        {"kind": MessageKind.PUSH, "key": "w", "round": 1, "body": bytes(4), "flags": MessageFlag.ENCODED},
        {"kind": MessageKind.PUSH, "key": "w", "round": 1, "request": 0, "body": bytes(4)},
        {"kind": MessageKind.ROW_PUSH, "key": "w", "round": 1, "body": bytes(8)},
        {"kind": MessageKind.ROW_PULL, "key": "w", "body": np.array([5], np.int64)},
        {"kind": MessageKind.PUT_STATES, "key": "w", "body": b"rubbish"},
        {"kind": MessageKind.VALUE, "key": "w"},
        {"kind": MessageKind.HELLO},
        {"kind": MessageKind.COMMAND, "body": b"\xc1"},
        {"kind": MessageKind.DECLARE, "key": "w", "body": b""},
        {"kind": MessageKind.RESUME, "body": b"seven b"},
    ],
    ids=lambda message: MessageKind(message["kind"]).name,
)
def test_a_worker_that_sends_nonsense_loses_its_connection_and_nobody_else(message):
    with job() as (serving, (zero, one)):
        start([zero, one], "w", np.zeros(1, np.float32))
        facts = dict(message)
        kind = facts.pop("kind")
        with pytest.raises((ConnectionError, ArgumentError)):
            zero.ask(kind, **facts)
        again = serving.worker(0)
        asked = push(again, "w", 1, [1], MessageKind.PUSHPULL)
        assert list(one.value(push(one, "w", 1, [2], MessageKind.PUSHPULL))) == [3]
        assert list(again.value(asked)) == [3]
        again.close()


@pytest.mark.parametrize(
    "facts",
    [
        {"dtype": "object"},
        {"shape": (1 << 62,), "places": (ShardRange(0, 0, 1 << 62, 0),)},
        {"shape": (1 << 42,), "places": (ShardRange(0, 0, 1 << 42, 0),)},
        {"places": (ShardRange(0, 8, 0, 0),)},
        {"places": (ShardRange(0, 0, 9, 0),)},
        {"places": (ShardRange(0, 0, 8, 0), ShardRange(0, 0, 4, 0))},
        {"shape": (4, 2), "places": (ShardRange(0, 0, 3, 0),), "stype": "row_sparse"},
        {"stype": "csr"},
    ],
    ids=str,
)
def test_a_key_that_makes_no_sense_costs_the_connection_and_no_memory(facts):
    places = facts.get("places")
    facts = {name: fact for name, fact in facts.items() if name != "places"}
    with job() as (serving, (zero, one)):
        start([zero, one], "w", np.zeros(1, np.float32))
        body = DECLARE_CODEC.encode(
            DeclareKey(KeySpec(**{"name": "x", "shape": (8,), "dtype": "float32", **facts}), places)
        )
        with pytest.raises(ConnectionError):
            zero.ask(MessageKind.DECLARE, key="x", body=body)
        again = serving.worker(0)
        asked = push(again, "w", 1, [1], MessageKind.PUSHPULL)
        assert list(one.value(push(one, "w", 1, [2], MessageKind.PUSHPULL))) == [3]
        assert list(again.value(asked)) == [3]
        again.close()


def test_nobody_takes_a_key_away_that_others_use():
    with job() as (serving, (zero, one)):
        start([zero, one], "w", np.zeros(8, np.float32))
        push(zero, "w", 1, np.ones(8))
        lie = DECLARE_CODEC.encode(
            DeclareKey(KeySpec("w", (3,), "float32", generation=1 << 40), (ShardRange(0, 0, 3, 0),))
        )
        with pytest.raises(ArgumentError, match="was pushed"):
            zero.ask(MessageKind.DECLARE, key="w", body=lie)
        with pytest.raises(ConnectionError):
            one.ask(MessageKind.DECLARE, key="w", body=lie)
        again = serving.worker(1)
        assert set(again.value(push(again, "w", 1, np.ones(8), MessageKind.PUSHPULL))) == {2}
        again.close()


def test_codes_that_mean_nothing_are_refused_before_they_are_added_up():
    with job() as (serving, (zero, one)):
        asked = [each.command("set_gradient_compression", wait=False, params=TOP_2) for each in (zero, one)]
        for each, request in zip((zero, one), asked, strict=True):
            each.end(request)
        start([zero, one], "w", np.zeros(8, np.float32))
        good = np.array([1, 3], "<u4").tobytes() + np.ones(2, np.float32).tobytes()
        facts = {"key": "w", "round": 1, "flags": MessageFlag.ENCODED}
        request = zero.begin(MessageKind.PUSHPULL, body=good, **facts)
        with pytest.raises(ConnectionError):
            one.ask(MessageKind.PUSHPULL, body=np.array([1, 900], "<u4").tobytes() + good[8:], **facts)
        again = serving.worker(1)
        again.begin(MessageKind.PUSH, body=good, **facts)
        assert list(zero.value(request)) == [0, 2, 0, 2, 0, 0, 0, 0]
        again.close()


def test_memory_that_is_not_there_ends_the_connection():
    with job(shares=True) as (serving, (zero, one)):
        start([zero, one], "w", np.zeros(1, np.float32))
        key = next(iter(serving.server._stores[0].shards))[0]
        for offset, length in ((0, 0), (1 << 40, 4)):
            liar = serving.worker(0, shares=True, host_id=serving.server.host_id)
            liar.line.send(
                MessageHeader(
                    MessageKind.PUSH, 99, key, 0, 1, MessageFlag.IN_MEMORY, offset=offset, memory_bytes=length
                )
            )
            with pytest.raises(ConnectionError):
                liar.until(lambda: False)
            liar.close()
        wrong_type = {"key": "w", "round": 1, "body": bytes(4)}
        header = MessageHeader(MessageKind.PUSH, 5, dtype=DTYPE_NUMBERS["int32"], round=1, body_bytes=4)
        header = MessageHeader(**{**_fields(header), "key": key})
        one.line.send(header, wrong_type["body"])
        with pytest.raises(ConnectionError):
            one.until(lambda: False)


def _fields(header):
    return {name: getattr(header, name) for name in header.__struct_fields__}


def test_a_worker_that_stops_in_the_middle_of_a_push():
    length = 4 << 20
    with job() as (serving, (zero, one)):
        start([zero, one], "w", np.zeros(length, np.float32))
        body = np.ones(length, np.float32)
        with socket.socket(fileno=os.dup(zero.line.fileno())) as same:  # or a server that reads fast gets all of it
            same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        push(zero, "w", 1, body)  # what the kernel takes of it
        assert zero.line.wants_to_send
        zero.line.close()
        again = serving.worker(0)
        asked = push(again, "w", 1, 2 * body, MessageKind.PUSHPULL)
        again.until(lambda: not again.line.wants_to_send)
        assert (one.value(push(one, "w", 1, body, MessageKind.PUSHPULL)) == 3).all()
        assert (again.value(asked) == 3).all()
        again.close()


def test_a_worker_that_is_ahead_waits_while_another_one_comes_up(monkeypatch):
    """The server does not read it, so it holds no more than a little of what nobody else has pushed yet."""
    ahead_bytes, shard_bytes, num_shards = 1 << 18, 1 << 16, 512
    monkeypatch.setattr("reigen.kv.server.flow_control.MAX_LEAD_BYTES", ahead_bytes)
    monkeypatch.setattr("reigen.kv.server.server.MAX_LEAD_BYTES", ahead_bytes)
    monkeypatch.setattr("reigen.kv.server.flow_control.SILENT_SECONDS", 1e6)
    size = shard_bytes // 4
    places = tuple(ShardRange(index, index * size, (index + 1) * size, 0) for index in range(num_shards))
    one_call_bytes = 64 * shard_bytes  # what `Line.receive` takes before anybody looks
    with job() as (serving, workers):
        first, second = workers
        start(workers, "w", np.zeros(num_shards * size, np.float32), places)
        held = next(one.connection for one in serving.server._connections if one.worker == 0)
        most, deadline, num_looks = 0, time.monotonic() + SECONDS, 0
        asked = [
            push(first, "w", 1, np.full(size, 1), MessageKind.PUSHPULL, shard=index) for index in range(num_shards)
        ]
        while num_looks < 200:
            second.begin(MessageKind.RELEASE)  # something comes, and it is no push
            first.line.advance_sends()
            num_looks += bool(serving.server._waiting)
            most = max(most, held.num_held_bytes)
            assert time.monotonic() < deadline
        assert ahead_bytes < most <= ahead_bytes + one_call_bytes < num_shards * shard_bytes
        monkeypatch.setattr("reigen.kv.server.flow_control.SILENT_SECONDS", 0.05)
        while held.num_held_bytes < num_shards * shard_bytes:  # nothing comes any more from the other one
            first.line.advance_sends()
            assert time.monotonic() < deadline
        asked_too = [
            push(second, "w", 1, np.full(size, 2), MessageKind.PUSHPULL, shard=index) for index in range(num_shards)
        ]
        for worker, requests in ((second, asked_too), (first, asked)):
            assert all((worker.value(request) == 3).all() for request in requests)
        assert held.num_held_bytes == 0


def test_strangers_get_nowhere():
    with job() as (serving, (zero, one)):
        with pytest.raises(AuthenticationError):
            RawWorker(serving.address, 0, secret=b"x" * 32)
        host, _, port = serving.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert not stranger.recv(100)
        start([zero, one], "w", np.zeros(1, np.float32))


def test_a_worker_whose_memory_could_become_smaller_is_told(monkeypatch):
    monkeypatch.setattr("reigen.net.shm_segment.ShmSegment.only_grows", False)
    with job(1) as (serving, (zero,)):
        other = serving.worker(0, shares=True, host_id=serving.server.host_id)
        with pytest.raises(SharedMemoryError, match="on host there is not sealed"):
            raise other.notices[0].problem.raised()
        other.close()
        start([zero], "w", np.zeros(1, np.float32))


def proven(serving):
    """A connection of somebody who knows the secret, and says nothing more."""
    host, _, port = serving.address.rpartition(":")
    me = Identity(ProcessRole.RANK, 0, PURPOSE)
    return open_connection((host, int(port)), serving.member.secret, me, 1 << 12, time.monotonic() + SECONDS)


def has_ended(stream):
    with pytest.raises((ConnectionError, PeerLostError, WireError)):
        stream.receive(time.monotonic() + SECONDS)
    return True


def test_connections_that_never_say_hello_are_few_and_do_not_last(monkeypatch):
    monkeypatch.setattr("reigen.net.listener.MAX_UNAUTHENTICATED", 3)
    with job(1) as (serving, (zero,)):
        silent = [proven(serving) for _ in range(4)]
        assert has_ended(silent[0])  # the oldest
        start([zero], "w", np.zeros(1, np.float32))
        for stream in silent:
            stream.close()
        serving.server._listener._handshake_seconds = 0.2
        with contextlib.suppress(AuthenticationError), contextlib.closing(proven(serving)) as stream:
            assert has_ended(stream)  # if it has not before it was proven
        assert zero.pull("w", 0) == [0]


def test_a_worker_cannot_be_another_nor_one_that_there_is_not():
    with job(1) as (serving, _), pytest.raises(ConnectionError):
        serving.worker(7)


def test_the_server_ends_when_the_job_does():
    serving = Serving(1)
    worker = serving.worker(0)
    serving.stop(3)
    assert serving.exit_code == 3
    assert refused_connection(serving.address)
    with pytest.raises(ConnectionError):
        worker.until(lambda: False)
    worker.close()


# ---------------------------------------------------------------- states and snapshots


def test_states_go_into_another_job_that_is_cut_otherwise():
    value, places = np.arange(64, dtype=np.float32), (ShardRange(0, 0, 32, 0), ShardRange(1, 32, 64, 0))
    optimizer = Adam(learning_rate=0.1)
    with job(1) as (_, (worker,)):
        start([worker], "w", value, places)
        set_optimizer([worker], optimizer)
        for round_ in (1, 2):
            for place in places:
                worker.end(push(worker, "w", round_, value[place.begin : place.end], shard=place.index))
        stored = np.concatenate([worker.pull("w", 2, shard=place.index) for place in places])
        asked = [worker.ask(MessageKind.GET_STATES, key="w", shard=place.index)[1] for place in places]
        for place in places:
            worker.end(push(worker, "w", 3, value[place.begin : place.end], shard=place.index))
        expected = np.concatenate([worker.pull("w", 3, shard=place.index) for place in places])
    answers = [States.from_bytes(body) for body in asked]
    whole = answers[0].merged(answers[1:]).cut("w", 0, 64)
    assert whole.count == 2
    with job(1) as (_, (worker,)):
        start([worker], "w", stored)
        parcel = States([whole], None, answers[0].facts).to_bytes()
        with pytest.raises(ArgumentError, match="there is no optimizer"):
            worker.ask(MessageKind.PUT_STATES, key="w", body=parcel)
        set_optimizer([worker], optimizer)
        with pytest.raises(ArgumentError, match="not the states of the elements 0 to 64"):
            worker.ask(
                MessageKind.PUT_STATES, key="w", body=States([whole.part(0, 32)], None, answers[0].facts).to_bytes()
            )
        with pytest.raises(ArgumentError, match="checksum is wrong"):
            worker.ask(MessageKind.PUT_STATES, key="w", body=parcel[:-1] + b"x")
        worker.ask(MessageKind.PUT_STATES, key="w", body=parcel)
        worker.end(push(worker, "w", 1, value))
        assert list(worker.pull("w", 1)) == list(expected)
    with job(1) as (_, (worker,)):
        start([worker], "w", stored)
        set_optimizer([worker], SGD())
        with pytest.raises(ArgumentError, match="states of the optimizer 'adam', the store uses 'sgd'"):
            worker.ask(MessageKind.PUT_STATES, key="w", body=parcel)


def test_a_restarted_server_goes_on_from_its_snapshot(tmp_path):
    config = Config(kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=0.0)
    with job(config=config) as (serving, workers):
        start(workers, "w", np.ones(100_000, np.float32))
        set_optimizer(workers, Test())
        for worker in workers:
            push(worker, "w", 1, np.full(100_000, worker.number + 1))
        workers[0].pull("w", 1)
        pending = push(workers[0], "w", 2, np.full(100_000, 1))
        workers[0].pull("w", 1)
        serving.stop(9)  # as if it had crashed: the snapshots stay
    del pending
    with job(config=config, server={"is_recovery": True, "incarnation": 2}) as (serving, workers):
        assert not workers[0].welcome.is_empty
        (key, _) = next(iter(serving.server._stores[0].shards))
        waits = push(workers[0], "w", 2, np.full(100_000, 1), MessageKind.PUSHPULL)  # it was not answered
        for worker in workers:
            _, body = worker.ask(MessageKind.RESUME, body=pack_counts([(key, 0, 1)]))
            assert unpack_counts(body)[0][2] >= 1
        assert workers[1].declare("w", (100_000,)).was_initialised
        asked = push(workers[1], "w", 2, np.full(100_000, 2), MessageKind.PUSHPULL)
        assert (workers[0].value(waits) == 7).all()
        assert (workers[1].value(asked) == 7).all()
        assert any(tmp_path.rglob("*.shard"))
    assert not any(tmp_path.iterdir()), "the job is over: nobody needs its snapshots"


def test_rounds_that_are_in_no_snapshot_are_forgotten_and_the_job_goes_on(tmp_path, caplog):
    config = Config(kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=0.2)
    with job(config=config) as (serving, workers):
        start(workers, "w", np.ones(3, np.float32))
        set_optimizer(workers, Test())
        for worker in workers:
            push(worker, "w", 1, [1, 1, 1])
        workers[0].pull("w", 1)
        until = time.monotonic() + SECONDS
        while not _is_saved(serving, tmp_path, 3.0):
            assert time.monotonic() < until, "no snapshot"
            workers[0].pull("w", 1)
        serving.stop(9)
    with job(config=config, server={"is_recovery": True, "incarnation": 2}) as (serving, workers):
        (key, _) = next(iter(serving.server._stores[0].shards))
        for worker in workers:
            worker.ask(MessageKind.RESUME, body=pack_counts([(key, 0, 4)]))  # three more were acknowledged
        asked = [push(worker, "w", 5, [1, 1, 1], MessageKind.PUSHPULL) for worker in workers]
        for worker, request in zip(workers, asked, strict=True):
            assert list(worker.value(request)) == [5, 5, 5]
    assert "rounds 2 to 4 were acknowledged" in caplog.text


def _is_saved(serving, directory, value):
    for path in directory.rglob("*.shard"):
        _, arrays = unpacked(path.read_bytes(), Any)
        return list(arrays["value"]) == [value] * 3
    return False


def _files(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("is_recovery", [False, True])
@pytest.mark.parametrize("facts", [{"secret": b"j" * 32}, {"job": 2}])
def test_snapshots_of_another_job_are_neither_read_nor_touched(tmp_path, facts, is_recovery):
    config = Config(kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=0.0)
    with job(1, config) as (serving, (worker,)):
        start([worker], "w", np.ones(3, np.float32))
        serving.stop(9)
    before = _files(tmp_path)
    assert before
    with job(1, config, server={"is_recovery": is_recovery, **facts}) as (_, (worker,)):
        assert worker.welcome.is_empty
        start([worker], "w", np.zeros(3, np.float32))
    assert _files(tmp_path) == before  # this one has ended well, and has taken its own with it


def test_a_server_goes_on_from_the_snapshots_of_its_job_although_nobody_remembers_it(tmp_path):
    config = Config(kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=0.0)
    with job(1, config) as (serving, (worker,)):
        start([worker], "w", np.full(3, 7, np.float32))
        serving.stop(9)
    with job(1, config, server={"incarnation": 2}) as (serving, (worker,)):
        assert not worker.welcome.is_empty
        (key, _) = next(iter(serving.server._stores[0].shards))
        worker.ask(MessageKind.RESUME, body=pack_counts([(key, 0, 0)]))
        assert list(worker.pull("w", 0)) == [7, 7, 7]


@contextlib.contextmanager
def next_life(config):
    """Another process in the place of the server that was there, and its only worker, which goes on with it."""
    with job(1, config, server={"incarnation": 2}) as (serving, (worker,)):
        counts = [(key, index, COUNT_UNKNOWN) for key, index in serving.server._stores[0].shards]
        worker.ask(MessageKind.RESUME, body=pack_counts(counts))
        yield serving, worker


@pytest.mark.parametrize("seconds", [0.0, 1000.0])
def test_keys_that_were_there_before_their_optimizer_are_restored(tmp_path, seconds):
    config = Config(kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=seconds)
    optimizer, gradient = Adam(learning_rate=0.1), np.ones(3, np.float32)
    with job(1, config) as (serving, (worker,)):
        start([worker], "w", np.zeros(3, np.float32))
        start([worker], "n", np.zeros(2, np.int32))
        set_optimizer([worker], optimizer)
        serving.stop(9)
    with next_life(config) as (serving, worker):
        worker.end(push(worker, "w", 1, gradient))
        assert worker.pull("w", 1) == pytest.approx([-0.1] * 3)
        serving.stop(9)
    with next_life(config) as (_, worker):
        assert worker.pull("w", 0) == pytest.approx([-0.1 if seconds == 0 else 0.0] * 3)
        assert list(worker.pull("n", 0, dtype=np.int32)) == [0, 0]


def test_states_that_were_loaded_are_saved_before_that_is_acknowledged(tmp_path):
    config = Config(kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=0.0)
    with job(1, config) as (serving, (worker,)):
        start([worker], "w", np.zeros(3, np.float32))
        set_optimizer([worker], SGD(learning_rate=1.0, momentum=0.5))
        worker.end(push(worker, "w", 1, [1, 1, 1]))
        after_one = worker.ask(MessageKind.GET_STATES, key="w")[1]
        worker.end(push(worker, "w", 2, [8, 8, 8]))
        worker.ask(MessageKind.PUT_STATES, key="w", body=after_one)
        serving.stop(9)
    with next_life(config) as (_, worker):
        assert worker.ask(MessageKind.GET_STATES, key="w")[1] == after_one


def test_what_others_put_among_the_jobs_is_not_opened(tmp_path):
    tmp_path.chmod(0o1777)
    config = Config(kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=0.0)
    with job(1, config) as (serving, (worker,)):
        start([worker], "w", np.ones(3, np.float32))
        serving.stop(9)
    (own,) = tmp_path.glob("job-*")
    forged = own.with_name(f"{own.name.rpartition('-')[0]}-{9:016x}")
    (forged / "server-0").mkdir(parents=True)
    forged.chmod(0o777)
    os.mkfifo(forged / "server-0" / "store-0.store")  # who opens it waits for somebody who writes
    assert find_saved_jobs(str(tmp_path), SECRET) == (SavedJob(1),)


def test_snapshots_that_somebody_has_removed_are_no_failure(tmp_path, caplog):
    config = Config(kv_snapshot_dir=str(tmp_path / "s"), kv_snapshot_seconds=1000.0)
    with job(1, config) as (serving, (worker,)):
        start([worker], "w", np.ones(3, np.float32))
        shutil.rmtree(tmp_path / "s")
        serving.stop(0)
    assert serving.exit_code == 0
    assert "could not be removed: No such file or directory" in caplog.text


def test_a_job_that_goes_on_without_a_worker_leaves_its_snapshots(tmp_path):
    config = Config(kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=0.0, kv_on_worker_loss="continue")
    with job(2, config) as (serving, workers):
        start(workers, "w", np.ones(3, np.float32))
        serving.member.tell(MemberLost("worker", 1, "h", "its process ended", False, 1))
        serving.stop(0)
    assert any(tmp_path.rglob("*.shard"))


def test_a_job_takes_only_its_own_files_with_it(tmp_path):
    config = Config(kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=0.0)
    with job(1, config) as (_, (worker,)):
        start([worker], "w", np.ones(3, np.float32))
        (directory,) = tmp_path.glob("job-*/server-0")
        (directory / ".store-0.store.1-abcd.tmp").touch()  # a process was killed while it wrote
        (directory / "notes").write_text("mine")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["notes"]


def test_snapshots_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        with job(1, Config(kv_snapshot_dir=str(tmp_path / "a" / "b"), kv_snapshot_seconds=0.0)) as (_, (worker,)):
            start([worker], "w", np.ones(3, np.float32))
            made = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
            assert len(made) == 6
            assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
            assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda base, own: base.chmod(0o777), "may be changed by others (mode 0777). Set REIGEN_KV_SNAPSHOT_DIR to a"),
        (
            lambda base, own: os.chown(base, 65534, 65534),
            "belongs to user 65534, this process to user 0. Set REIGEN_KV_SNAPSHOT_DIR to a",
        ),
        (lambda base, own: os.chown(own, 65534, 65534), "it belongs to user 65534, this process to user"),
        (lambda base, own: os.chown(own.parent, 65534, 65534), "it belongs to user 65534, this process to user"),
        (lambda base, own: own.chmod(0o750), "it may be used by others (mode 0750), and should be of mode 0700"),
        (lambda base, own: (own.rename(base / "x"), own.symlink_to(base / "x")), "it is no directory"),
    ],
)
def test_a_directory_that_others_can_get_at_is_refused(tmp_path, spoil, problem):
    if os.geteuid() and "65534" in problem:
        pytest.skip("only root can give files away")
    config = Config(kv_snapshot_dir=str(tmp_path / "s"), kv_snapshot_seconds=0.0)
    with job(1, config) as (serving, (worker,)):
        start([worker], "w", np.ones(3, np.float32))
        serving.stop(9)
    (own,) = tmp_path.glob("s/job-*/server-0")
    before = sorted(_files(tmp_path).values())
    spoil(tmp_path / "s", own)
    with pytest.raises(ConfigError, match=re.escape(problem)):
        Serving(1, config)
    assert sorted(_files(tmp_path).values()) == before


def test_a_directory_in_which_everybody_makes_their_own_will_do(tmp_path):
    tmp_path.chmod(0o1777)
    with job(1, Config(kv_snapshot_dir=str(tmp_path))) as (_, (worker,)):
        start([worker], "w", np.ones(3, np.float32))


def test_two_processes_never_save_as_the_same_server(tmp_path):
    config = Config(kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=0.0)
    with job(1, config) as (_, (worker,)):
        start([worker], "w", np.ones(3, np.float32))
        with pytest.raises(ConfigError, match="another process still saves the snapshots in"):
            Serving(1, config, incarnation=2)


def test_what_cannot_be_saved_is_not_acknowledged_for_good(tmp_path, monkeypatch):
    config = Config(kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=0.0)
    with job(1, config) as (_, (worker,)):
        start([worker], "w", np.ones(3, np.float32))
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        monkeypatch.setattr(SnapshotDirectory, "save_store", lambda *_: (_ for _ in ()).throw(full))
        with contextlib.suppress(CollectiveError):  # the answer is on its way before the disk is asked
            start([worker], "v", np.ones(3, np.float32))
        with pytest.raises(CollectiveError, match=r"could not save a snapshot: .*No space left on device"):
            worker.pull("w", 0)


def test_the_jobs_that_a_disk_knows_are_found_with_who_had_left(tmp_path):
    config = Config(kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=0.0)
    for number in range(1, MAX_SAVED_JOBS + 3):
        with job(2, config, server={"job": number}) as (serving, workers):
            start(workers, "w", np.ones(3, np.float32))
            if number == 3:
                workers[1].ask(MessageKind.GOODBYE)
            serving.stop(9)
    Serving(1, config, job=99).stop(9)  # nothing was saved
    newest = range(MAX_SAVED_JOBS + 2, 2, -1)
    assert find_saved_jobs(str(tmp_path), SECRET) == tuple(SavedJob(n, (1,) if n == 3 else ()) for n in newest)
    assert find_saved_jobs(str(tmp_path), b"j" * 32) == find_saved_jobs(str(tmp_path / "none"), SECRET) == ()


def test_a_key_is_in_the_snapshot_before_its_init_is_answered(tmp_path):
    config = Config(kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=1000.0)
    with job(1, config) as (_, (worker,)):
        start([worker], "w", np.ones(300_000, np.float32))
        (path,) = tmp_path.rglob("*.shard")
        assert (unpacked(path.read_bytes(), Any)[1]["value"] == 1).all()


def test_a_job_that_failed_leaves_its_snapshots_and_no_empty_directories(tmp_path):
    config = Config(kv_snapshot_dir=str(tmp_path))
    Serving(1, config).stop(1)  # nothing was ever stored
    assert not list(tmp_path.iterdir())
    with job(1, config) as (serving, workers):
        start(workers, "w", np.zeros(1, np.float32))
        serving.stop(1)
    assert len(list(tmp_path.glob("job-*/server-0/*.shard"))) == 1


def test_a_damaged_snapshot_is_told(tmp_path):
    config = Config(kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=0.0)
    with job(1, config) as (serving, (worker,)):
        start([worker], "w", np.ones(10, np.float32))
        worker.pull("w", 0)
        serving.stop(9)
    path = next(tmp_path.rglob("*.shard"))
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)
    with pytest.raises(Exception, match="checksum is wrong") as caught:
        Serving(1, config, is_recovery=True)
    assert path.name in str(caught.value)
