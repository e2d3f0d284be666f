"""Control messages in shared memory: order, wrap-around, full rings, wake-ups."""

from __future__ import annotations

import itertools
import os
import platform
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from reigen.errors import CollectiveError
from reigen.net.doorbells import WaitingThread
from reigen.net.futex import FutexWord
from reigen.net.shm_ring import MAX_MESSAGE_BYTES, RING_BYTES, ShmTransport, shm_transport_bytes
from reigen.net.shm_segment import ShmSegment
from reigen.testing import run_threads

_WRITTEN, _READ, _LINE = 128, 192, 64
FUTEX = {"x86_64": 202, "aarch64": 98}[platform.machine()]


def memories(size: int, start: int = 0) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
    """Mailbox parts of so many ranks; all cursors begin at ``start``."""
    found = [np.zeros(shm_transport_bytes(size), np.uint8) for _ in range(size)]
    for memory in found:
        FutexWord(memory, _WRITTEN).store(start)
        for rank in range(size):
            FutexWord(memory, _READ + rank * _LINE).store(start)
    return found


def star(size: int, start: int = 0) -> list[ShmTransport]:
    """Rank 0 speaks to all others and hears them all."""
    parts = memories(size, start)
    others = list(range(1, size))
    return [ShmTransport(parts, r, others if r == 0 else [0], others if r == 0 else [0]) for r in range(size)]


def test_messages_arrive_in_each_senders_order() -> None:
    hub, one, two = star(3)
    one.send(b"a")
    two.send(b"b")
    one.send(b"")
    assert hub.pending()
    assert hub.receive() == [(1, b"a"), (1, b""), (2, b"b")]
    assert hub.receive() == []
    assert not hub.pending()


def test_the_hub_is_heard_by_all() -> None:
    hub, one, two = star(3)
    hub.send(b"all")
    assert one.receive() == two.receive() == [(0, b"all")]
    assert hub.receive() == []


@pytest.mark.parametrize("start", [0, RING_BYTES - 3, 2**32 - 100, 2**32 - RING_BYTES // 2])
def test_rings_and_cursors_wrap(start: int) -> None:
    rng = random.Random(start)
    hub, one = star(2, start)
    sent = []
    for _ in range(60):
        burst = [rng.randbytes(rng.choice((0, 1, 3, 4, 5000, MAX_MESSAGE_BYTES))) for _ in range(3)]
        for message in burst:
            one.send(message)
        sent += burst
        assert hub.receive() == [(1, message) for message in burst]
    assert sum(map(len, sent)) > 3 * RING_BYTES
    assert one.backlog == 0


def test_a_full_ring_keeps_messages_back_in_order() -> None:
    hub, one, two = star(3, 2**32 - 1000)
    messages = [bytes([i]) * 50_000 for i in range(20)]
    for message in messages:
        hub.send(message)
    assert hub.backlog == 15
    got_one: list[bytes] = []
    got_two: list[bytes] = []
    got_one += [m for _, m in one.receive()]
    hub.flush()
    assert hub.backlog == 15, "the slowest reader decides"
    while hub.backlog:
        got_one += [m for _, m in one.receive()]
        got_two += [m for _, m in two.receive()]
        hub.flush()
    got_one += [m for _, m in one.receive()]
    got_two += [m for _, m in two.receive()]
    assert got_one == got_two == messages


@pytest.mark.parametrize("start", [0, RING_BYTES - 3, 2**32 - 100])
def test_integers_keep_their_place_among_messages(start: int) -> None:
    rng = random.Random(start)
    hub, one, two = star(3, start)
    sent: list[bytes | tuple[int, ...]] = []
    for number in range(3000):
        if rng.random() < 0.3:
            sent.append(rng.randbytes(rng.choice((0, 1, 4, 300))))
            hub.send(sent[-1])
        else:
            sent.append(tuple(rng.choices((0, 7, 2**31, 2**32 - 1), k=rng.choice((1, 1, 2, 161)))))
            hub.send_integers(sent[-1])
        if number % 7 == 0 or number == 2999:
            assert one.receive() == two.receive() == [(0, data) for data in sent]
            sent.clear()
    assert hub.backlog == 0


def test_integers_wait_behind_messages_that_do_not_fit() -> None:
    hub, one = star(2)
    sent = [bytes([i]) * 50_000 for i in range(8)]
    for message in sent:
        one.send(message)
    one.send_integers([5])
    assert one.backlog == 4
    found = hub.receive()
    one.flush()
    assert [*found, *hub.receive()] == [*((1, message) for message in sent), (1, (5,))]


def test_integers_that_do_not_fit_wait_for_the_slowest_reader() -> None:
    hub, one, two = star(3, 2**32 - RING_BYTES // 2)
    sent = [tuple(range(number, number + 1000)) for number in range(100)]
    for integers in sent:
        hub.send_integers(integers)
    assert hub.backlog == 100 - RING_BYTES // 4004
    got_one, got_two = one.receive(), []
    while hub.backlog:
        got_two += two.receive()
        hub.flush()
        got_one += one.receive()
    assert got_one == [*got_two, *two.receive()] == [(0, integers) for integers in sent]


def test_more_integers_than_a_message_holds_are_our_own_bug() -> None:
    hub, one = star(2)
    one.send_integers([3] * (MAX_MESSAGE_BYTES // 4 - 1))
    assert [len(data) for _, data in hub.receive()] == [MAX_MESSAGE_BYTES // 4 - 1]
    with pytest.raises(AssertionError, match="integers are more than a message"):
        one.send_integers([3] * (MAX_MESSAGE_BYTES // 4))


def test_a_message_of_the_largest_size_fits_and_a_larger_one_is_our_own_bug() -> None:
    hub, one = star(2)
    one.send(b"x" * MAX_MESSAGE_BYTES)
    assert [len(m) for _, m in hub.receive()] == [MAX_MESSAGE_BYTES]
    with pytest.raises(AssertionError, match="a control message of"):
        one.send(b"x" * (MAX_MESSAGE_BYTES + 1))


@pytest.mark.parametrize("length", [MAX_MESSAGE_BYTES + 1, 2**32 - 1, 40, 2**31 + 40, 2**31 + 10])
def test_a_length_that_cannot_be_is_refused_with_the_senders_name(length: int) -> None:
    parts = memories(2)
    hub = ShmTransport(parts, 0, [1], [1])
    liar = ShmTransport(parts, 1, [0], [0])
    liar.send(b"0123456789")
    begin = _READ + 2 * _LINE
    parts[1][begin : begin + 4] = np.frombuffer(np.uint32(length).tobytes(), np.uint8)
    with pytest.raises(CollectiveError, match="rank 1 sent") as caught:
        hub.receive()
    assert caught.value.ranks == (1,)


def test_a_ring_before_the_sleep_is_not_lost() -> None:
    hub, one = star(2)
    hub.set_wake_target(WaitingThread.ENGINE)
    token = hub.token()
    one.send(b"x")
    began = time.monotonic()
    hub.sleep(token, WaitingThread.ENGINE, 60.0)
    assert time.monotonic() - began < 30


def test_sleeping_does_not_change_whom_a_ring_wakes() -> None:
    """The engine's thread may begin to sleep when a caller has already taken over."""
    parts = memories(2)
    hub = ShmTransport(parts, 0, [1], [1])
    hub.set_wake_target(WaitingThread.CALLER)
    hub.sleep(hub.token(), WaitingThread.ENGINE, 0.0)
    assert FutexWord(parts[0], 64).load() == WaitingThread.CALLER


def engine_sleeps(hub: ShmTransport) -> tuple[threading.Thread, threading.Event]:
    """A thread that sleeps as the engine's, for a minute at most, and the event that it sets when it is awake."""
    woken, token = threading.Event(), hub.token()

    def sleep() -> None:
        hub.sleep(token, WaitingThread.ENGINE, 60.0)
        woken.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    until_asleep(thread)
    return thread, woken


def until_asleep(thread: threading.Thread) -> None:
    deadline = time.monotonic() + 30
    status = Path(f"/proc/self/task/{thread.native_id}/syscall")
    while not status.read_text().startswith(f"{FUTEX} ") or " 0x9 " not in status.read_text():
        assert time.monotonic() < deadline


@pytest.mark.parametrize("leave", ["sleeps", "leaves"])
def test_integers_wake_a_thread_that_sleeps_on_only_when_their_writer_leaves(leave: str) -> None:
    hub, one = star(2)
    thread, woken = engine_sleeps(hub)
    assert hub.release_to_engine(urgent=False)
    one.send_integers([4])
    assert not woken.wait(0.05)
    if leave == "sleeps":
        one.sleep(one.token(), WaitingThread.CALLER, 0.0)
    else:
        one.wake_readers()
    assert woken.wait(30)
    thread.join()
    assert hub.receive() == [(1, (4,))]


def test_what_was_written_before_a_reader_sleeps_on_wakes_it_too() -> None:
    """Nobody slept when it was written, and who says "sleep on" does not look whether there is anything."""
    hub, one = star(2)
    thread, woken = engine_sleeps(hub)
    hub.set_wake_target(WaitingThread.NONE)
    one.send(b"m")
    assert hub.release_to_engine(urgent=False)
    assert not woken.wait(0.05)
    one.wake_readers()
    assert woken.wait(30)
    thread.join()


@pytest.mark.parametrize("urgent", [False, True])
def test_messages_and_what_is_urgent_wake_at_once(urgent: bool) -> None:
    hub, one = star(2)
    thread, woken = engine_sleeps(hub)
    assert hub.release_to_engine(urgent) is not urgent
    if urgent:
        hub.set_wake_target(WaitingThread.ENGINE)
        one.send_integers([4])
    else:
        one.send(b"m")
    assert woken.wait(30)
    thread.join()


def test_who_has_been_read_wakes_nobody() -> None:
    hub, one = star(2)
    thread, woken = engine_sleeps(hub)
    hub.release_to_engine(urgent=False)
    one.send_integers([4])
    hub.receive()
    one.wake_readers()
    assert not woken.wait(0.05)
    hub.wake(WaitingThread.ENGINE)
    assert woken.wait(30)
    thread.join()


def test_a_look_ends_with_a_ring() -> None:
    hub, one = star(2)
    token = hub.token()
    assert not hub.look(token, 0)
    assert not hub.look(token, 1000)
    one.send_integers([1])
    assert hub.look(token, 1)


def test_a_thread_is_woken_by_its_own_rank() -> None:
    hub, _ = star(2)
    woken = threading.Event()

    def sleeper() -> None:
        token = hub.token()
        ready.set()
        hub.sleep(token, WaitingThread.ENGINE, 60.0)
        woken.set()

    ready = threading.Event()
    thread = threading.Thread(target=sleeper)
    thread.start()
    assert ready.wait(30)
    hub.wake(WaitingThread.ENGINE)
    assert woken.wait(30)
    thread.join()


def converse(mailbox: ShmTransport, first: bool) -> float:
    """Ping-pong; returns the longest wait. A lost wake-up would cost a sleep's whole length."""
    longest, begin = 0.0, time.monotonic()
    message = b"ping"
    for number in itertools.count():
        if first:
            is_last = number == 10_000 or time.monotonic() - begin > 20.0  # on a machine with much else to do
            message = b"last" if is_last else b"ping"
        if first or number:
            mailbox.send(message)
        if message == b"last":
            return longest
        began = time.monotonic()
        mailbox.set_wake_target(WaitingThread.CALLER)
        while True:
            token = mailbox.token()
            if received := mailbox.receive():
                break
            assert time.monotonic() < began + 100, f"stuck in round {number}"
            mailbox.sleep(token, WaitingThread.CALLER, 60.0)
        mailbox.set_wake_target(WaitingThread.NONE)
        longest = max(longest, time.monotonic() - began)
        if received[0][1] == b"last":
            return longest
    raise AssertionError


def test_no_wake_up_is_lost_between_processes() -> None:
    """20,000 messages, asleep for each; the longest sleep stays far below what a lost wake-up would take."""
    segments = [ShmSegment.create("test") for _ in range(2)]
    for segment in segments:
        segment.grow(shm_transport_bytes(2), "a test")
    parts = [segment.map(0, segment.size) for segment in segments]
    child = os.fork()
    if not child:
        status = 1
        try:
            status = int(converse(ShmTransport(parts, 1, [0], [0]), first=False) >= 50.0)
        finally:
            os._exit(status)
    longest = converse(ShmTransport(parts, 0, [1], [1]), first=True)
    assert os.waitpid(child, 0) == (child, 0)
    assert longest < 50.0
    for segment in segments:
        segment.close()


def test_many_threads_speak_with_the_hub_at_once() -> None:
    size, count = 6, 2000
    ends = star(size)
    expected = {rank: [f"{rank}:{i}".encode() * 20 for i in range(count)] for rank in range(1, size)}

    def act(rank: int, _: object) -> int:
        end, deadline = ends[rank], time.monotonic() + 100
        if rank:
            for message in expected[rank]:
                end.send(message)
            while end.backlog:
                assert time.monotonic() < deadline
                end.sleep(end.token(), WaitingThread.CALLER, 0.001)
                end.flush()
            return 0
        got: dict[int, list[bytes]] = {r: [] for r in range(1, size)}
        end.set_wake_target(WaitingThread.CALLER)
        while sum(map(len, got.values())) < (size - 1) * count:
            assert time.monotonic() < deadline
            token = end.token()
            found = end.receive()
            for sender, message in found:
                got[sender].append(message)
            if not found:
                end.sleep(token, WaitingThread.CALLER, 10.0)
        assert got == expected
        return 1

    assert sum(run_threads(act, size)) == 1
