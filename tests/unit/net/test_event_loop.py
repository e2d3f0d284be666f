"""The event loop: what it calls, in which order, and what ends a wait."""

import os
import select
import socket
import threading
import time
from contextlib import closing, suppress

import pytest

from reigen.net.event_loop import EventLoop, wait_ready


@pytest.fixture
def loop():
    with closing(EventLoop()) as made:
        yield made


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        yield one, other


def fill(connection):
    """Send until the kernel takes no more."""
    with suppress(BlockingIOError):
        while True:
            connection.send(bytes(1 << 16))


def test_what_is_readable_is_called_again_and_again_until_it_is_read(loop, pair):
    one, other = pair
    calls = []
    loop.watch(one, lambda: calls.append("readable"))
    loop.wait(0.0)
    assert calls == []
    other.send(b"x")
    for _ in range(2):
        loop.wait(60.0)
    assert calls == ["readable"] * 2
    one.recv(1)
    loop.wait(0.0)
    assert len(calls) == 2


def test_both_directions_are_told_apart_and_may_change(loop, pair):
    one, other = pair
    calls = []
    loop.watch(one, lambda: calls.append("read"), lambda: calls.append("write"))
    other.send(b"x")
    loop.wait(60.0)
    assert calls == ["read", "write"]
    loop.watch(one, lambda: calls.append("only"))
    loop.wait(60.0)
    assert calls[2:] == ["only"]
    fill(one)
    loop.watch(one, on_writable=lambda: calls.append("room"))
    loop.wait(0.0)
    assert calls[3:] == []
    while wait_ready(other):
        other.recv(1 << 20)
    loop.wait(60.0)
    assert calls[3:] == ["room"]


def test_who_has_room_and_nothing_to_read_is_called_for_that_alone(loop, pair):
    one, _ = pair
    calls = []
    loop.watch(one, lambda: calls.append("read"))
    loop.wait(0.0)
    assert calls == []
    loop.watch(one, lambda: calls.append("read"), lambda: calls.append("write"))
    loop.wait(60.0)
    assert calls == ["write"]


def test_the_end_of_a_connection_is_both(loop, pair):
    one, other = pair
    calls = []
    loop.watch(one, on_writable=lambda: calls.append("write"))
    fill(one)
    other.close()
    loop.wait(60.0)
    assert calls == ["write"]


def test_what_an_earlier_callback_ended_is_not_called(loop):
    pairs = [socket.socketpair() for _ in range(2)]
    calls = []

    def end_both(number):
        calls.append(number)
        for one, _ in pairs:
            loop.unwatch(one)

    for number, (one, other) in enumerate(pairs):
        loop.watch(one, lambda number=number: end_both(number))
        other.send(b"x")
    loop.wait(60.0)
    assert len(calls) == 1
    assert not loop.watches(pairs[0][0])
    for each in sum(pairs, ()):
        each.close()


def test_a_descriptor_that_is_used_anew_is_not_called_for_what_was_before(loop, pair):
    first, second = os.eventfd(1), os.eventfd(1)
    calls = []

    def replace(own, other):
        loop.unwatch(other)
        os.close(other)
        assert os.dup2(pair[0].fileno(), other) == other
        loop.watch(other, lambda: calls.append("new"))
        loop.unwatch(own)

    loop.watch(first, lambda: replace(first, second))
    loop.watch(second, lambda: replace(second, first))
    loop.wait(60.0)
    loop.wait(0.0)
    assert calls == []
    os.close(first)
    os.close(second)


def test_timers_come_in_their_order_behind_descriptors_and_once(loop, pair):
    calls = []
    now = time.monotonic()
    loop.call_at(now - 1, lambda: calls.append("second"))
    loop.call_at(now - 2, lambda: calls.append("first"))
    loop.call_at(now - 1, lambda: calls.append("third"))
    loop.call_at(now + 3600, lambda: calls.append("never"))
    loop.call_at(now - 3, lambda: calls.append("cancelled")).cancel()
    loop.watch(pair[0], lambda: calls.append("descriptor"))
    pair[1].send(b"x")
    loop.wait(60.0)
    assert calls == ["descriptor", "first", "second", "third"]
    loop.unwatch(pair[0])
    loop.wait(0.0)
    assert len(calls) == 4


def test_a_timer_ends_a_wait_without_end(loop):
    calls = []
    loop.call_at(time.monotonic() + 0.01, lambda: calls.append("due"))
    while not calls:
        loop.wait()
    assert calls == ["due"]


def test_another_thread_ends_a_wait_and_the_next_one_if_none_is_going_on(loop):
    loop.wake()
    loop.wait(60.0)
    thread = threading.Thread(target=loop.wake)
    thread.start()
    loop.wait(60.0)
    thread.join()
    assert not wait_ready(loop._epoll)


def test_closed_files_are_not_watched_and_a_closed_loop_is_quiet(pair):
    loop = EventLoop()
    loop.watch(pair[0], lambda: None)
    loop.unwatch(pair[0])
    loop.unwatch(pair[0])
    pair[0].close()
    loop.unwatch(pair[0])
    assert not loop.watches(pair[0])
    loop.close()
    loop.close()
    loop.wake()


def test_one_descriptor_can_be_waited_for(pair):
    assert not wait_ready(pair[0])
    assert wait_ready(pair[0], 0.0, select.POLLOUT)
    pair[1].close()
    assert wait_ready(pair[0], 60.0)
