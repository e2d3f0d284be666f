"""The launcher's end of a host: when nothing is heard of it any more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from reigen.launch.loop import Loop
from reigen.launch.outpost import Outpost, Step


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which is the test's to change."""
    now = [1000.0]
    monkeypatch.setattr("reigen.launch.outpost.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def outpost(clock: list[float]) -> Iterator[Outpost]:
    """One whose agent is there, and may be silent for 5 seconds."""
    with Loop() as loop, closing(Outpost("h2", ["sleep", "60"], loop, Mock(), 5.0)) as made:
        made.step = Step.HERE
        yield made


def pass_seconds(outpost: Outpost, clock: list[float], seconds: int) -> None:
    for _ in range(seconds):
        clock[0] += 1
        outpost.turn()


def test_a_host_that_says_nothing_is_lost(outpost: Outpost, clock: list[float]) -> None:
    pass_seconds(outpost, clock, 5)
    assert outpost.step is Step.HERE
    pass_seconds(outpost, clock, 1)
    assert outpost.step is Step.GONE
    assert outpost.refused is not None
    assert outpost.refused.reason == "nothing has been heard of it for 5 s"


def test_a_launcher_that_did_not_run_listens_first(outpost: Outpost, clock: list[float]) -> None:
    pass_seconds(outpost, clock, 4)
    clock[0] += 1000
    outpost.turn()
    pass_seconds(outpost, clock, 5)
    assert outpost.step is Step.HERE
    pass_seconds(outpost, clock, 1)
    assert outpost.step is Step.GONE
