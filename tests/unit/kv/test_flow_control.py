"""By how much each worker may send, and which workers a server does not listen to for a moment."""

import pytest

from reigen.kv.server.flow_control import (
    IN_FLIGHT_SECONDS,
    MAX_LEAD_BYTES,
    MIN_WINDOW_BYTES,
    SAMPLE_SECONDS,
    SILENT_SECONDS,
    ReceiveRate,
    should_pause,
)

NOW = 1000.0
JUST_NOW, LONG_AGO = NOW - SILENT_SECONDS / 2, NOW - SILENT_SECONDS * 2


@pytest.mark.parametrize(
    ("held", "others", "waits", "must", "why"),
    [
        (MAX_LEAD_BYTES + 1, [(0, JUST_NOW)], False, True, "ahead of another worker"),
        (MAX_LEAD_BYTES, [(0, JUST_NOW)], False, False, "allowed"),
        (MAX_LEAD_BYTES, [(0, JUST_NOW)], True, True, "ahead of another worker"),  # it goes on at half of that
        (MAX_LEAD_BYTES // 2, [(0, JUST_NOW)], True, False, "allowed"),
        (9 * MAX_LEAD_BYTES, [(8 * MAX_LEAD_BYTES, JUST_NOW)], True, True, "ahead of another worker"),
        (9 * MAX_LEAD_BYTES, [(9 * MAX_LEAD_BYTES, JUST_NOW)], True, False, "allowed"),
        (9 * MAX_LEAD_BYTES, [(9 * MAX_LEAD_BYTES, JUST_NOW), (0, JUST_NOW)], True, True, "ahead of another worker"),
        (9 * MAX_LEAD_BYTES, [(9 * MAX_LEAD_BYTES, JUST_NOW), (0, LONG_AGO)], True, False, "allowed"),
        (9 * MAX_LEAD_BYTES, [(0, LONG_AGO)], True, False, "nothing comes"),
        (9 * MAX_LEAD_BYTES, [], False, False, "nothing comes"),
    ],
)
def test_a_connection_waits_while_it_is_ahead_of_one_over_which_something_comes(held, others, waits, must, why):
    found, reason = should_pause(held, others, waits=waits, now=NOW)
    assert found is must
    assert why in reason


def test_of_connections_that_all_send_never_all_wait():
    """Whoever holds least never waits."""
    held = [0, 3 * MAX_LEAD_BYTES, 5 * MAX_LEAD_BYTES]
    waiting = [
        should_pause(each, [(other, JUST_NOW) for k, other in enumerate(held) if k != one], waits=True, now=NOW)[0]
        for one, each in enumerate(held)
    ]
    assert waiting == [False, True, True]


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
