"""How much may be on its way to a worker or a server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from random import Random

import pytest

from reigen.kv.receive_window import (
    IN_FLIGHT_SECONDS,
    MAX_ANSWER_ROUND_TRIP_SECONDS,
    MIN_WINDOW_BYTES,
    SAMPLE_SECONDS,
    WINDOW_STEP_BYTES,
    ReceiveRate,
    ReceiveWindow,
)
from reigen.net.sockets import MAX_WINDOW_BYTES

NOW = 1000.0


def flow(inflow, bytes_by_worker, num_samples, begin=NOW):
    """Each worker's bytes come in each millisecond; returns when that ends."""
    num_steps = round(num_samples * SAMPLE_SECONDS * 1000)
    for step in range(1, num_steps + 1):
        for worker, nbytes in bytes_by_worker.items():
            inflow.count(worker, nbytes, begin + step / 1000)
    return begin + num_steps / 1000


def test_before_anything_was_measured_there_is_the_least_window():
    assert ReceiveRate().window_bytes(0.0) == MIN_WINDOW_BYTES


@pytest.mark.parametrize("round_trip_seconds", [0.0, 0.0001, 0.03])
def test_windows_are_equal_parts_of_what_comes_in_the_time_whoever_sends_how_much(round_trip_seconds):
    inflow = ReceiveRate()
    flow(inflow, {0: 700_000, 1: 200_000, 2: 100_000}, 4)  # a gigabyte a second
    expected = 1e9 / 3 * (IN_FLIGHT_SECONDS + 2 * round_trip_seconds)
    assert inflow.window_bytes(round_trip_seconds) == pytest.approx(expected, rel=0.05)


def test_who_sends_alone_has_all_of_it():
    inflow = ReceiveRate()
    end = flow(inflow, {0: 500_000, 1: 500_000}, 4)
    shared = inflow.window_bytes(0.0)
    flow(inflow, {1: 1_000_000}, 4, end)
    assert inflow.window_bytes(0.0) == pytest.approx(2 * shared, rel=0.05)


def test_a_slow_wire_has_the_least_window():
    inflow = ReceiveRate()
    flow(inflow, {0: 6_000, 1: 6_000}, 4)
    assert inflow.window_bytes(0.0) == MIN_WINDOW_BYTES


def test_a_window_grows_until_something_else_is_the_limit():
    """A window a round trip: the rate that a bound leads to is to be less than what leads to that bound."""
    inflow, round_trip_seconds, end = ReceiveRate(), 0.05, NOW
    for _ in range(20):
        window = inflow.window_bytes(round_trip_seconds)
        rate = min(1.25e9, window / round_trip_seconds)
        end = flow(inflow, {0: int(rate / 1000)}, 2, end)
    assert inflow.window_bytes(round_trip_seconds) > 1.25e9 * round_trip_seconds


def test_neither_a_pause_nor_others_who_use_the_wire_make_windows_smaller():
    inflow = ReceiveRate()
    end = flow(inflow, {0: 1_000_000}, 4)
    before = inflow.window_bytes(0.0)
    end = flow(inflow, {0: 1_000_000}, 1, end + 60)
    assert inflow.window_bytes(0.0) == before
    flow(inflow, {0: 100_000}, 40, end)
    assert inflow.window_bytes(0.0) == before


@pytest.mark.parametrize("burst_ms", [2, 6, 12, 20, 40])
@pytest.mark.parametrize("round_trip_seconds", [0.005, 0.01, 0.016])
@pytest.mark.parametrize("num_senders", [1, 4])
def test_short_bursts_with_pauses_between_them_have_windows_that_do_not_limit_them(
    burst_ms, round_trip_seconds, num_senders
):
    """All of a burst, or what a wire of 5 Gbit/s carries in a round trip, may be on its way."""
    inflow, wire, now = ReceiveRate(), 625e6, NOW
    for _ in range(100):
        now += 0.15
        for step in range(10 * burst_ms):  # a count each 62.5 kB
            now += 0.0001
            inflow.count(step % num_senders, int(wire / 10_000), now, round_trip_seconds)
    needed = wire * min(burst_ms / 1000, round_trip_seconds)
    assert needed <= num_senders * inflow.window_bytes(round_trip_seconds)
    assert inflow.rate <= 1.01 * wire
    assert inflow.num_senders == num_senders


def test_a_process_that_is_not_run_for_long_measures_no_rate_that_the_wire_has_not():
    """All bytes of 5 to 50 ms are counted in one moment, one peer's after the other's."""
    random, inflow, wire, now = Random(7), ReceiveRate(), 25e6, NOW
    now = flow(inflow, dict.fromkeys(range(4), wire / 4000), 4)
    for _ in range(1000):
        now += (delay := random.uniform(0.005, 0.05))
        for sender in range(4):
            inflow.count(sender, int(wire * delay / 4), now, 0.01)
    assert inflow.rate == pytest.approx(wire, rel=0.05)


def test_turns_of_one_receiver_of_many_are_measured_with_the_turns_of_the_others():
    """A wire that serves three in turn, 6 ms each, gives each a third."""
    inflow, wire, now = ReceiveRate(), 25e6, NOW
    for _ in range(200):
        for _ in range(3):
            now += 0.002
            inflow.count(0, int(wire * 0.002), now, 0.01)
        now += 0.012
    assert inflow.rate == pytest.approx(wire / 3, rel=0.15)


def test_bursts_behind_windows_that_are_too_small_make_these_grow():
    """Each burst of 5 MB takes as many round trips as its window says."""
    wire, round_trip_seconds, num_bytes, now = 625e6, 0.01, 5_000_000, NOW
    inflow = ReceiveRate()
    for _ in range(200):
        now += 0.1
        left = num_bytes
        while left > 0:
            came = min(left, inflow.window_bytes(round_trip_seconds))
            left -= came
            took = came / wire
            for _ in range(8):
                now += took / 8
                inflow.count(0, came // 8, now, round_trip_seconds)
            now += max(0.0, round_trip_seconds - took)
    assert inflow.window_bytes(round_trip_seconds) >= num_bytes


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def receive(ends, num_bytes):
    ends[0].sendall(bytes(num_bytes))
    ends[1].recv(num_bytes, socket.MSG_WAITALL)


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr("reigen.kv.receive_window.limit_receive_window", lambda _, nbytes: found.append(nbytes))
    return found


def test_small_messages_pay_nothing_and_large_ones_have_a_bound(ends, bounds):
    inflow = ReceiveRate()
    window = ReceiveWindow(ends[1], 0, inflow)
    receive(ends, 1000)
    window.bound(1000, NOW)
    assert not bounds
    for number in (1, 2, 3):
        receive(ends, WINDOW_STEP_BYTES)
        window.bound(1000 + number * WINDOW_STEP_BYTES, NOW + number)
    assert inflow.rate == WINDOW_STEP_BYTES, "from when the first ones were counted"
    assert bounds == [MIN_WINDOW_BYTES] * 3


def test_a_round_trip_that_has_grown_makes_a_window_larger(ends, bounds, monkeypatch):
    """The kernel forgets the shortest one after a while."""
    rate, arrived = 100e6, iter([(0, 0.0), (0, 0.001), (0, 0.02)])
    monkeypatch.setattr("reigen.kv.receive_window.read_arrivals", lambda _: next(arrived))
    window = ReceiveWindow(ends[1], 0, ReceiveRate(rate=rate))
    for number in (1, 2, 3):
        window.bound(number * WINDOW_STEP_BYTES, NOW)
    assert bounds == [int(rate * (IN_FLIGHT_SECONDS + 2 * seconds)) for seconds in (0.0, 0.001, 0.02)]


def test_on_a_long_way_what_comes_from_servers_has_no_bound(ends, bounds, monkeypatch):
    inflow = ReceiveRate(rate=100e6)
    limit = MAX_ANSWER_ROUND_TRIP_SECONDS
    ways = (1.01 * limit, limit, 1.01 * limit, 2 * limit, limit / 2)
    arrived = iter([(0, seconds) for seconds in ways])
    monkeypatch.setattr("reigen.kv.receive_window.read_arrivals", lambda _: next(arrived))
    window = ReceiveWindow(ends[1], 0, inflow, limit)
    for number in range(1, 1 + len(ways)):
        window.bound(number * WINDOW_STEP_BYTES, NOW)
    assert bounds == [
        inflow.window_bytes(limit),
        MAX_WINDOW_BYTES,  # lifted when the way has become longer, and once
        inflow.window_bytes(limit / 2),
    ]


def test_windows_that_both_ends_bound_alike_fill_both_directions():
    """Senders that always have a window on its way, over two wires with queues: bytes, and what is acknowledged behind
    the bytes of the other direction.
    """
    wire, delay, tick = 25e6, 0.005, 0.0005

    def rates(windows):
        sent, acknowledged, passed = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
        queues = [[], []]  # of each wire, in order: whose bytes, or whose acknowledged bytes, so many
        flying = [[], []]  # and when they reach the other end
        for step in range(8000):
            now = step * tick
            for end in (0, 1):
                new = windows[end] - (sent[end] - acknowledged[end])
                if new > 0:
                    queues[end].append(["bytes", new])
                    sent[end] += new
                room = wire * tick
                while queues[end] and room > 0:
                    kind, num_bytes = queues[end][0]
                    if kind == "acknowledged":
                        flying[end].append((now + delay, *queues[end].pop(0)))
                        continue
                    moved = min(room, num_bytes)
                    room -= moved
                    flying[end].append((now + delay, "bytes", moved))
                    queues[end][0][1] -= moved
                    if not queues[end][0][1]:
                        queues[end].pop(0)
                while flying[end] and flying[end][0][0] <= now:
                    _, kind, num_bytes = flying[end].pop(0)
                    if kind == "bytes":
                        passed[end] += num_bytes
                        queues[1 - end].append(["acknowledged", num_bytes])
                    else:
                        acknowledged[1 - end] += num_bytes
        return [each / (8000 * tick) / wire for each in passed]

    window = ReceiveRate(rate=wire).window_bytes(2 * delay)
    assert min(rates([window, window])) > 0.8
    pushes, answers = rates([window, 3 * window])
    assert answers > 0.95
    assert pushes < 0.5, "what is acknowledged waits behind answers that nothing bounds"
