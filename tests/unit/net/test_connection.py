"""Authenticated streams over real sockets, and their core without any."""

import socket
import threading
import time
from contextlib import suppress

import pytest

from reigen.errors import AuthenticationError, WireError
from reigen.net.auth import ClientHandshake, Identity, ProcessRole, ServerHandshake
from reigen.net.connection import StreamProtocol, open_connection
from tests.accepting import accept_connection

SECRET = b"s" * 32
RANK, LAUNCHER = Identity(ProcessRole.RANK, 5), Identity(ProcessRole.LAUNCHER, 0)


def soon(seconds=60.0):
    return time.monotonic() + seconds


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        yield server


@pytest.fixture
def pair(listener):
    accepted = []

    def serve():
        accepted.append(accept_connection(listener.accept()[0], SECRET, LAUNCHER, 1 << 20, soon()))

    thread = threading.Thread(target=serve)
    thread.start()
    client = open_connection(listener.getsockname(), SECRET, RANK, 1 << 20, soon())
    thread.join()
    yield client, accepted[0]
    client.close()
    accepted[0].close()


def test_payloads_travel_both_ways_in_order(pair):
    client, server = pair
    assert (client.peer, server.peer) == (LAUNCHER, RANK)
    payloads = [b"", b"one", bytes(range(256)) * 100]
    for payload in payloads:
        client.send(payload, soon())
    assert [server.receive(soon()) for _ in payloads] == payloads
    server.send(b"back", soon())
    assert client.receive(soon()) == b"back"


def test_a_deadline_ends_a_wait_and_nothing_is_lost(pair):
    client, server = pair
    with pytest.raises(TimeoutError):
        server.receive(soon(0.02))
    client.send(b"late", soon())
    assert server.receive(soon()) == b"late"


def test_a_deadline_ends_a_send_that_nobody_reads(pair):
    client, server = pair
    payload = b"x" * (1 << 20)

    def flood():
        for _ in range(200):
            client.send(payload, soon(0.05))

    client.send(b"first", soon())
    with pytest.raises(TimeoutError):
        flood()
    assert server.receive(soon()) == b"first"


def test_the_end_of_a_peer_is_an_error_not_a_wait(pair):
    client, server = pair
    server.close()
    with pytest.raises(ConnectionError):
        client.receive(soon())


def test_a_payload_that_is_too_large_is_refused_by_the_sender(pair):
    client, server = pair
    with pytest.raises(WireError, match="at most 1048576"):
        client.send(b"x" * ((1 << 20) + 1), soon())
    client.send(b"still fine", soon())
    assert server.receive(soon()) == b"still fine"


@pytest.mark.parametrize("talk", [b"", b"HTTP/1.1 400 Bad Request\r\n" * 10])
def test_a_server_of_another_kind_is_refused(listener, talk):
    def serve():
        with listener.accept()[0] as connection, suppress(OSError):  # the client may have closed it by then
            connection.sendall(talk)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(100)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(AuthenticationError):
        open_connection(listener.getsockname(), SECRET, RANK, 100, soon())
    thread.join()


def test_an_end_of_another_version_is_named_at_once(listener):
    with socket.create_connection(listener.getsockname()) as old:
        old.sendall(b"RGN1" + bytes(37))  # the whole HELLO of version 1
        with pytest.raises(AuthenticationError, match="version b'1'"):
            accept_connection(listener.accept()[0], SECRET, LAUNCHER, 100, soon())


def test_a_silent_server_is_given_up_at_the_deadline(listener):
    with pytest.raises(TimeoutError):
        open_connection(listener.getsockname(), SECRET, RANK, 100, soon(0.05))


def test_before_the_proof_only_the_bytes_of_the_handshake_are_taken():
    server = StreamProtocol(ServerHandshake(SECRET, LAUNCHER), 100)
    assert server.num_wanted_bytes == 4
    server.receive(b"RGN3")
    assert server.num_wanted_bytes == 69
    server.receive(b"\2\0")
    assert server.num_wanted_bytes == 67
    with pytest.raises(WireError, match="before the handshake"):
        server.send(b"x")


def hand_over(source, target):
    """What one end has to send goes to the other, in the pieces that it asks for."""
    while source.outgoing:
        num_bytes = target.num_wanted_bytes
        target.receive(bytes(source.outgoing[:num_bytes]))
        del source.outgoing[:num_bytes]


def test_a_changed_byte_on_the_way_ends_the_conversation():
    client, server = (
        StreamProtocol(ClientHandshake(SECRET, RANK), 100),
        StreamProtocol(ServerHandshake(SECRET, LAUNCHER), 100),
    )
    while client.outgoing or server.outgoing:
        hand_over(client, server)
        hand_over(server, client)
    client.send(b"payload")
    client.outgoing[-1] ^= 1
    with pytest.raises(AuthenticationError):
        server.receive(bytes(client.outgoing))


def test_what_is_there_is_read_without_waiting_and_the_end_comes_behind_it(pair):
    client, server = pair
    assert server.read() == []
    messages = [bytes([number]) * (number << 12) for number in range(40)]
    for message in messages:
        client.post(message)
    received = []
    while not client.flush():
        received += server.read()
    assert (client.num_posted, client.num_unsent_bytes) == (0, 0)
    client.close()
    deadline = soon()
    while len(received) < len(messages) and time.monotonic() < deadline:
        received += server.read()
    assert received == messages
    with pytest.raises(ConnectionError):
        server.receive(soon())


def test_what_the_kernel_does_not_take_is_counted_and_kept(pair):
    client, server = pair
    num_messages = 0
    while client.flush():
        client.post(bytes(1 << 19))
        num_messages += 1
    client.post(b"last")
    assert client.num_posted == 2
    assert client.num_unsent_bytes > 4
    received = []
    deadline = soon()
    while len(received) <= num_messages and time.monotonic() < deadline:
        client.flush()
        received += server.read()
    assert [len(each) for each in received] == [1 << 19] * num_messages + [4]
    assert client.num_posted == 0


def test_one_call_of_read_ends_although_more_comes(pair):
    client, server = pair
    stop = threading.Event()

    def flood():
        while not stop.is_set():
            if not client.num_posted:
                client.post(bytes(1 << 16))
            client.flush()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        for _ in range(20):
            assert len(server.read()) <= 33
    finally:
        stop.set()
        thread.join()


def test_messages_that_nobody_has_taken_are_not_lost_to_another_kind_of_connection(pair):
    client, server = pair
    for message in (b"one", b"two"):
        client.post(message)
    client.flush()
    assert server.receive(soon()) == b"one"
    with pytest.raises(WireError):
        server.detach()
