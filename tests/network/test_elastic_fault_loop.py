"""The loop of faults (`tests/elastic/fault_loop.py`) on three stand-in hosts with two ranks each: agents die and stand
still, hosts are cut off, and two of them from each other. See `tests/elastic/test_fault_loop.py` for the variables.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from tests.elastic.fault_loop import FaultLoop, FaultyJob, JobProcess, describe_process
from tests.elastic.test_fault_loop import ENVIRON, GAP_SECONDS, NUM_FAULTS, PROGRAM, RESTS, SECONDS, SEED, SOURCE
from tests.lab import HostProcess, Hosts
from tests.network.conftest import MakeHosts

pytestmark = pytest.mark.slow

PEER_TIMEOUT_SECONDS = 4.0


class ThreeHostsJob(FaultyJob):
    """A job of six ranks of three hosts, started on the first one."""

    size = 6
    faults: ClassVar[dict[str, float]] = {
        "kill rank": 6,
        "kill rank 0": 4,
        "kill several": 1,
        "kill agent": 1,
        "stop rank 0.5 s": 1,
        "stop agent 0.5 s": 1,
        "stop rank for ever": 0.3,
        "cut host 1 s": 1,
        "cut host": 0.6,
        "partition 1 s": 1,
        "partition": 0.6,
        "lose packets": 0.5,
    }

    def __init__(self, directory: Path, hosts: Hosts, launcher: HostProcess) -> None:
        super().__init__(directory)
        self._hosts, self._launcher = hosts, launcher

    def processes(self) -> list[JobProcess]:
        return [describe_process(*each) for host in self._hosts for each in host.processes().items()]

    def has_ended(self) -> bool:
        return self._launcher.returncode is not None

    def errors(self) -> str:
        return self._launcher.output()[1]

    def disturb(self, kind: str, chances: random.Random) -> Callable[[], None]:
        if kind == "partition":
            # the launcher gives a host up from which it is cut off, whatever the members have agreed on
            one, other = chances.sample([*self._hosts][1:], 2)
            self._hosts.partition(one, other)
            return self._once(lambda: self._hosts.heal(one, other))
        host = chances.choice([*self._hosts][1:])
        if kind == "cut host":
            host.cut()
            return self._once(host.join)
        host.lose(0.3)
        return self._once(lambda: host.lose(0.0))

    @staticmethod
    def _once(action: Callable[[], None]) -> Callable[[], None]:
        actions = [action]
        return lambda: actions.pop()() if actions else None


def test_faults_of_all_roles_on_three_hosts(make_hosts: MakeHosts, tmp_path: Path) -> None:
    hosts = make_hosts(3, ssh_port=22, shared=[tmp_path])
    # members are at times on two hosts alone, of which the one without rank 0 goes on only with a witness
    witness = ["--witness-dir", str(tmp_path / "witness")]
    (tmp_path / "witness").mkdir()
    options = ["-np", "6", "--min-np", "1", "-H", "h1:2,h2:2,h3:2", *witness, *RESTS]
    command = [sys.executable, "-m", "reigen", "run", *options, sys.executable, str(PROGRAM), str(tmp_path), "0.02"]
    environ = {**ENVIRON, "REIGEN_PEER_TIMEOUT": f"{PEER_TIMEOUT_SECONDS:g}"}

    def start() -> FaultyJob:
        return ThreeHostsJob(tmp_path, hosts, hosts[0].start(command, env=environ, cwd=SOURCE))

    loop = FaultLoop(start, random.Random(SEED), GAP_SECONDS)
    loop.run(NUM_FAULTS if "REIGEN_TEST_FAULTS" in os.environ else 6, SECONDS)
    print(loop.summary())
    assert not loop.ends
