"""Who has died, told between machines: processes, whole machines, networks that are cut, the service itself."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Host, HostProcess, MachineError
from tests.network.conftest import MakeHosts
from tests.network.test_hosts import wait_for

MEMBER = (sys.executable, Path(__file__).with_name("member.py"))
#: For the kernel to see that a machine is silent, and for a slow machine of tests.
SILENCE_SECONDS = (1.5, 60.0)

pytestmark = pytest.mark.slow


class Job:
    """A service on the first host, and one member for each host that is named."""

    def __init__(self, service: Host, hosts: Sequence[Host], **environ: str) -> None:
        self.service = service.start([*MEMBER, "serve", service.address], env=environ, has_input=True)
        wait_for(lambda: self.service.output()[0], "the service to start")
        address = self.service.output()[0].strip()
        size = len(hosts)
        self.members = [
            host.start([*MEMBER, "join", address, str(rank), str(size)], env=environ) for rank, host in enumerate(hosts)
        ]
        for member in self.members:
            wait_for(lambda member=member: "in" in member.output()[0], "a member to be in")  # type: ignore[misc]

    def verdicts(self, members: Sequence[HostProcess] | None = None) -> list[tuple[float, str, list[int], str]]:
        """What members say: when, the kind of error, the ranks, the reason."""
        found: list[Any] = []
        for member in self.members if members is None else members:
            assert member.wait(80.0) == 0, member.output()
            found.append(tuple(json.loads(member.output()[0].splitlines()[1])))
        return found


def test_a_process_is_killed(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2)
    job = Job(one, [one, two, two])
    begun = time.time()
    job.members[1].signal(signal.SIGKILL)
    for when, kind, ranks, reason in job.verdicts([job.members[0], job.members[2]]):
        assert (kind, ranks) == ("PeerLostError", [1])
        assert reason == "rank(s) 1 (host h2) died while others wait for them"
        assert when - begun < SILENCE_SECONDS[1]


def test_all_processes_of_a_machine_end_at_once(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2)
    job = Job(one, [one, two, two])
    two.kill_everything()
    ((_, kind, ranks, reason),) = job.verdicts(job.members[:1])
    assert (kind, ranks) == ("PeerLostError", [1, 2])
    assert reason.startswith("host h2 was lost, or all its processes were killed: its rank(s) 1, 2 died at once")


@pytest.mark.parametrize("how", ["crash", "cut"])
def test_a_machine_falls_silent(make_hosts: MakeHosts, how: str) -> None:
    one, two, three = make_hosts(3)
    job = Job(one, [one, two, two, three])
    begun = time.time()
    getattr(two, how)()
    for when, kind, ranks, reason in job.verdicts([job.members[0], job.members[3]]):
        assert (kind, ranks) == ("PeerLostError", [1, 2])
        assert reason.startswith("host h2 was lost, and rank(s) 1, 2 with it: nothing was heard of it for 3 s")
        assert SILENCE_SECONDS[0] < when - begun < SILENCE_SECONDS[1]
    if how == "cut":  # those who were cut off learn it by themselves
        for when, kind, ranks, reason in job.verdicts(job.members[1:3]):
            assert (kind, ranks) == ("PeerLostError", [])
            assert reason.startswith("nothing was heard of the job's control service at 10.77.0.1:")
            assert "or this host, h2, is cut off from it" in reason
            assert SILENCE_SECONDS[0] < when - begun < SILENCE_SECONDS[1]


def test_the_machine_of_the_service_falls_silent(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2)
    job = Job(one, [one, two])
    one.crash()
    ((_, kind, _, reason),) = job.verdicts(job.members[1:])
    assert kind == "PeerLostError"
    assert "nothing was heard of the job's control service" in reason


def test_the_service_ends(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2)
    job = Job(one, [two])
    job.service.signal(signal.SIGKILL)
    ((_, kind, _, reason),) = job.verdicts()
    assert kind == "PeerLostError"
    assert "`reigen run` has ended or was killed" in reason


def test_a_short_interruption_is_nothing(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2)
    job = Job(one, [one, two], SILENCE_SECONDS="12")
    two.cut()
    with pytest.raises(MachineError):  # for less than half of the time after which it would count
        job.members[0].wait(5.0)
    two.join()
    with pytest.raises(MachineError):
        job.members[0].wait(10.0)
    job.members[1].signal(signal.SIGKILL)
    ((_, _, ranks, reason),) = job.verdicts(job.members[:1])
    assert (ranks, reason) == ([1], "rank(s) 1 (host h2) died while others wait for them")


def test_a_stopped_process_is_not_lost(make_hosts: MakeHosts) -> None:
    """Its kernel answers for it; deadlines are for such ranks."""
    one, two = make_hosts(2)
    job = Job(one, [one, two])
    job.members[1].signal(signal.SIGSTOP)
    with pytest.raises(MachineError):
        job.members[0].wait(6.0)
    job.members[1].signal(signal.SIGKILL)
    ((_, _, ranks, _),) = job.verdicts(job.members[:1])
    assert ranks == [1]
