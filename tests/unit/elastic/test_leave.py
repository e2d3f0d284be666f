"""Whether a process that leaves a job after a notice is asked to save what it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from reigen.elastic.catch_up import CatchUpPlan
from reigen.elastic.job import BaseJob
from reigen.elastic.state import Departure
from reigen.errors import JobLeft


def leave(arrival: Any) -> list[Departure]:
    """Rank 2 of 3 leaves; returns what its `on_leave` gets."""
    departures: list[Departure] = []
    job: Any = SimpleNamespace(
        _arrival=arrival, rank=2, _on_leave=departures.append, training=SimpleNamespace(detach=int), _elastic=None
    )
    left = JobLeft(2, 3, all_leave=True)
    BaseJob.__exit__(job, JobLeft, left, None)
    return departures


def test_a_member_is_asked() -> None:
    [departure] = leave(None)
    assert departure == Departure(2, 3, True)
    assert len(leave((None, CatchUpPlan(0, frozenset({1}), frozenset())))) == 1, "another one arrives"


def test_a_newcomer_whose_state_nobody_has_compared_is_not() -> None:
    assert leave((None, CatchUpPlan(0, frozenset({2}), frozenset()))) == []
