"""Messages over real sockets: places, priorities, losses on purpose, and bytes that are no messages."""

import contextlib
import logging
import random
import select
import time

import pytest

from reigen.errors import AuthenticationError, WireError
from reigen.kv.connection import SEND_AHEAD_BYTES, KVConnection, MessageDropper
from reigen.kv.protocol import HEADER_BYTES, MessageHeader, MessageKind
from reigen.net.auth import TAG_BYTES, Identity, ProcessRole
from reigen.net.tls import TlsContext
from tests.unit.kv.connections import connected_streams


class Kept:
    """Receives into memory of its own and keeps what arrives."""

    def __init__(self, limit=1 << 30):
        self.limit, self.messages, self.places = limit, [], []

    def place(self, line, header):
        self.places.append(memoryview(bytearray(min(header.body_bytes, self.limit))))
        return self.places[-1]

    def arrived(self, line, header, body):
        self.messages.append((header, bytes(body)))


@pytest.fixture(params=["plain", "tls"])
def ends(request):
    """Two lines to each other, and what arrived at each."""
    streams = connected_streams(TlsContext() if request.param == "tls" else None)
    kept = [Kept(), Kept()]
    lines = [KVConnection(*stream.detach(), one, name) for stream, one, name in zip(streams, kept, "ab", strict=True)]
    yield (*lines, *kept)
    for line in lines:
        line.close()


def until(condition, *lines):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for 10 s"
        more = False
        for line in lines:
            line.advance_sends()
            more |= line.receive()
        if not more and not condition():
            select.select(lines, [line for line in lines if line.wants_to_send], [], 0.01)


def pushes(sizes, first=1):
    return [
        (MessageHeader(MessageKind.PUSH, number, 9, body_bytes=nbytes), bytes([number % 256]) * nbytes)
        for number, nbytes in enumerate(sizes, first)
    ]


def test_messages_with_and_without_bodies_arrive_in_order(ends):
    a, b, _, at_b = ends
    messages = pushes([0, 1, 0, 70_000, 3 << 20, 0, 8])
    sent = []
    for header, body in messages:
        a.send(header, body, on_sent=lambda header=header: sent.append(header.request))
    assert a.wants_to_send
    until(lambda: len(at_b.messages) == len(messages), a, b)
    assert at_b.messages == messages
    assert sent == [header.request for header, _ in messages]
    assert not a.wants_to_send


def test_both_directions_and_many_at_once(ends):
    a, b, at_a, at_b = ends
    there, back = pushes([8] * 300), pushes([0, 8] * 150)
    for header, body in there:
        a.send(header, body)
    for header, body in back:
        b.send(header, body)
    until(lambda: len(at_b.messages) == 300 and len(at_a.messages) == 300, a, b)
    assert (at_b.messages, at_a.messages) == (there, back)


def test_what_is_urgent_overtakes_what_the_link_does_not_have_yet(ends):
    a, b, _, at_b = ends
    low = pushes([SEND_AHEAD_BYTES] * 24)
    for header, body in low:
        a.send(header, body, priority=-3)
    a.advance_sends()
    for (header, body), priority in zip(pushes([10, 10, 10], first=100), (1, 2, 2), strict=True):
        a.send(header, body, priority=priority)
    until(lambda: len(at_b.messages) == 27, a, b)
    order = [header.request for header, _ in at_b.messages]
    assert [request for request in order if request < 100] == list(range(1, 25))
    assert [request for request in order if request >= 100] == [101, 102, 100]
    assert order.index(100) < 26, "three urgent messages came after all others"


def test_a_place_of_another_length_ends_the_line(ends):
    a, b, _, at_b = ends
    at_b.limit = 10
    header, body = pushes([11])[0]
    a.send(header, body)
    with pytest.raises(WireError, match="b: a PUSH of 11 bytes where 10 are expected"):
        until(lambda: False, a, b)


def test_a_header_must_be_true_of_its_body(ends):
    with pytest.raises(WireError, match="announces 5 bytes, its body has 4"):
        ends[0].send(MessageHeader(MessageKind.PUSH, 1, body_bytes=5), b"four")


def test_the_end_of_a_connection_in_the_middle_of_a_body_is_an_error(ends):
    a, b, _, at_b = ends
    a.send(MessageHeader(MessageKind.PUSH, 1, body_bytes=64 << 20), bytes(64 << 20))
    until(lambda: b.receiving is not None, a, b)
    assert b.receiving.request == 1
    a.close()
    with pytest.raises(ConnectionError, match="in the middle of a message"):
        until(lambda: False, b)
    assert not at_b.messages


@pytest.fixture
def bare():
    """A line, and the socket and session of its peer, for one that lies."""
    streams = connected_streams()
    kept = Kept()
    line, (connection, session) = KVConnection(*streams[0].detach(), kept, "liar"), streams[1].detach()
    yield line, kept, connection, session
    line.close()
    connection.close()


def received(line):
    assert select.select([line], [], [], 10)[0]
    while line.receive():
        pass


@pytest.mark.parametrize(
    "header",
    [b"\xff" * HEADER_BYTES, MessageHeader(MessageKind.HELLO, body_bytes=1 << 30).pack()],
    ids=["junk", "long"],
)
def test_what_is_no_header_ends_the_line(bare, header):
    line, _, connection, session = bare
    connection.sendall(session.seal(header))
    with pytest.raises(WireError):
        received(line)


@pytest.mark.parametrize("changed", ["tag", "header", "control body", "repeated"])
def test_what_was_changed_on_its_way_ends_the_line(bare, changed):
    line, _, connection, session = bare
    header = MessageHeader(MessageKind.COMMAND, 1, body_bytes=6).pack()
    data = bytearray(session.seal(header) + session.seal(b"states"))
    where = {"tag": 3, "header": TAG_BYTES + 9, "control body": len(data) - 1}.get(changed)
    if where is None:
        data = data + data
    else:
        data[where] ^= 1
    connection.sendall(data)
    with pytest.raises(AuthenticationError):
        received(line)


def test_messages_arrive_whatever_the_pieces_that_they_travel_in(bare):
    line, kept, connection, session = bare
    messages = pushes([5, 0, 3 * HEADER_BYTES, 200_000, 1])
    data = b"".join(session.seal(header.pack()) + body for header, body in messages)
    rng = random.Random(5)
    while data:
        size = rng.choice([1, 7, 79, 80, 1000, 150_000])
        connection.settimeout(0.01)
        with contextlib.suppress(TimeoutError):
            data = data[connection.send(data[:size]) :]
        if select.select([line], [], [], 10)[0]:
            while line.receive():
                pass
    assert kept.messages == messages


def test_messages_are_lost_on_purpose_but_never_the_first():
    streams = connected_streams()
    at_b = Kept()
    a = KVConnection(*streams[0].detach(), Kept(), "a")
    b = KVConnection(*streams[1].detach(), at_b, "b", drops=MessageDropper(30, seed=3))
    try:
        a.send(MessageHeader(MessageKind.HELLO))
        for header, body in pushes([4] * 1000, first=1):
            a.send(header, body)
        a.send(MessageHeader(MessageKind.HELLO))
        until(lambda: sum(header.kind == MessageKind.HELLO for header, _ in at_b.messages) == 2, a, b)
        arrived = [(header, body) for header, body in at_b.messages if header.kind == MessageKind.PUSH]
        assert 600 < len(arrived) < 800
        assert all(set(body) == {header.request % 256} for header, body in arrived)
    finally:
        a.close()
        b.close()


def test_every_message_is_logged_if_wanted(caplog):
    streams = connected_streams()
    a = KVConnection(*streams[0].detach(), Kept(), "server 0", log_messages=True)
    try:
        with caplog.at_level(logging.INFO, "reigen.kv"):
            a.send(MessageHeader(MessageKind.PUSH, 4, 5, 6, 7, body_bytes=3), b"abc")
        assert caplog.messages == ["to server 0: PUSH request=4 key=5 shard=6 round=7 bytes=3"]
    finally:
        a.close()
        streams[1].close()


def test_the_peer_is_who_it_proved_to_be():
    streams = connected_streams()
    assert [stream.peer for stream in streams] == [
        Identity(ProcessRole.RANK, 0, "kv 0"),
        Identity(ProcessRole.RANK, 1, "kv 0"),
    ]
    for stream in streams:
        stream.close()
