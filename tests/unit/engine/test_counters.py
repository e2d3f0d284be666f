"""Counters of the engine: how the time of a program is divided, and what they cost nobody."""

from __future__ import annotations

import pytest

from reigen.engine import counters as module
from reigen.engine.counters import EngineCounters
from reigen.engine.messages import OperationKind


class Clock:
    """Time that a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        self.counters = EngineCounters()

    def execute(self, seconds: float) -> None:
        """The driving thread moves data for so long."""
        self.counters.executing_since = self.now
        self.now += seconds
        self.counters.execution_seconds += seconds
        self.counters.executing_since = 0.0


def test_a_wait_is_transfer_as_far_as_data_was_moved_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    clock.now += 5.0  # the program computes
    clock.counters.begin_wait("x")
    clock.now += 2.0  # the others are late
    clock.execute(0.5)
    clock.counters.end_wait()
    assert clock.counters.times(clock.now) == (2.0, 0.5, 0.5)
    clock.execute(0.25)  # hidden: nobody waits
    assert clock.counters.times(clock.now) == (2.0, 0.5, 0.75)


def test_a_transfer_that_began_before_the_wait_fills_it_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    counters = clock.counters
    counters.executing_since = clock.now
    clock.now += 3.0
    counters.begin_wait("x")
    clock.now += 1.0
    counters.execution_seconds += 4.0
    counters.executing_since = 0.0
    counters.end_wait()
    assert counters.times(clock.now) == (0.0, 1.0, 4.0)


def test_what_was_moved_before_the_wait_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    counters = clock.counters
    counters.executing_since = clock.now
    clock.now += 0.5
    counters.begin_wait("x")
    clock.now += 0.25
    counters.execution_seconds += 0.75
    counters.executing_since = 0.0
    clock.now += 1.0  # another rank is late
    counters.end_wait()
    assert counters.times(clock.now) == (1.0, 0.25, 0.75)


def test_waits_of_several_threads_at_once_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    counters = clock.counters
    counters.begin_wait("first")
    clock.now += 3.0
    counters.begin_wait("second")
    counters.end_wait()
    assert counters.blocked_seconds == 0
    clock.now += 4.0
    assert counters.waits_for == "first"
    counters.end_wait()
    assert counters.blocked_seconds == 7.0
    counters.begin_wait("third")
    clock.now += 1.0
    counters.end_wait()
    assert counters.blocked_seconds == 8.0


def test_what_is_under_way_counts_as_far_as_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    counters = clock.counters
    counters.begin_wait("x")
    clock.now += 10.0
    assert counters.is_waiting
    assert counters.times(clock.now) == (10.0, 0.0, 0.0)
    counters.executing_since = clock.now
    clock.now += 2.0
    assert counters.times(clock.now) == (10.0, 2.0, 2.0)


def test_bytes_are_counted_by_way_and_kind() -> None:
    counters = EngineCounters()
    counters.bytes["network"][OperationKind.ALLREDUCE] += 12
    counters.bytes["shared_memory"][OperationKind.BROADCAST] += 1
    counters.bytes[""][OperationKind.BROADCAST] += 9
    counters.eager, counters.eager_bytes = 2, 8
    found = {(name, labels): value for name, labels, value in counters.samples_now()}
    assert found["reigen_bytes_total", ("allreduce", "network")] == 12
    assert found["reigen_bytes_total", ("allreduce", "shared_memory")] == 8
    assert found["reigen_bytes_total", ("broadcast", "shared_memory")] == 1
    assert found["reigen_operations_total", ("allreduce",)] == 2
    assert len([key for key in found if key[0] == "reigen_bytes_total"]) == 3
    assert counters.bytes["shared_memory"][OperationKind.ALLREDUCE] == 0, "reading changes nothing"


def test_views_are_counted_by_the_kind_of_their_change() -> None:
    counters = EngineCounters()
    counters.count_view_change("rerun", 0.5, num_lost=2, num_joined=0)
    counters.count_view_change("planned", 0.25, num_lost=0, num_joined=1)
    counters.count_view_change("rerun", 0.25, num_lost=1, num_joined=3)
    found = {(name, labels): value for name, labels, value in counters.samples_now()}
    assert found["reigen_view_changes_total", ("rerun",)] == 2
    assert found["reigen_view_changes_total", ("planned",)] == 1
    assert found["reigen_view_change_seconds_total", ()] == 1.0
    assert (found["reigen_lost_ranks_total", ()], found["reigen_joined_ranks_total", ()]) == (3, 4)
