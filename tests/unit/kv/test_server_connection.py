"""A worker's connection to a server that says what a test wants: what is sent again, and what is no message."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reigen.cluster.membership.messages import ServerInfo
from reigen.config import Config
from reigen.errors import ArgumentError, AuthenticationError, WireError
from reigen.kv.client.requests import BatchRequest, ClientRequest, KeyOrder, KVOperation
from reigen.kv.client.server_connection import ServerConnection
from reigen.kv.connection import KVConnection
from reigen.kv.counters import StoreCounters
from reigen.kv.protocol import (
    HELLO_CODEC,
    NOTICE_CODEC,
    PURPOSE,
    REMOTE_ERROR_CODEC,
    KVHello,
    MessageFlag,
    MessageHeader,
    MessageKind,
    RemoteError,
    ServerNotice,
    pack_counts,
)
from reigen.kv.receive_window import MIN_WINDOW_BYTES, WINDOW_STEP_BYTES, ReceiveRate
from reigen.kv.shm_arena import ShmArena
from reigen.net.auth import Identity, ProcessRole
from tests.accepting import accept_connection

SECONDS = 10.0
SECRET = b"u" * 32


class Server:
    """The other end, one connection at a time, by hand."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.line: KVConnection | None = None
        self.heard: list[tuple[MessageHeader, bytes]] = []

    def meet(self, upstream: ServerConnection, secret: bytes = SECRET) -> None:
        """Let the worker connect."""
        if self.line is not None:
            self.line.close()

        def answer() -> None:
            connection, _ = self.listener.accept()
            try:
                me = Identity(ProcessRole.RANK, 0, PURPOSE)
                stream = accept_connection(connection, secret, me, 1 << 12, time.monotonic() + SECONDS)
            except AuthenticationError:
                return
            self.line = KVConnection(*stream.detach(), self, "worker")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            deadline = time.monotonic() + SECONDS
            while upstream.is_connecting or (upstream.lost_since is not None and thread.is_alive()):
                upstream.connect()
                if upstream.is_connecting:
                    select.select([upstream], [upstream] if upstream.wants_to_send else [], [], 0.01)
                    upstream.receive()
                assert time.monotonic() < deadline
        finally:
            thread.join(SECONDS)

    def welcome(self, upstream: ServerConnection, **facts: Any) -> None:
        hello = HELLO_CODEC.encode(KVHello(**{"number": 3, "incarnation": 1, "host": "h", **facts}))
        self.say(MessageHeader(MessageKind.WELCOME, body_bytes=len(hello)), hello)
        upstream.receive()

    def place(self, line: KVConnection, header: MessageHeader) -> memoryview:
        return memoryview(bytearray(header.body_bytes))

    def arrived(self, line: KVConnection, header: MessageHeader, body: memoryview) -> None:
        self.heard.append((header, bytes(body)))

    def hear(self, number: int) -> list[tuple[MessageHeader, bytes]]:
        """The next messages; these and no more."""
        assert self.line is not None
        deadline = time.monotonic() + SECONDS
        while len(self.heard) < number:
            assert time.monotonic() < deadline
            self.line.receive()
        self.line.receive()
        heard, self.heard = self.heard, []
        assert len(heard) == number
        return heard

    def say(self, header: MessageHeader, body: bytes = b"") -> None:
        assert self.line is not None
        self.line.send(header, body)
        self.line.advance_sends()

    def close(self) -> None:
        self.listener.close()
        if self.line is not None:
            self.line.close()


class Owner:
    def __init__(self) -> None:
        self.ended: list[ClientRequest] = []
        self.parts: list[tuple[BatchRequest, int]] = []
        self.notices: list[ServerNotice] = []
        self.known = [(7, 0, 2)]
        self.num_empty = 0

    def over(self, request: ClientRequest) -> None:
        request.note()
        self.ended.append(request)
        request.operation.num_left -= 1

    def key_completed(self, batch: BatchRequest, place: int, *, is_done: bool) -> None:
        batch.complete_part(place, is_done=is_done)
        self.parts.append((batch, place))

    def handle_notice(self, notice: ServerNotice) -> None:
        self.notices.append(notice)

    def counts(self, server: int) -> list[tuple[int, int, int]]:
        return self.known

    def server_lost_state(self, upstream: ServerConnection) -> None:
        self.num_empty += 1


class Bench:
    """A worker's end that is ready, and the server's."""

    def __init__(
        self, *, resend_seconds: float | None = None, host_id: str = "", inflow: ReceiveRate | None = None
    ) -> None:
        self.server, self.owner = Server(), Owner()
        hello = KVHello(1, 9, "w", host_id)
        member: Any = SimpleNamespace(number=1, secret=SECRET, tls=None, counters=StoreCounters())
        config = Config(kv_resend=resend_seconds is not None, kv_resend_timeout_ms=int(1000 * (resend_seconds or 1)))
        self.upstream = ServerConnection(
            ServerInfo(3, self.server.address, 1, "h"), member, config, hello, 5, self.owner, inflow
        )

    def begin(self, kind: MessageKind = MessageKind.PUSH, **facts: Any) -> ClientRequest:
        operation = KVOperation(None, "a test")  # type: ignore[arg-type]  # nobody waits
        operation.num_left = 1
        request = ClientRequest(MessageHeader(kind, key=7, round=3), 3, operation, **facts)
        self.upstream.submit(request)
        self.upstream.flush()
        return request

    def answer(
        self, request: ClientRequest, kind: MessageKind, body: bytes = b"", flags: int = 0, **facts: Any
    ) -> None:
        self.server.say(
            MessageHeader(kind, request.header.request, flags=flags, store=5, body_bytes=len(body), **facts), body
        )
        self.upstream.receive()


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*, welcome: dict[str, Any] | None = None, **options: Any) -> Bench:
        one = Bench(**options)
        made.append(one)
        one.server.meet(one.upstream)
        assert one.server.hear(1)[0][0].kind == MessageKind.HELLO
        one.server.welcome(one.upstream, **(welcome or {}))
        assert one.upstream.is_ready
        return one

    yield make
    for one in made:
        one.upstream.close()
        one.server.close()


Make = Callable[..., Bench]


def test_requests_leave_and_answers_come_back(bench: Make) -> None:
    one = bench()
    request = one.begin(body=b"abcd")
    header, body = one.server.hear(1)[0]
    assert (header.kind, header.key, header.round, header.store, body) == (MessageKind.PUSH, 7, 3, 5, b"abcd")
    assert not header.flags
    one.answer(request, MessageKind.DONE)
    assert one.owner.ended == [request]
    assert not one.upstream.outstanding


def test_values_land_where_they_belong(bench: Make) -> None:
    one = bench()
    into = np.zeros(3, np.float32)
    request = one.begin(MessageKind.PULL, into=into)
    one.answer(request, MessageKind.VALUE, np.arange(3, dtype=np.float32).tobytes())
    assert into.tolist() == [0, 1, 2]
    one.answer(request, MessageKind.VALUE, np.ones(3, np.float32).tobytes())
    assert into.tolist() == [0, 1, 2], "an answer that comes twice goes nowhere"
    asked = one.begin(MessageKind.GET_STATES)
    one.answer(asked, MessageKind.VALUE, b"states")
    assert asked.answer == b"states"


@pytest.mark.parametrize("shares_a_wire", [False, True])
def test_what_is_on_its_way_to_workers_that_share_a_servers_wire_is_bounded(
    bench: Make, monkeypatch: pytest.MonkeyPatch, shares_a_wire: bool
) -> None:
    bounds: list[int] = []
    monkeypatch.setattr("reigen.kv.receive_window.limit_receive_window", lambda _, nbytes: bounds.append(nbytes))
    one = bench(inflow=ReceiveRate() if shares_a_wire else None)
    into = np.zeros(WINDOW_STEP_BYTES, np.uint8)
    for _ in range(2):
        one.answer(one.begin(MessageKind.PULL, into=into), MessageKind.VALUE, bytes(range(256)) * (len(into) // 256))
        assert one.server.hear(1)
        deadline = time.monotonic() + SECONDS
        while one.upstream.outstanding:
            assert time.monotonic() < deadline
            one.upstream.receive()
    assert into.tolist() == list(range(256)) * (len(into) // 256)
    assert len(bounds) == (2 if shares_a_wire else 0)
    assert all(nbytes == MIN_WINDOW_BYTES for nbytes in bounds)
    one.upstream.lose(ConnectionResetError("a test"))
    one.server.meet(one.upstream)  # another connection is counted from its beginning
    assert one.server.hear(1)


def test_values_in_the_servers_memory_are_given_back_together(bench: Make) -> None:
    arena = ShmArena("test")
    segment = arena.segment
    shared = {"host_id": "m", "pid": os.getpid(), "fd": segment.fd, "inode": segment.inode}
    one = bench(host_id="m", welcome=shared)
    block = arena.allocate(12)
    block.array.view(np.float32)[:] = 7
    where = {"flags": MessageFlag.IN_MEMORY, "offset": block.offset, "memory_bytes": 12}
    intos = [np.zeros(3, np.float32) for _ in range(4)]
    requests = [one.begin(MessageKind.PULL, into=into) for into in intos[:3]]
    one.server.hear(3)
    one.answer(requests[0], MessageKind.VALUE, **where)
    one.upstream.flush()
    requests.append(one.begin(MessageKind.PULL, into=intos[3]))
    (release, ids), (asked, _) = one.server.hear(2)
    assert (release.kind, np.frombuffer(ids, "<u8").tolist()) == (MessageKind.RELEASE, [requests[0].header.request])
    assert asked.request == requests[3].header.request, "what is asked next takes it along"
    for request in requests[1:]:
        one.answer(request, MessageKind.VALUE, **where)
        one.upstream.flush()
    ((release, ids),) = one.server.hear(1)
    assert release.kind == MessageKind.RELEASE, "with the last answer"
    assert np.frombuffer(ids, "<u8").tolist() == [each.header.request for each in requests[1:]]
    assert np.stack(intos).tolist() == [[7, 7, 7]] * 4
    arena.close()


def test_errors_are_those_of_the_server(bench: Make) -> None:
    one = bench()
    request = one.begin()
    one.answer(request, MessageKind.ERROR, REMOTE_ERROR_CODEC.encode(RemoteError("ArgumentError", "it is wrong", "w")))
    assert isinstance(request.operation.error, ArgumentError)
    assert str(request.operation.error) == "key 'w': it is wrong"
    body = NOTICE_CODEC.encode(ServerNotice("lost", 2, "h", "its process ended"))
    one.server.say(MessageHeader(MessageKind.NOTICE, store=5, body_bytes=len(body)), body)
    one.upstream.receive()
    assert [notice.worker for notice in one.owner.notices] == [2]


@pytest.mark.parametrize(
    ("kind", "body", "flags", "text"),
    [
        (MessageKind.VALUE, b"abcd", 0, "4 bytes where 12 were asked for"),
        (MessageKind.VALUE, b"", MessageFlag.IN_MEMORY, "refers to memory that is not shared"),
        (MessageKind.VALUE, b"abcd", MessageFlag.ENCODED, "an encoded value that was not requested"),
        (MessageKind.PUSH, b"", 0, "sent a PUSH, which only workers send"),
        (MessageKind.ERROR, b"\xff", 0, "not a message of this protocol"),
    ],
)
def test_what_no_server_says_ends_the_connection(
    bench: Make, kind: MessageKind, body: bytes, flags: int, text: str
) -> None:
    one = bench()
    request = one.begin(MessageKind.PULL, into=np.zeros(3, np.float32))
    with pytest.raises(WireError, match=text):
        one.answer(request, kind, body, int(flags))
    assert one.upstream.fileno() == -1
    assert list(one.upstream.outstanding.values()) == [request], "its owner gives it up"
    assert request.answer_header is None


def test_a_batch_that_is_answered_with_something_else_ends_the_connection(bench: Make) -> None:
    one, outs = bench(), [np.zeros(3, np.float32), np.zeros(0, np.float32)]
    request = BatchRequest(MessageHeader(MessageKind.PULL), 3, KVOperation(None, "pull"), numbers=(1, 1), outs=outs)  # type: ignore[arg-type]  # nobody waits
    one.upstream.submit(request)
    one.upstream.flush()
    with pytest.raises(WireError, match="16 bytes for a batch of 12"):
        one.answer(request, MessageKind.VALUE, np.ones(4, np.float32).tobytes())
    assert list(one.upstream.outstanding.values()) == [request]
    assert outs[0].tolist() == [0, 0, 0]


def test_keys_of_a_batch_are_answered_by_themselves(bench: Make) -> None:
    one, outs = bench(), [np.zeros(2, np.float32) for _ in range(3)]
    orders = [KeyOrder(num_reads=1, num_pushes=1) for _ in outs]
    told: list[tuple[int, int, bool]] = []

    def note_of(key: int) -> Callable[[int, int, bool], None]:
        return lambda shard, number, is_done: told.append((key, number, is_done))

    operation = KVOperation(None, "pushpull")  # type: ignore[arg-type]  # nobody waits
    batch = BatchRequest(MessageHeader(MessageKind.PUSHPULL), 3, operation, orders=orders, numbers=(4, 5, 6), outs=outs)
    batch.notes = [note_of(key) for key in range(3)]
    one.upstream.submit(batch)
    later = one.begin(MessageKind.PULL, into=np.zeros(1, np.float32))
    assert later.header.request == batch.header.request + 4, "each key has an id"

    def answer(place: int, kind: MessageKind, body: bytes) -> None:
        one.server.say(MessageHeader(kind, batch.header.request + 1 + place, store=5, body_bytes=len(body)), body)
        one.upstream.receive()

    answer(2, MessageKind.VALUE, np.ones(2, np.float32).tobytes())
    outs[2][:] = 7
    answer(
        2, MessageKind.VALUE, np.ones(2, np.float32).tobytes()
    )  # it was sent twice; the place belongs to others by now
    assert outs[2].tolist() == [7, 7]
    answer(0, MessageKind.ERROR, REMOTE_ERROR_CODEC.encode(RemoteError("ArgumentError", "it is wrong", "w")))
    assert told == [(2, 6, True), (0, 4, False)]
    assert one.owner.parts == [(batch, 2), (batch, 0)]
    assert list(batch.leave()) == [orders[1]]
    batch.orders = orders
    assert not one.owner.ended
    answer(1, MessageKind.VALUE, np.ones(2, np.float32).tobytes())
    assert one.owner.ended == [batch]
    assert told[2:] == [(1, 5, True)]
    assert isinstance(operation.error, ArgumentError)
    assert list(one.upstream.outstanding.values()) == [later]


def test_a_value_for_a_key_that_was_only_pushed_ends_the_connection(bench: Make) -> None:
    one = bench()
    batch = BatchRequest(MessageHeader(MessageKind.PUSH), 3, KVOperation(None, "push"), numbers=(1, 1))  # type: ignore[arg-type]  # nobody waits
    one.upstream.submit(batch)
    one.upstream.flush()
    one.server.say(MessageHeader(MessageKind.VALUE, batch.header.request + 1, store=5, body_bytes=4), bytes(4))
    with pytest.raises(WireError, match="a value that was not requested"):
        one.upstream.receive()
    assert list(one.upstream.outstanding.values()) == [batch]


def test_another_server_at_the_address_is_noticed() -> None:
    one = Bench()
    try:
        one.server.meet(one.upstream)
        with pytest.raises(WireError, match="is server 4, not server 3"):
            one.server.welcome(one.upstream, number=4)
    finally:
        one.upstream.close()
        one.server.close()


def test_a_stranger_at_the_address_is_refused_once_that_is_certain() -> None:
    one = Bench()

    def insist() -> None:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            one.upstream._retry_at = 0.0
            one.server.meet(one.upstream, secret=b"x" * 32)

    try:
        with pytest.raises(AuthenticationError):
            insist()
        assert isinstance(one.upstream.last_error, AuthenticationError)
    finally:
        one.upstream.close()
        one.server.close()


class Clock:
    """What `reigen.kv.client.server_connection` takes for the time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("reigen.kv.client.server_connection.time", self)

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("between", ["moved", "refused"])
def test_a_server_that_is_killed_several_times_is_no_stranger(monkeypatch: pytest.MonkeyPatch, between: str) -> None:
    """Each time, its kernel ends the connections that it had accepted for it: without a word."""
    clock, one = Clock(monkeypatch), Bench()

    def end_early() -> None:
        one.upstream._retry_at = 0.0
        one.upstream.connect()
        one.server.listener.accept()[0].close()
        while one.upstream.is_connecting:
            select.select([one.upstream], [], [], SECONDS)
            one.upstream.receive()

    try:
        for incarnation in (2, 3):
            end_early()
            assert isinstance(one.upstream.last_error, AuthenticationError)
            clock.now += 5.0
            if between == "moved":
                one.upstream.moved(ServerInfo(3, one.server.address, incarnation, "h"))
            else:
                address = one.server.listener.getsockname()
                one.server.listener.close()
                one.upstream.connect()
                while one.upstream.is_connecting:
                    select.select([one.upstream], [], [], SECONDS)
                    one.upstream.receive()
                assert isinstance(one.upstream.last_error, ConnectionRefusedError)
                one.server.listener = socket.create_server(address)
                clock.now += 5.0
        end_early()
        clock.now += 5.0
        with pytest.raises(AuthenticationError):  # twice in a row, and nothing else between
            end_early()
    finally:
        one.upstream.close()
        one.server.close()


def test_a_server_that_restores_its_snapshots_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel accepts connections before it does; only the machine's answer has to come soon."""
    clock, one = Clock(monkeypatch), Bench()
    try:
        one.upstream.connect()
        assert select.select([], [one.upstream], [], SECONDS)[1]
        clock.now += 60.0
        one.upstream.connect()
        assert one.upstream.is_connecting
        assert one.upstream.last_error is None
        one.server.meet(one.upstream)
        assert one.upstream.lost_since is None
        assert one.server.hear(1)[0][0].kind == MessageKind.HELLO
    finally:
        one.upstream.close()
        one.server.close()


def test_a_machine_that_does_not_answer_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, one = Clock(monkeypatch), Bench()
    one.server.listener.listen(0)
    address, others = one.server.listener.getsockname(), [socket.socket() for _ in range(3)]
    try:
        for other in others:  # as many as are accepted, and more
            other.setblocking(False)
            other.connect_ex(address)
        one.upstream.connect()
        clock.now += 1.9
        one.upstream.connect()
        assert one.upstream.is_connecting
        clock.now += 0.2
        one.upstream.connect()
        assert not one.upstream.is_connecting
        assert isinstance(one.upstream.last_error, TimeoutError)
    finally:
        one.upstream.close()
        one.server.close()
        for other in others:
            other.close()


def test_what_was_not_answered_is_sent_again_after_a_reconnection(bench: Make) -> None:
    one = bench()
    first, second, third = one.begin(body=b"1"), one.begin(body=b"2"), one.begin(body=b"3")
    one.server.hear(3)
    one.answer(second, MessageKind.DONE)
    assert one.server.line is not None
    one.server.line.close()
    one.upstream.receive()
    assert one.upstream.lost_since is not None
    fourth = one.begin(body=b"4")
    one.server.meet(one.upstream)
    one.server.hear(1)
    one.server.welcome(one.upstream, is_empty=False)
    one.upstream.flush()
    header, counts = one.server.hear(1)[0]
    assert header.kind == MessageKind.RESUME
    assert counts == pack_counts(one.owner.known)
    one.server.say(MessageHeader(MessageKind.DONE, header.request, store=5))
    one.upstream.receive()
    one.upstream.flush()
    again = one.server.hear(3)
    assert [header.request for header, _ in again] == [
        first.header.request,
        third.header.request,
        fourth.header.request,
    ]
    assert [bool(header.flags & MessageFlag.RESENT) for header, _ in again] == [True, True, False]
    assert one.owner.num_empty == 0


def test_the_question_where_the_server_is_may_be_lost(bench: Make) -> None:
    one = bench(resend_seconds=1.0)
    request = one.begin(body=b"1")
    one.server.hear(1)
    one.upstream.lose(ConnectionResetError("the test wants it"))
    one.server.meet(one.upstream)
    one.server.hear(1)
    one.server.welcome(one.upstream, is_empty=False)
    one.upstream.flush()
    first = one.server.hear(1)[0]
    due = one.upstream.resend(0.0)
    assert due is not None
    one.upstream.resend(due)
    one.upstream.flush()
    assert one.server.hear(1)[0] == first
    one.server.say(MessageHeader(MessageKind.DONE, first[0].request, store=5))
    one.upstream.receive()
    one.upstream.flush()
    assert one.server.hear(1)[0][0].request == request.header.request


def test_what_waits_for_its_turn_on_the_wire_is_not_sent_again(bench: Make) -> None:
    one = bench(resend_seconds=1.0)
    request = one.begin(body=bytes(64 << 20))  # more than the kernel takes
    assert one.upstream.wants_to_send
    assert one.upstream.resend(time.monotonic() + 100) is None
    assert one.server.line is not None
    while one.upstream.wants_to_send:
        one.upstream.flush()
        one.server.line.receive()
    one.server.hear(1)
    assert one.upstream.resend(request.sent_at) == request.sent_at + 1


def test_a_server_that_is_slow_is_asked_less_and_less_often(bench: Make) -> None:
    one = bench(resend_seconds=1.0)
    request = one.begin(body=b"1")
    one.server.hear(1)
    waited = []
    for _ in range(7):
        due = one.upstream.resend(request.sent_at)
        assert due is not None
        waited.append(round(due - request.sent_at))
        request.sent_at -= due - request.sent_at
        one.upstream.resend(time.monotonic())
        one.upstream.flush()
    assert waited == [1, 2, 4, 8, 16, 16, 16]


def test_a_server_that_has_lost_everything_is_noticed(bench: Make) -> None:
    one = bench()
    one.upstream.lose(ConnectionResetError("the test wants it"))
    one.server.meet(one.upstream)
    one.server.welcome(one.upstream, is_empty=True)
    assert one.owner.num_empty == 1


def test_with_resending_what_nothing_is_heard_of_is_sent_again(bench: Make) -> None:
    one = bench(resend_seconds=1.0)
    silent, known, unknown = one.begin(body=b"1"), one.begin(body=b"2"), one.begin(body=b"3")
    one.server.hear(3)
    one.answer(known, MessageKind.RECEIVED)
    one.answer(unknown, MessageKind.RECEIVED)
    assert one.upstream.resend(silent.sent_at) is not None
    assert not one.upstream.wants_to_send
    one.upstream.resend(unknown.sent_at + 1.5)
    one.upstream.flush()
    heard = {header.request: (header, body) for header, body in one.server.hear(3)}
    assert heard[silent.header.request][1] == b"1"
    assert heard[silent.header.request][0].flags & MessageFlag.RESENT
    for request in (known, unknown):
        assert (heard[request.header.request][0].kind, heard[request.header.request][0].about) == (
            MessageKind.QUERY,
            MessageKind.PUSH,
        )
    one.answer(unknown, MessageKind.RECEIVED, flags=int(MessageFlag.UNKNOWN))
    one.upstream.flush()
    header, body = one.server.hear(1)[0]
    assert (header.kind, header.request, body) == (MessageKind.PUSH, unknown.header.request, b"3")
