"""The launcher's end of a host: when nothing is heard of it any more."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from reigen.launch.agent.agent_client import AgentClient, AgentPhase
from reigen.launch.agent.lines import PipedLine
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.launch.supervision.spawn import spawn_client
from tests.patience import patiently


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which is the test's to change."""
    now = [1000.0]
    monkeypatch.setattr("reigen.launch.agent.agent_client.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def outpost(clock: list[float]) -> Iterator[AgentClient]:
    """One whose agent is there, and may be silent for 5 seconds."""
    with (
        LauncherLoop() as loop,
        closing(AgentClient("h2", PipedLine(spawn_client(["sleep", "60"]), loop), Mock(), 5.0)) as made,
    ):
        made.phase = AgentPhase.CONNECTED
        yield made


def pass_seconds(outpost: AgentClient, clock: list[float], seconds: int) -> None:
    for _ in range(seconds):
        clock[0] += 1
        outpost.turn()


def test_a_host_that_says_nothing_is_lost(outpost: AgentClient, clock: list[float]) -> None:
    pass_seconds(outpost, clock, 5)
    assert outpost.phase is AgentPhase.CONNECTED
    pass_seconds(outpost, clock, 1)
    assert outpost.phase is AgentPhase.GONE
    assert outpost.refused is not None
    assert outpost.refused.reason == "nothing has been heard of it for 5 s"


def test_the_client_of_a_lost_host_has_its_time_to_end_and_is_killed_then(clock: list[float]) -> None:
    with LauncherLoop() as loop:
        process = spawn_client(["sleep", "60"], end_seconds=0.05)
        with closing(AgentClient("h2", PipedLine(process, loop), Mock(), 5.0)) as client:
            client.phase = AgentPhase.CONNECTED
            pass_seconds(client, clock, 6)
            assert client.phase is AgentPhase.GONE
            assert process.poll() is None
            while (left := client.turn()) is not None:
                loop.wait(left)
            assert process.wait(60) == -signal.SIGKILL


def test_an_agent_whose_line_has_ended_is_ending_until_its_client_has(clock: list[float]) -> None:
    with LauncherLoop() as loop:
        process = spawn_client(["sh", "-c", "exec >&- <&-; exec sleep 60"])
        with closing(AgentClient("h2", PipedLine(process, loop), Mock(), 5.0)) as client:
            client.phase = AgentPhase.READY
            while not client.is_ending:
                loop.wait(60)
            assert client.phase is AgentPhase.READY
            process.kill()
            process.wait()
            client.turn()
            assert (client.phase, client.is_ending, client.exit_code) == (AgentPhase.GONE, False, -signal.SIGKILL)


def test_a_host_that_is_heard_in_another_way_is_not_lost(outpost: AgentClient, clock: list[float]) -> None:
    """ssh has nothing to say where packets are lost, and for how long nobody can tell."""
    heard = [0.0]
    outpost.last_received_elsewhere = lambda: heard[0]
    for _ in range(10):
        heard[0] = clock[0]
        pass_seconds(outpost, clock, 5)
    assert outpost.phase is AgentPhase.CONNECTED
    pass_seconds(outpost, clock, 1)
    assert outpost.phase is AgentPhase.GONE


def test_a_host_may_be_silent_for_a_shorter_time_once_the_job_has_failed(
    outpost: AgentClient, clock: list[float]
) -> None:
    pass_seconds(outpost, clock, 3)
    outpost.silence_seconds = 3.5
    assert outpost.turn() == 0.5
    pass_seconds(outpost, clock, 1)
    assert outpost.phase is AgentPhase.GONE
    assert outpost.refused is not None
    assert outpost.refused.reason == "nothing has been heard of it for 3.5 s"


def test_a_launcher_that_did_not_run_listens_first(outpost: AgentClient, clock: list[float]) -> None:
    pass_seconds(outpost, clock, 4)
    clock[0] += 1000
    outpost.turn()
    pass_seconds(outpost, clock, 5)
    assert outpost.phase is AgentPhase.CONNECTED
    pass_seconds(outpost, clock, 1)
    assert outpost.phase is AgentPhase.GONE


def test_hosts_that_are_lost_at_once_are_not_waited_for_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client processes that stay when their output has ended, and that may take their time to end by themselves."""

    def attempt(seconds: float) -> None:
        monkeypatch.setattr("reigen.launch.agent.agent_client._LAST_SECONDS", seconds)
        commands = [(["sh", "-c", "exec >&-; exec sleep 600"], 0.0)] * 2 + [(["sleep", "600"], 2 * seconds)] * 4
        with LauncherLoop() as loop:
            lines = [PipedLine(spawn_client(command, grace), loop) for command, grace in commands]
            agents = [AgentClient("h", line, Mock(), 5.0) for line in lines]
            for agent in agents[2:]:
                agent.phase, agent.silence_seconds = AgentPhase.CONNECTED, -1.0
            begin = time.monotonic()
            while any(agent.phase is not AgentPhase.GONE for agent in agents):
                for agent in agents:
                    agent.turn()
                loop.wait(0.01)
            for agent in agents:
                agent.begin_close()
            for agent in agents:
                agent.close()
        taken = time.monotonic() - begin
        assert [agent.exit_code for agent in agents] == [-9] * 6
        assert taken < 8 * seconds  # once, and then twice that; one after the other, ten times

    patiently(attempt)


def test_the_exit_code_of_a_client_that_ends_after_its_output_is_known() -> None:
    with LauncherLoop() as loop:
        agent = AgentClient("h", PipedLine(spawn_client(["sh", "-c", "exec >&-; exit 7"]), loop), Mock(), 5.0)
        while agent.phase is not AgentPhase.GONE:
            loop.wait(agent.turn())
        agent.close()
    assert agent.exit_code == 7
