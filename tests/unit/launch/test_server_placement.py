"""Servers that move between processes: the launcher's decisions, alone and against processes that die at any moment."""

from __future__ import annotations

import random
from collections import deque

import pytest

from reigen.launch.elastic.server_placement import (
    PlacementInstruction,
    ServerPlacement,
    StartServerProcess,
    TellServerProcess,
)


def told(instructions: list[PlacementInstruction]) -> list[tuple[int, str]]:
    return [(one.process, one.text) for one in instructions if isinstance(one, TellServerProcess)]


def begun(num_servers: int, num_processes: int) -> ServerPlacement:
    placement = ServerPlacement(num_servers, num_processes)
    for process in range(num_processes):
        placement.process_ready(process)
    return placement


def test_processes_take_their_servers_when_they_listen() -> None:
    placement = ServerPlacement(3, 2)
    assert told(placement.process_ready(1)) == [(1, "take 1 0")]
    assert told(placement.process_ready(0)) == [(0, "take 0 0"), (0, "take 2 0")]


def test_a_server_is_taken_when_it_is_released_and_not_before() -> None:
    placement = begun(4, 2)
    assert placement.resize(3) == [StartServerProcess(2)]
    assert told(placement.process_ready(2)) == [(1, "release 3")]
    assert placement.process_ready(2) == [], "one by one"
    assert told(placement.released(1, 3)) == [(2, "take 3 1")]
    assert placement.released(1, 3) == [], "it was said before"


def test_a_process_that_leaves_is_told_to_end_when_it_has_no_server() -> None:
    placement = begun(2, 2)
    assert told(placement.process_leaving(1)) == [(1, "release 1")]
    assert placement.process_leaving(1) == []
    assert told(placement.released(1, 1)) == [(0, "take 1 1"), (1, "end")]
    assert placement.process_ended(1, is_restarted=False) == []
    assert (placement.wanted, placement.processes) == (1, {0})


def test_the_last_process_leaves_when_another_one_has_its_servers() -> None:
    placement = begun(2, 1)
    assert placement.process_leaving(0) == [StartServerProcess(1)]
    assert told(placement.process_ready(1)) == [(0, "release 0")]
    assert told(placement.released(0, 0)) == [(1, "take 0 1"), (0, "release 1")]
    assert told(placement.released(0, 1)) == [(1, "take 1 1"), (0, "end")]


def test_all_processes_that_there_may_be_leave_at_once() -> None:
    placement = begun(2, 2)
    placement.process_leaving(0)
    assert StartServerProcess(2) in placement.process_leaving(1)


def test_a_process_that_dies_before_it_has_released_a_server_keeps_it() -> None:
    placement = begun(2, 2)
    placement.resize(1)
    assert told(placement.process_ended(1, is_restarted=True)) == []
    assert told(placement.process_ready(1)) == [(1, "take 1 1"), (1, "release 1")]


def test_a_server_whose_next_process_has_died_waits_for_that() -> None:
    placement = begun(2, 1)
    placement.resize(2)
    assert told(placement.process_ready(1)) == [(0, "release 1")]
    placement.process_ended(1, is_restarted=True)
    assert told(placement.released(0, 1)) == []
    assert told(placement.process_ready(1)) == [(1, "take 1 1")]


class Processes:
    """Server processes, with messages on their way to and from them, and who has which server: one at most."""

    def __init__(self, placement: ServerPlacement) -> None:
        self.placement = placement
        self.alive: dict[int, bool] = {}  # by process, whether it has said that it listens
        self.to: dict[int, deque[str]] = {}
        self.from_: dict[int, deque[str]] = {}
        self.holders: dict[int, int] = {}
        self.generations: dict[int, int] = {}
        self.releasing: list[tuple[int, int]] = []
        for process in placement.processes:
            self._start(process)

    def _start(self, process: int) -> None:
        assert process not in self.alive
        self.alive[process], self.to[process], self.from_[process] = False, deque(), deque()

    def carry_out(self, instructions: list[PlacementInstruction]) -> None:
        for one in instructions:
            if isinstance(one, StartServerProcess):
                self._start(one.process)
            else:
                assert self.alive[one.process], "it listens"
                self.to[one.process].append(one.text)
        self.placement.validate()

    def hear(self, process: int) -> None:
        """The process reads a message."""
        word, *numbers = self.to[process].popleft().split()
        server = int(numbers[0]) if numbers else -1
        if word == "take":
            assert server not in self.holders, "one process at most has a server"
            assert self.generations.get(server, -1) < int(numbers[1]), "a generation begins once"
            self.holders[server], self.generations[server] = process, int(numbers[1])
        elif word == "release":
            assert self.holders[server] == process
            self.releasing.append((process, server))
        else:
            assert process not in self.holders.values(), "what ends has no server"
            self._drain(process)
            del self.alive[process]
            self.carry_out(self.placement.process_ended(process, is_restarted=False))

    def begin(self, process: int) -> None:
        self.alive[process] = True
        self.from_[process].append("ready")

    def release(self, index: int) -> None:
        process, server = self.releasing.pop(index)
        del self.holders[server]
        self.from_[process].append(f"released {server}")

    def say(self, process: int) -> None:
        """The launcher reads a message."""
        word, *numbers = self.from_[process].popleft().split()
        if word == "ready":
            self.carry_out(self.placement.process_ready(process))
        elif word == "leaving":
            self.carry_out(self.placement.process_leaving(process))
        else:
            self.carry_out(self.placement.released(process, int(numbers[0])))

    def _drain(self, process: int) -> None:
        while self.from_[process]:  # the launcher reads what was said before it handles the end
            self.say(process)

    def kill(self, process: int) -> None:
        self._drain(process)
        self.releasing = [one for one in self.releasing if one[0] != process]
        self.holders = {server: one for server, one in self.holders.items() if one != process}
        del self.alive[process]
        instructions = self.placement.process_ended(process, is_restarted=True)
        self._start(process)
        self.carry_out(instructions)

    def steps(self) -> list[tuple[str, int]]:
        steps = [("begin", process) for process, listens in self.alive.items() if not listens]
        steps += [("hear", process) for process, messages in self.to.items() if messages and process in self.alive]
        steps += [("say", process) for process, messages in self.from_.items() if messages and process in self.alive]
        return steps + [("release", index) for index in range(len(self.releasing))]


@pytest.mark.parametrize("seed", range(300))
def test_schedules_with_deaths(seed: int) -> None:
    """In the end each server is in one process, as many as wanted run, and none has two more than another."""
    chance = random.Random(seed)
    num_servers = chance.randrange(2, 7)
    processes = Processes(ServerPlacement(num_servers, chance.randrange(1, num_servers + 1)))
    for _ in range(chance.randrange(20, 200)):
        luck = chance.random()
        listening = [process for process, listens in processes.alive.items() if listens]
        if luck < 0.06:
            processes.carry_out(processes.placement.resize(chance.randrange(0, num_servers + 2)))
        elif luck < 0.10 and listening:
            processes.from_[chance.choice(listening)].append("leaving")
        elif luck < 0.16:
            processes.kill(chance.choice(sorted(processes.alive)))
        elif steps := processes.steps():
            what, which = chance.choice(steps)
            getattr(processes, what)(which)
    while steps := processes.steps():
        what, which = chance.choice(steps)
        getattr(processes, what)(which)
    placement = processes.placement
    assert len(processes.alive) == placement.wanted
    assert sorted(processes.holders) == list(range(num_servers))
    numbers = [list(processes.holders.values()).count(process) for process in processes.alive]
    assert max(numbers) - min(numbers) <= 1
