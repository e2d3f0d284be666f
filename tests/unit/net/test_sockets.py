"""Peers that fall silent: their packets are dropped by a filter on their socket, so nobody needs to be root."""

import fcntl
import socket
import struct
import termios
import time
from pathlib import Path

import pytest

from reigen.net.sockets import (
    MAX_WINDOW_BYTES,
    AckMonitor,
    limit_receive_window,
    read_arrivals,
    set_keepalive,
    silent_seconds,
    translate_connection_losses,
    wait_until_delivered,
)
from tests.multiprocess.launcher import until
from tests.patience import patiently
from tests.silence import fall_silent

SO_DETACH_FILTER = 27
TCP_THIN_LINEAR_TIMEOUTS, TCP_RTO_MAX_MS = 16, 44  # linux/tcp.h
SIOCOUTQNSD = 0x894B  # linux/sockios.h


@pytest.fixture
def ends():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other = listener.accept()[0]
    with one, other:
        yield one, other


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
    set_keepalive(ends[0], seconds)
    idle, interval, probes, user_timeout = (
        ends[0].getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
    )
    assert ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert idle + interval * probes == max(2, int(seconds))
    assert min(idle, interval, probes) >= 1
    assert idle + interval * (probes - 1) < user_timeout / 1000 < idle + interval * probes


@pytest.mark.parametrize("seconds", [10, 11, 20, 39, 60, 300, 1000])
def test_hardly_any_idle_connection_is_lost_where_one_packet_in_twenty_is(ends, seconds):
    """By each end at most once in so many seconds all probes, or their answers, may be lost."""
    set_keepalive(ends[0], seconds)
    idle, probes = (
        ends[0].getsockopt(socket.IPPROTO_TCP, option) for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPCNT)
    )
    per_hour = 2 * 3600 / idle * (1 - 0.95 * 0.95) ** probes
    assert per_hour < 1e-4
    assert probes < 32  # on a network that loses nothing, one of them is sent: what there are more of costs nothing
    assert idle >= seconds // 5


@pytest.mark.parametrize("bulk", [False, True])
def test_messages_are_repeated_soon(ends, bulk):
    set_keepalive(ends[0], 20, bulk=bulk)
    assert bulk or ends[0].getsockopt(socket.IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS) == 1
    try:
        longest = ends[0].getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
    except OSError:
        return  # an older Linux
    assert longest == (2500 if bulk else 1000)


@pytest.mark.parametrize("seconds", [2, 3, 5, 10, 20, 60, 300])
def test_linux_does_not_give_up_bulk_data_before_a_machine_counts_as_silent(ends, seconds):
    """Who is silent for a shorter time is there again afterwards. Linux begins with 0.2 s, and doubles it."""
    set_keepalive(ends[0], seconds, bulk=True)
    retries = int(Path("/proc/sys/net/ipv4/tcp_retries2").read_text())
    try:
        longest = ends[0].getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS) / 1000
    except OSError:
        longest = 120.0  # an older Linux
    wait = [min(0.2 * 2**number, longest) for number in range(retries + 1)]
    assert retries < 15 or sum(wait) > seconds


@pytest.mark.slow
@pytest.mark.parametrize("bulk", [False, True])
def test_an_idle_peer_that_falls_silent_is_lost(ends, bulk):
    set_keepalive(ends[0], 2, bulk=bulk)
    fall_silent(ends[1])
    ends[0].settimeout(100)
    begin = time.monotonic()
    with pytest.raises(ConnectionError), translate_connection_losses():
        ends[0].recv(1)
    assert 1 < time.monotonic() - begin < 60


@pytest.mark.slow
def test_a_peer_that_acknowledges_nothing_is_lost_after_many_attempts(ends):
    """Where Linux waits twice as long each time, there are five of them in the 2.5 s."""
    set_keepalive(ends[0], 3)
    ends[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    fall_silent(ends[1])
    ends[0].sendall(b"is anybody there?")
    ends[0].settimeout(100)
    with pytest.raises(ConnectionError), translate_connection_losses():
        ends[0].recv(1)
    (num_retransmissions,) = struct.unpack_from("I", ends[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 100)
    assert num_retransmissions >= 7


def test_a_peer_that_does_not_read_bulk_data_is_not_lost(ends):
    set_keepalive(ends[0], 2, bulk=True)
    assert ends[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0


def test_silence_is_measured_while_something_is_owed(ends):
    one, other = ends
    silence = AckMonitor()
    assert silence.seconds(one) == 0.0
    fall_silent(other)
    one.sendall(b"is anybody there?")
    until = time.monotonic() + 60
    while silence.seconds(one) < 0.5:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
def test_a_peer_that_probes_is_not_silent_though_no_answer_of_it_arrives(ends):
    """Few attempts of this end are made, and all of their answers may be lost; the peer's probes are others."""
    one, other = ends
    silence, blind = AckMonitor(), 0
    set_keepalive(other, 20)
    other.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    fall_silent(other)
    one.sendall(b"is anybody there?")
    until = time.monotonic() + 60
    longest = 0.0
    while blind < 5000:
        assert time.monotonic() < until
        longest = max(longest, silence.seconds(one))
        (blind,) = struct.unpack_from("I", one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60), 56)
        time.sleep(0.01)
    assert 0.0 < longest < 4.0


def test_who_does_not_read_is_not_silent(ends):
    fill(ends[0])
    silence = AckMonitor()
    until = time.monotonic() + 60
    while silence.seconds(ends[0]) > 0.0:  # what is on its way
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_was_sent_is_waited_for_until_it_has_arrived(ends):
    one, other = ends
    wait_until_delivered(one, 60.0)
    one.sendall(b"goodbye")
    wait_until_delivered(one, 60.0)
    other.sendall(b"never read")
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing is a reset
    one.close()
    assert other.recv(7, socket.MSG_WAITALL) == b"goodbye"
    wait_until_delivered(one, 60.0)


def test_what_was_sent_is_not_waited_for_in_vain(ends):
    fall_silent(ends[1])
    ends[0].sendall(b"goodbye")
    wait_until_delivered(ends[0], 0.01)
    ends[1].setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    ends[1].close()
    wait_until_delivered(ends[0], 60.0)


def test_who_is_merely_idle_is_waited_for():
    def attempt(seconds):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            one = socket.create_connection(listener.getsockname())
            other = listener.accept()[0]
        with one, other:
            until(lambda: silent_seconds(one) >= 1.5 * seconds)
            fall_silent(other)
            one.sendall(b"goodbye")
            begun = time.monotonic()
            wait_until_delivered(one, seconds)
            assert time.monotonic() - begun >= seconds

    patiently(attempt, 0.2)


def test_the_silence_before_counts_when_what_was_sent_is_waited_for():
    """Who has heard nothing of a host for most of the time after which it is lost does not wait all of it once more."""

    def attempt(seconds):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            one = socket.create_connection(listener.getsockname())
            other = listener.accept()[0]
        with one, other:
            fall_silent(one)
            until(lambda: silent_seconds(one) >= 0.9 * seconds)
            one.sendall(b"goodbye")
            begun = time.monotonic()
            wait_until_delivered(one, seconds)
            assert time.monotonic() - begun < 0.5 * seconds

    patiently(attempt, 5.0)  # a peer that is idle for a second is not silent


def test_deadlines_stay_deadlines(ends):
    ends[0].settimeout(0.01)
    with pytest.raises(TimeoutError), translate_connection_losses():
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


@pytest.mark.parametrize(
    "bound", [None, 1 << 15, 1 << 16, MAX_WINDOW_BYTES], ids=["unbounded", "32 KiB", "64 KiB", "lifted"]
)
def test_no_more_than_the_window_is_under_way(bound):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1448)
        sender = socket.create_connection(listener.getsockname())
        receiver = listener.accept()[0]
    most, until = 0, time.monotonic() + 60
    with sender, receiver:
        if bound == MAX_WINDOW_BYTES:
            limit_receive_window(receiver, 1 << 15)
            limit_receive_window(receiver, bound)
            bound = None
        while not most or (bound is None and most <= 1 << 16 and time.monotonic() < until):  # kernels take their time
            for _ in range(20):
                fill(sender)
                drain(receiver, lambda: bound is None or limit_receive_window(receiver, bound))
            fall_silent(receiver)
            fill(sender)
            most = num_under_way(sender)
            drain(receiver, lambda: None)
    assert most <= bound if bound else most > 1 << 16


def test_the_silence_of_a_peer_is_measured(ends):
    one, two = ends[0], ends[1]
    until = time.monotonic() + 60
    while silent_seconds(one) < 0.05:
        assert time.monotonic() < until
        time.sleep(0.01)
    two.send(b"x")
    assert one.recv(1) == b"x"
    assert silent_seconds(one) < 10


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
    assert 0 < read_arrivals(one)[1] <= min(took)


def test_what_has_arrived_counts_before_it_is_read(ends):
    one, other = ends
    one.sendall(bytes(1000))
    until = time.monotonic() + 60
    while read_arrivals(other)[0] < 1000:
        assert time.monotonic() < until
        time.sleep(0.01)
    other.recv(600)
    one.sendall(b"?")
    assert other.recv(400, socket.MSG_WAITALL) == bytes(400)
    assert other.recv(1) == b"?"
    assert read_arrivals(other)[0] == 1001
    assert read_arrivals(one)[0] == 0
