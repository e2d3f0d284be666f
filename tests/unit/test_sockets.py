"""Peers that fall silent: their packets are dropped by a filter on their socket, so nobody needs to be root."""

import ctypes
import fcntl
import socket
import struct
import termios
import time

import pytest

from reigen.wire.sockets import (
    bound_window,
    keepalive,
    losses_are_connection_errors,
    num_arrived_bytes,
    round_trip_seconds,
    silent_seconds,
)

SO_ATTACH_FILTER = 26
SIOCOUTQNSD = 0x894B  # linux/sockios.h


@pytest.fixture
def ends():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other = listener.accept()[0]
    with one, other:
        yield one, other


def fall_silent(connection):
    """From now on nothing that is sent to this end reaches its kernel's TCP: no acknowledgement, no answer."""
    reject = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # classic BPF: return 0 bytes
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(reject))
    connection.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def fill(connection):
    """Send until the kernel takes no more."""
    connection.setblocking(False)
    try:
        while True:
            connection.send(bytes(1 << 16))
    except BlockingIOError:
        pass


@pytest.mark.parametrize("seconds", [0.5, 2, 3, 5, 7.9, 20, 60, 1000])
def test_the_last_probe_is_at_the_timeout(ends, seconds):
    keepalive(ends[0], seconds)
    idle, interval, probes, user_timeout = (
        ends[0].getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    )
    assert ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert idle + interval * probes == max(2, int(seconds))
    assert min(idle, interval, probes) >= 1
    assert idle + interval * (probes - 1) < user_timeout / 1000 < idle + interval * probes


@pytest.mark.slow
@pytest.mark.parametrize("bulk", [False, True])
def test_an_idle_peer_that_falls_silent_is_lost(ends, bulk):
    keepalive(ends[0], 2, bulk=bulk)
    fall_silent(ends[1])
    ends[0].settimeout(100)
    begin = time.monotonic()
    with pytest.raises(ConnectionError), losses_are_connection_errors():
        ends[0].recv(1)
    assert 1 < time.monotonic() - begin < 60


@pytest.mark.slow
def test_a_peer_that_acknowledges_nothing_is_lost(ends):
    keepalive(ends[0], 2)
    fall_silent(ends[1])
    ends[0].sendall(b"is anybody there?")
    ends[0].settimeout(100)
    with pytest.raises(ConnectionError), losses_are_connection_errors():
        ends[0].recv(1)


def test_a_peer_that_does_not_read_bulk_data_is_not_lost(ends):
    keepalive(ends[0], 2, bulk=True)
    assert ends[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_silence_is_measured_while_something_is_owed(ends):
    one, other = ends
    assert silent_seconds(one) == 0.0
    fall_silent(other)
    one.sendall(b"is anybody there?")
    until = time.monotonic() + 60
    while silent_seconds(one) < 0.5:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_who_does_not_read_is_not_silent(ends):
    fill(ends[0])
    until = time.monotonic() + 60
    while silent_seconds(ends[0]) > 0.0:  # what is on its way
        assert time.monotonic() < until
        time.sleep(0.01)


def test_deadlines_stay_deadlines(ends):
    ends[0].settimeout(0.01)
    with pytest.raises(TimeoutError), losses_are_connection_errors():
        ends[0].recv(1)


def drain(connection, after_each):
    """Read until there is nothing."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            after_each()
    except BlockingIOError:
        pass


def num_under_way(connection):
    """Bytes that were sent and not acknowledged."""
    queued, unsent = (
        struct.unpack("i", fcntl.ioctl(connection, request, bytes(4)))[0] for request in (termios.TIOCOUTQ, SIOCOUTQNSD)
    )
    return queued - unsent


@pytest.mark.parametrize("bound", [None, 1 << 15, 1 << 16])
def test_no_more_than_the_window_is_under_way(bound):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1448)
        sender = socket.create_connection(listener.getsockname())
        receiver = listener.accept()[0]
    with sender, receiver:
        for _ in range(20):
            fill(sender)
            drain(receiver, lambda: bound is None or bound_window(receiver, bound))
        fall_silent(receiver)
        fill(sender)
        most = num_under_way(sender)
    assert most <= bound if bound else most > 1 << 16


def test_a_round_trip_takes_no_longer_than_the_fastest_exchange(ends):
    one, other = ends
    took = []
    for _ in range(20):
        begin = time.monotonic()
        one.sendall(b"?")
        other.recv(1)
        other.sendall(b"!")
        one.recv(1)
        took.append(time.monotonic() - begin)
    assert 0 < round_trip_seconds(one) <= min(took)


def test_what_has_arrived_counts_before_it_is_read(ends):
    one, other = ends
    one.sendall(bytes(1000))
    until = time.monotonic() + 60
    while num_arrived_bytes(other) < 1000:
        assert time.monotonic() < until
        time.sleep(0.01)
    other.recv(600)
    one.sendall(b"?")
    assert other.recv(400, socket.MSG_WAITALL) == bytes(400)
    assert other.recv(1) == b"?"
    assert num_arrived_bytes(other) == 1001
    assert num_arrived_bytes(one) == 0
