"""The agent's own connection to the control service: both ends hear that the other one is there."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from reigen.cluster.membership.control_service import ControlService
from reigen.errors import LaunchError
from reigen.launch.agent.heartbeat import AgentHeartbeat
from reigen.launch.options import NetworkOptions
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.net.tls import TlsContext

SECRET = b"s" * 32


@pytest.fixture
def loop() -> Iterator[LauncherLoop]:
    with LauncherLoop() as made:
        yield made


def connected(server: ControlService, loop: LauncherLoop, heard: list[float], *, tls: bool = False) -> AgentHeartbeat:
    return AgentHeartbeat(
        server.address,
        SECRET,
        3,
        loop,
        lambda: heard.append(time.monotonic()),
        NetworkOptions(tls=tls),
        60.0,
    )


def wait(loop: LauncherLoop, condition: object) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        loop.wait(0.01)


@pytest.mark.parametrize("encrypted", [False, True])
def test_both_hear_each_other(loop: LauncherLoop, encrypted: bool) -> None:
    heard: list[float] = []
    server = ControlService(SECRET, tls=TlsContext() if encrypted else None)
    server.start()
    with closing(server), closing(connected(server, loop, heard, tls=encrypted)) as heartbeat:
        assert server.heard_at(3) == -math.inf
        before = time.monotonic()
        for number in range(1, 4):
            heartbeat.ask()
            wait(loop, lambda number=number: len(heard) == number)
            assert before <= server.heard_at(3) <= heard[-1]
            before = heard[-1]
        assert server.heard_at(2) == -math.inf


def test_a_service_that_has_ended_is_not_heard_and_nothing_else_happens(loop: LauncherLoop) -> None:
    heard: list[float] = []
    server = ControlService(SECRET)
    server.start()
    with closing(server), closing(connected(server, loop, heard)) as heartbeat:
        server.close()
        for _ in range(3):
            heartbeat.ask()
            loop.wait(0.01)
    assert heard == []


def test_a_service_that_does_not_answer_is_an_error(loop: LauncherLoop) -> None:
    with closing(ControlService(b"x" * 32)) as server:
        server.start()
        with pytest.raises(LaunchError, match=r"service at 127\.0\.0\.1:\d+ cannot be reached"):
            connected(server, loop, [])
