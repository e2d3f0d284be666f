"""Bulk data over real sockets: what arrives, what it takes, and what a peer that gives up, dies or lies leads to."""

import select
import socket
import struct
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reigen.errors import AuthenticationError, WireError
from reigen.net.auth import TAG_BYTES, AuthSession, Identity, ProcessRole
from reigen.net.bulk_connection import MAX_REASON_BYTES, BulkConnection, PeerAborted
from reigen.net.connection import open_connection
from reigen.net.tls import TlsContext
from tests.accepting import accept_connection

SECRET = b"s" * 32
ZERO, ONE = Identity(ProcessRole.RANK, 0, "ring 0"), Identity(ProcessRole.RANK, 1, "ring 0")


def soon(seconds=60.0):
    return time.monotonic() + seconds


def connected(tls=None):
    """Two authenticated streams to each other."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:
        accepted = []
        thread = threading.Thread(
            target=lambda: accepted.append(accept_connection(listener.accept()[0], SECRET, ZERO, 1 << 16, soon(), tls))
        )
        thread.start()
        stack.callback(thread.join)
        client = open_connection(listener.getsockname(), SECRET, ONE, 1 << 16, soon(), tls)
    return client, accepted[0]


@pytest.fixture(params=["plain", "tls"])
def links(request):
    """Rank 1's and rank 0's end."""
    both = [BulkConnection(*stream.detach()) for stream in connected(TlsContext() if request.param == "tls" else None)]
    yield both
    for link in both:
        link.close()


@pytest.fixture
def end_and_raw():
    """A link, and the bare socket and session of its peer, for one that lies."""
    client, server = connected()
    connection, session = server.detach()
    connection.settimeout(60)
    link = BulkConnection(*client.detach())
    yield link, connection, session
    link.close()
    connection.close()


def wait_readable(link):
    assert select.select([link], [], [], 60)[0], "nothing arrived"


def drive(sender, receiver, num_messages):
    """Move until the receiver has so many messages; returns how many the sender said had left."""
    num_sent = num_received = 0
    until = soon()
    while num_received < num_messages:
        assert time.monotonic() < until, f"{num_received} of {num_messages} messages in time"
        num_sent += sender.advance_sends()
        num_received += receiver.advance_receives()
    assert num_received == num_messages
    return num_sent


def receive_error(link):
    """The error that receiving ends with."""
    until = soon()
    while time.monotonic() < until:
        wait_readable(link)
        try:
            link.advance_receives()
        except (ConnectionError, WireError, AuthenticationError) as error:
            return error
    raise AssertionError("no error")


def test_each_end_knows_the_other_and_what_the_link_is_for(links):
    assert [link.peer for link in links] == [ZERO, ONE]


def test_messages_land_in_their_places_in_order(links):
    one, zero = links
    sent = [np.arange(size, dtype=np.uint8) for size in (1, 0, 3, 100, 0, 70_000)]
    places = [np.empty_like(array) for array in sent]
    for array, place in zip(sent, places, strict=True):
        one.post_send(memoryview(array))
        zero.post_receive(memoryview(place))
    assert (one.wants_to_send, zero.num_expected) == (True, 6)
    assert drive(one, zero, 6) == 6
    for array, place in zip(sent, places, strict=True):
        np.testing.assert_array_equal(place, array)
    assert (one.wants_to_send, zero.num_expected) == (False, 0)


def test_both_directions_at_once_and_more_than_the_kernel_buffers(links):
    arrays = [np.random.default_rng(rank).integers(0, 255, 9_000_001, dtype=np.uint8) for rank in range(2)]
    places = [np.empty_like(array) for array in arrays]
    for link, array, place in zip(links, arrays, places, strict=True):
        link.post_send(memoryview(array))
        link.post_receive(memoryview(place))
    left, until = [2, 2], soon()
    while any(left):
        assert time.monotonic() < until
        for index, link in enumerate(links):
            left[index] -= link.advance_sends() + link.advance_receives()
    np.testing.assert_array_equal(places[0], arrays[1])
    np.testing.assert_array_equal(places[1], arrays[0])


def test_memory_of_any_format_and_shape(links):
    one, zero = links
    array, place = np.arange(24, dtype=np.float32).reshape(2, 3, 4), np.empty((4, 6), np.float32)
    one.post_send(memoryview(array))
    zero.post_receive(memoryview(place))
    one.post_send(memoryview(array[:0]))
    zero.post_receive(memoryview(place[:0]))
    drive(one, zero, 2)
    np.testing.assert_array_equal(place.ravel(), array.ravel())


def test_calls_return_at_once_when_nothing_can_be_done(links):
    one, zero = links
    zero.post_receive(memoryview(bytearray(10)))
    assert (zero.advance_receives(), zero.advance_sends(), one.advance_sends()) == (0, 0, 0)
    one.post_send(memoryview(bytes(100 << 20)))
    assert one.advance_sends() == 0  # nobody reads
    assert one.wants_to_send


def test_parts_of_a_message_can_be_used_before_its_end(end_and_raw):
    link, connection, session = end_and_raw
    place = bytearray(10)
    link.post_receive(memoryview(place))
    header = session.seal(struct.pack(">BQ", 1, 10))
    for part, expected in ((header[:20], 0), (header[20:] + b"abc", 3), (b"defg", 7)):
        connection.sendall(part)
        wait_readable(link)
        assert link.advance_receives() == 0
        assert link.num_placed_bytes == expected
        assert place[:expected] == b"abcdefg"[:expected]
    connection.sendall(b"hij")
    wait_readable(link)
    assert link.advance_receives() == 1
    assert (bytes(place), link.num_placed_bytes) == (b"abcdefghij", 0)


def test_places_may_be_posted_after_the_message_has_come(links):
    one, zero = links
    place = bytearray(5)
    for message in (b"early", b""):
        one.post_send(memoryview(message))
    one.advance_sends()
    wait_readable(zero)
    assert (zero.advance_receives(), zero.wants_to_receive) == (0, False)
    zero.post_receive(memoryview(place))
    zero.post_receive(memoryview(bytearray()))
    assert zero.wants_to_receive
    assert zero.advance_receives() == 2
    assert place == b"early"


def test_one_call_of_the_kernel_takes_a_small_message_in_or_out(monkeypatch):
    one, zero = (BulkConnection(*stream.detach()) for stream in connected())
    calls = []

    class Counting:
        def __init__(self, connection):
            self._connection = connection

        def __getattr__(self, name):
            calls.append(name)
            return getattr(self._connection, name)

    for _ in range(3):
        one.post_send(memoryview(b"x" * 100))
        zero.post_receive(memoryview(bytearray(100)))
    monkeypatch.setattr(one, "_connection", Counting(one._connection))
    monkeypatch.setattr(zero, "_connection", Counting(zero._connection))
    assert one.advance_sends() == 3
    assert zero.advance_receives() == 3
    assert calls == ["sendmsg"] + ["recvmsg_into"] * 3
    one.close()
    zero.close()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40), st.lists(st.integers(1, 4000), min_size=1, max_size=8))
def test_any_cut_of_the_stream_is_the_same_messages(sizes, cuts):
    left, right = socket.socketpair()
    with left, right:
        sender, receiver = session_pair()
        stream = b"".join(sender.seal(struct.pack(">BQ", 1, size)) + bytes([size % 251]) * size for size in sizes)
        right.setblocking(False)
        link = BulkConnection(right, receiver)
        places = [bytearray(size) for size in sizes]
        num_received, at, turn = 0, 0, 0
        for place in places:
            link.post_receive(memoryview(place))
        while at < len(stream):
            end = at + cuts[turn % len(cuts)]
            left.sendall(stream[at:end])
            at, turn = end, turn + 1
            while link.num_expected and select.select([right], [], [], 0)[0]:
                num_received += link.advance_receives()
        assert num_received == len(sizes)
        assert places == [bytearray([size % 251]) * size for size in sizes]


def session_pair():
    """Two sessions with the same fixed keys, without a handshake."""
    return AuthSession(ZERO, b"a" * 32, b"b" * 32), AuthSession(ONE, b"b" * 32, b"a" * 32)


def test_a_peer_that_gives_up_says_why(links):
    one, zero = links
    one.abort(b"rank 1 has failed: no memory")
    for _ in range(2):
        zero.post_receive(memoryview(bytearray(1000)))
    error = receive_error(zero)
    assert isinstance(error, PeerAborted)
    assert error.reason == b"rank 1 has failed: no memory"
    assert "no memory" not in str(error)  # the bytes are whoever's who wrote them, and no text for people


def test_giving_up_is_seen_where_nothing_is_expected(links):
    one, zero = links
    one.abort(b"x" * 5000)
    error = receive_error(zero)
    assert isinstance(error, PeerAborted)
    assert error.reason == b"x" * MAX_REASON_BYTES


def test_what_was_queued_is_dropped_and_what_had_left_arrives(links):
    one, zero = links
    place = bytearray(3)
    one.post_send(memoryview(b"one"))
    one.advance_sends()
    for _ in range(20):
        one.post_send(memoryview(b"not sent"))
    one.abort(b"")
    zero.post_receive(memoryview(place))
    assert isinstance(receive_error(zero), PeerAborted)
    assert place == b"one"


def test_giving_up_in_the_middle_of_a_message(links):
    one, zero = links
    large = bytes(50 << 20)
    for _ in range(3):
        one.post_send(memoryview(large))
    one.advance_sends()
    one.abort(b"too late to say")
    one.close()
    zero.post_receive(memoryview(bytearray(50 << 20)))
    error = receive_error(zero)
    assert isinstance(error, ConnectionError)
    assert not isinstance(error, PeerAborted)


def test_a_message_that_has_begun_is_finished_before_the_reason(links):
    one, zero = links
    large, place = bytes(range(256)) * (1 << 15), bytearray(1 << 23)
    one.post_send(memoryview(large))
    one.post_send(memoryview(b"dropped"))
    one.advance_sends()
    zero.post_receive(memoryview(place))
    until, error, aborted = soon(), None, False
    while error is None and time.monotonic() < until:
        try:
            zero.advance_receives()
        except ConnectionError as caught:
            error = caught
        if not aborted:
            one.abort(b"reason")
            aborted = True
        one.advance_sends()
    assert isinstance(error, PeerAborted)
    assert place == large


@pytest.mark.parametrize("posted", [[], [100]])
def test_the_end_of_a_peer_is_an_error_not_a_wait(links, posted):
    one, zero = links
    for size in posted:
        zero.post_receive(memoryview(bytearray(size)))
    one.close()
    assert "closed the connection" in str(receive_error(zero))
    zero.post_send(memoryview(bytes(64 << 20)))
    with pytest.raises(ConnectionError):
        drive(zero, zero, 1)


@pytest.mark.parametrize("size", [0, 3, 11])
def test_a_length_that_was_not_expected(links, size):
    one, zero = links
    one.post_send(memoryview(bytes(size)))
    one.advance_sends()
    zero.post_receive(memoryview(bytearray(10)))
    error = receive_error(zero)
    assert isinstance(error, WireError)
    assert f"message of {size} bytes was announced where one of 10 is expected" in str(error)


@pytest.mark.parametrize("kind", [0, 3, 255])
def test_a_kind_that_does_not_exist(end_and_raw, kind):
    link, connection, session = end_and_raw
    connection.sendall(session.seal(struct.pack(">BQ", kind, 10)))
    assert isinstance(receive_error(link), WireError)


def test_a_reason_without_end(end_and_raw):
    link, connection, session = end_and_raw
    connection.sendall(session.seal(struct.pack(">BQ", 2, TAG_BYTES + MAX_REASON_BYTES + 1)))
    assert isinstance(receive_error(link), WireError)


def test_a_reason_without_its_tag(end_and_raw):
    link, connection, session = end_and_raw
    connection.sendall(session.seal(struct.pack(">BQ", 2, TAG_BYTES - 1)) + bytes(TAG_BYTES - 1))
    assert isinstance(receive_error(link), WireError)


@pytest.mark.parametrize("place", [0, TAG_BYTES, -1])
def test_a_reason_that_was_changed_on_the_way_is_nobodys(end_and_raw, place):
    """It says who is at fault, and an error is made of it."""
    link, connection, session = end_and_raw
    header = session.seal(struct.pack(">BQ", 2, TAG_BYTES + 6))
    reason = bytearray(session.seal(b"no mem"))
    reason[place] ^= 1
    connection.sendall(header + reason)
    assert isinstance(receive_error(link), AuthenticationError)


def test_a_reason_that_comes_in_pieces_touches_no_count(end_and_raw):
    link, connection, session = end_and_raw
    for _ in range(2):
        link.post_receive(memoryview(bytearray(3)))
    header, reason = session.seal(struct.pack(">BQ", 2, TAG_BYTES + 6)), session.seal(b"no mem")
    for part in (header + reason[:-4], reason[-4:-1]):
        connection.sendall(part)
        wait_readable(link)
        assert link.advance_receives() == 0
        assert (link.num_expected, link.num_placed_bytes, link.wants_to_receive) == (2, 0, True)
    connection.sendall(b"m")
    error = receive_error(link)
    assert isinstance(error, PeerAborted)
    assert error.reason == b"no mem"


@pytest.mark.parametrize("place", [0, 15, 16, 24])
def test_a_header_that_was_changed_on_the_way(end_and_raw, place):
    link, connection, session = end_and_raw
    header = bytearray(session.seal(struct.pack(">BQ", 1, 10)))
    header[place] ^= 1
    link.post_receive(memoryview(bytearray(10)))
    connection.sendall(header + bytes(10))
    assert isinstance(receive_error(link), AuthenticationError)


def test_a_message_that_was_repeated_on_the_way(end_and_raw):
    link, connection, session = end_and_raw
    message = session.seal(struct.pack(">BQ", 1, 4)) + b"once"
    places = [bytearray(4), bytearray(4)]
    for place in places:
        link.post_receive(memoryview(place))
    connection.sendall(message * 2)
    assert isinstance(receive_error(link), AuthenticationError)
    assert places[0] == b"once"


def test_closing_lets_go_of_the_memory(links):
    one, zero = links
    sent, place = bytearray(1 << 25), bytearray(10)
    one.post_send(memoryview(sent))
    one.advance_sends()
    zero.post_receive(memoryview(place))
    one.close()
    zero.close()
    sent.clear()  # a BufferError while somebody holds it
    place.clear()
    assert one.fileno() == -1


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_stream_cannot_be_left_while_something_waits_in_it(encrypted):
    client, server = connected(TlsContext() if encrypted else None)
    try:
        client.send(b"first", soon())
        client.send(b"second", soon())
        assert server.receive(soon()) == b"first"
        with pytest.raises(WireError):
            server.detach()
        assert server.receive(soon()) == b"second"
        one, zero = BulkConnection(*client.detach()), BulkConnection(*server.detach())
        place = bytearray(4)
        one.post_send(memoryview(b"bulk"))
        zero.post_receive(memoryview(place))
        drive(one, zero, 1)
        assert place == b"bulk"
    finally:
        client.close()
        server.close()
