"""What goes wrong between hosts ends in one error that says so, on every rank and in time, and leaves no process."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reigen.cluster.bootstrap.job_credentials import derive_job_secret, derive_ports
from reigen.cluster.environ import detect_job
from reigen.net.tls import TlsContext
from tests.lab import Host, Hosts
from tests.network.conftest import MakeHosts
from tests.network.job import PEER_TIMEOUT_SECONDS, Job, Rank, foreign, ours
from tests.network.waiting import wait_for

pytestmark = pytest.mark.slow
MIB = 1 << 20
TALK = (sys.executable, "-I", "-S", Path(__file__).with_name("talk.py"))
#: What noticing, telling the others and leaving may take beyond the deadline that applies, on a busy machine; one that
#: does not apply is much longer.
SLACK_SECONDS = 60.0
#: How long ranks that come wait for one that does not; and who comes, for whoever is slow.
START = {"REIGEN_START_TIMEOUT": "8"}
PATIENT = {"REIGEN_START_TIMEOUT": "60"}
StartJob = Callable[..., Job]


@pytest.fixture
def start(make_hosts: MakeHosts) -> Iterator[StartJob]:
    """``start(hosts or their number, arguments of rank.py, ...)``: a job."""
    with contextlib.ExitStack() as stack:

        def make(hosts: Hosts | int, *arguments: object, **options: Any) -> Job:
            if isinstance(hosts, int):
                hosts = make_hosts(hosts)
            if "launcher" not in options:
                options["launcher"] = stack.enter_context(ours(hosts[0]))
            return Job(hosts, [str(argument) for argument in arguments], **options)

        yield make


def errors(job: Job, since: float, deadline: float, *, but: tuple[int, ...] = ()) -> list[dict]:
    """What the ranks ended with, each in time."""
    ranks: list[Rank] = job.finish(since + deadline + SLACK_SECONDS - time.monotonic(), but=but)
    return [rank.error for rank in ranks]


def in_the_middle(job: Job) -> None:
    """Waits until data is on its way: more of it has come than a negotiation would need."""
    before = job.hosts[1].counters
    wait_for(lambda: (job.hosts[1].counters - before).received_bytes > MIB, "data on its way")


def test_sums_are_right_in_all_shapes_of_a_job(start):
    job = start(3, MIB, 5, ranks_a_host=2)
    job.succeeds()


def test_a_wrong_secret(start):
    start_time = time.monotonic()
    job = start(2, 4, env=START, env_of={1: {**PATIENT, "REIGEN_SECRET": "ab" * 32}})
    mine, other = errors(job, start_time, 8)
    assert other["kind"] == "AuthenticationError"
    assert "secret" in other["text"]
    assert mine["kind"] == "DeadlineError"
    assert mine["ranks"] == [1]


def test_an_old_version_of_the_protocol(start):
    start_time = time.monotonic()
    job = start(2, 4, env=START, env_of={1: {**PATIENT, "OLD_PROTOCOL": "1"}})
    mine, other = errors(job, start_time, 8)
    assert other["kind"] == "AuthenticationError"
    assert "version" in other["text"]
    assert mine["kind"] == "DeadlineError"
    assert mine["ranks"] == [1]


def test_the_network_is_cut_in_the_middle_of_a_collective(make_hosts, start):
    hosts = make_hosts(3)
    for host in hosts:
        host.shape(100e6)
    job = start(hosts, 16 * MIB)
    job.wait_until("ready")
    in_the_middle(job)
    hosts[2].cut()
    first, second, cut_off = errors(job, time.monotonic(), PEER_TIMEOUT_SECONDS)
    for error in (first, second):
        assert error["kind"] == "PeerLostError"
        assert error["ranks"] == [2]
        assert "host h3" in error["text"]
    assert cut_off["kind"] == "PeerLostError"


def test_one_packet_in_a_hundred_is_lost(make_hosts, start):
    hosts = make_hosts(3)
    for host in hosts:
        host.lose(0.01)
    job = start(hosts, 4 * MIB, 5)
    job.succeeds()


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_is_killed_on_another_host(start, victim):
    job = start(2, 16 * MIB, ranks_a_host=2)
    job.wait_until("step", 2)
    job.ranks[victim].process.kill()
    for error in errors(job, time.monotonic(), 1.0, but=(victim,)):
        assert error["kind"] == "PeerLostError"
        assert error["ranks"] == [victim]
        assert f"rank(s) {victim} (host {job.ranks[victim].host.name})" in error["text"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_machine_crashes(start, victim):
    """The first one is that of the coordinator and of the control service."""
    job = start(3, 4 * MIB, ranks_a_host=2)
    job.wait_until("step", 2)
    job.hosts[victim].crash()
    lost = (2 * victim, 2 * victim + 1)
    for error in errors(job, time.monotonic(), PEER_TIMEOUT_SECONDS, but=lost):
        assert error["kind"] == "PeerLostError"
        assert f"h{victim + 1}" in error["text"] or "control service" in error["text"]
        if victim:
            assert set(error["ranks"]) <= set(lost)


@pytest.mark.parametrize("leaver", [0, 1, 3])
def test_a_rank_leaves_and_the_others_go_on(start, leaver):
    job = start(2, 4 * MIB, ranks_a_host=2, env_of={leaver: {"LEAVE_AFTER": "2"}})
    job.wait_until("step", 2)
    for error in errors(job, time.monotonic(), 1.0, but=(leaver,)):
        assert error["kind"] == "PeerLostError"
        assert error["ranks"] == [leaver]
        assert "left the job" in error["text"]


def test_a_rank_leaves_while_its_last_data_is_on_its_way(make_hosts, start):
    """Nothing is wrong then: rank 0 is done with a broadcast as soon as its kernel has all of it."""
    hosts = make_hosts(3)
    for host in hosts:
        host.shape(20e6)
    start(hosts, 2 * MIB, 2, "broadcast").succeeds()


def test_a_short_interruption_is_nothing(make_hosts, start):
    hosts = make_hosts(2)
    for host in hosts:
        host.shape(100e6)
    with ours(hosts[0], peer_timeout_seconds=20.0) as launcher:
        job = start(hosts, 4 * MIB, launcher=launcher, env={"REIGEN_PEER_TIMEOUT": "20"})
        job.wait_until("step")
        before = count_retransmissions(hosts)  # one of them may have nothing on its way
        hosts[1].cut()
        wait_for(lambda: count_retransmissions(hosts) >= before + 2, "packets are sent again")
        hosts[1].join()
        job.wait_until("step", len(job.ranks[0].events()) + 3)
        for rank in job.ranks:
            rank.process.kill()


def count_retransmissions(hosts) -> int:
    return sum(host.num_retransmissions for host in hosts)


def test_a_rank_stops(start):
    job = start(2, MIB, env={"REIGEN_DEADLINE": "8"})
    job.wait_until("step", 2)
    stopped = job.ranks[1]
    stopped.process.signal(signal.SIGSTOP)
    (error,) = errors(job, time.monotonic(), 8.0, but=(1,))
    assert error["kind"] == "DeadlineError", error
    assert error["ranks"] == [1]
    assert "REIGEN_DEADLINE" in error["text"]
    stopped.process.signal(signal.SIGCONT)
    job.finish(SLACK_SECONDS)
    assert stopped.error["kind"] in {"PeerLostError", "DeadlineError"}


def test_two_machines_cannot_reach_each_other_though_both_reach_the_service(make_hosts, start):
    hosts = make_hosts(3)
    job = start(hosts, 4 * MIB)
    job.wait_until("step", 2)
    hosts.partition(hosts[1], hosts[2])
    for error in errors(job, time.monotonic(), PEER_TIMEOUT_SECONDS):
        assert error["kind"] == "PeerLostError"
        assert error["ranks"]
        assert re.search(
            r"rank (1 \(host h2\)|2 \(host h3\)) (has heard nothing of|died, or was cut off)", error["text"]
        )


def test_a_machine_is_cut_off_while_nothing_is_sent(make_hosts, start):
    hosts = make_hosts(2)
    job = start(hosts, 4, 1, "idle")
    job.wait_until("step")
    hosts[1].cut()
    for rank in job.ranks:
        rank.process.tell(b"go on\n")
    for error in errors(job, time.monotonic(), PEER_TIMEOUT_SECONDS):
        assert error["kind"] == "PeerLostError"


def test_the_port_of_rank_0_is_taken(make_hosts, start):
    """Somebody else has started the ranks, and rank 0's first port is another program's: the next one serves."""
    hosts = make_hosts(2)
    launcher = foreign(hosts[0])
    found = detect_job({**launcher, "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    first, *_ = derive_ports(derive_job_secret(bytes.fromhex(launcher["REIGEN_SECRET"]), found.job_id))
    listen(hosts[0], first)
    start(hosts, MIB, 5, launcher=launcher).succeeds()


def test_the_only_port_of_rank_0_is_taken(make_hosts, start):
    hosts = make_hosts(2)
    listen(hosts[0], 12345)
    env = {"REIGEN_RENDEZVOUS_PORT": "12345", "REIGEN_START_TIMEOUT": "4"}
    start_time = time.monotonic()
    first, second = errors(start(hosts, MIB, 5, launcher=foreign(hosts[0]), env=env), start_time, 4)
    assert first["kind"] == "ConfigError"
    assert "12345: Address already in use" in first["text"]
    assert second["kind"] in {"AuthenticationError", "DeadlineError"}
    assert "12345" in second["text"]


@pytest.mark.skipif(shutil.which("faketime") is None, reason="faketime is not installed")
@pytest.mark.parametrize("encrypted", [False, True])
def test_clocks_are_apart(make_hosts, start, encrypted):
    """The time of day is wrong by days. How long they have been up, machines never agree on."""
    hosts = make_hosts(3)
    with ours(hosts[0], tls=TlsContext() if encrypted else None) as launcher:
        clocks = {1: ["faketime", "-m", "-f", "+3d"], 2: ["faketime", "-m", "-f", "-3d"]}
        start(hosts, MIB, 5, launcher=launcher, before_of=clocks, env={"REIGEN_TLS": str(int(encrypted))}).succeeds()


def test_a_job_over_ipv6(make_hosts, start):
    hosts = make_hosts(2)
    with ours(hosts[0], hosts[0].address6) as launcher:
        start(hosts, MIB, 5, launcher=launcher).succeeds()
    counted = dict(line.split() for line in Path(f"/proc/{hosts[0].pid}/net/snmp6").read_text().splitlines())
    assert int(counted["Ip6InOctets"]) > 5 * MIB


def listen(host: Host, port: int) -> None:
    """Another program takes a port on a machine."""
    host.start([*TALK, "sink", host.address, str(port)])
    host.wait_until_listening(port)
