"""Schedulers, servers and workers on several machines, started by hand."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from reigen.cluster.environ import WORKERS_LOST_EXIT_CODE
from tests.kv.test_by_hand import PROGRAM
from tests.lab import Host, HostProcess
from tests.network.conftest import MakeHosts
from tests.network.test_hosts import wait_for

NODE = (sys.executable, str(Path(__file__).parents[1] / "kv" / "node.py"))
SCHEDULER = (sys.executable, "-m", "reigen", "scheduler")
SECRET = os.urandom(32).hex()

pytestmark = pytest.mark.slow


class ByHand:
    """A job of 2 workers and 2 servers that somebody starts in terminals."""

    def __init__(self, scheduler: str, **variables: str) -> None:
        self._environ = {
            "DMLC_PS_ROOT_URI": scheduler,
            "DMLC_PS_ROOT_PORT": "9091",
            "DMLC_NUM_WORKER": "2",
            "DMLC_NUM_SERVER": "2",
            "PS_VERBOSE": "1",
            **variables,
        }

    def scheduler(self, host: Host, **variables: str) -> HostProcess:
        return host.start(SCHEDULER, env={**self._environ, **variables})

    def program(self, host: Host, role: str) -> HostProcess:
        return host.start(PROGRAM, env={**self._environ, "DMLC_ROLE": role})

    def node(self, host: Host, role: str, number: int, *commands: str, **variables: str) -> HostProcess:
        environ = {**self._environ, "DMLC_ROLE": role, "DMLC_TASK_ID": str(number), **variables}
        node = host.start(NODE, env=environ, has_input=True)
        node.tell("".join(f"{command}\n" for command in commands).encode())
        node.end_input()
        return node


def answers(node: HostProcess) -> list[Any]:
    return [json.loads(line) for line in node.output()[0].splitlines()]


def check_good_end(scheduler: HostProcess, nodes: list[HostProcess]) -> None:
    assert [process.wait(60) for process in (*nodes, scheduler)] == [0] * (len(nodes) + 1), scheduler.output()


WORK = ("servers", "barrier start", "leave")


def test_names_interfaces_and_a_secret(make_hosts: MakeHosts) -> None:
    one, two, three = make_hosts(3)
    job = ByHand("h1", REIGEN_SECRET=SECRET)
    nodes = [
        job.node(one, "worker", 0, *WORK),
        job.node(three, "worker", 1, *WORK),
        job.node(two, "server", 0, "serve", DMLC_NODE_HOST="h2"),
        job.node(three, "server", 1, "serve", DMLC_INTERFACE="et"),  # as MXNet: how its name begins
    ]
    check_good_end(job.scheduler(one), nodes)
    for worker in nodes[:2]:
        joined, servers, done, _ = answers(worker)
        assert joined["joined"] in {0, 1}
        assert [address.partition(":")[0] for _, address in servers] == ["10.77.0.2", "10.77.0.3"]
        assert done == "done"


def test_ipv6_and_tls(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2)
    job = ByHand("h1-6", REIGEN_SECRET=SECRET, REIGEN_TLS="1")
    nodes = [
        job.node(one, "worker", 0, *WORK),
        job.node(two, "worker", 1, *WORK),
        job.node(one, "server", 0, "serve"),
        job.node(two, "server", 1, "serve", DMLC_NODE_HOST=two.address6),
    ]
    check_good_end(job.scheduler(one), nodes)
    assert [address.rpartition(":")[0] for _, address in answers(nodes[0])[1]] == [
        f"[{one.address6}]",
        f"[{two.address6}]",
    ]


def test_one_program_in_all_roles_on_three_machines(make_hosts: MakeHosts) -> None:
    one, two, three = make_hosts(3)
    job = ByHand("h1", REIGEN_SECRET=SECRET, REIGEN_TLS="1", REIGEN_KV_BIGARRAY_BOUND="1000")
    places = [(two, "server"), (one, "worker"), (three, "server"), (one, "scheduler"), (three, "worker")]
    processes = [job.program(host, role) for host, role in places]
    assert [process.wait(60) for process in processes] == [0] * 5, [process.output() for process in processes]
    lines = [process.output()[0].splitlines() for process in processes]
    assert [lines[0], lines[2], lines[3]] == [[]] * 3
    assert sorted(json.loads(*lines[index]) for index in (1, 4)) == [["worker", rank, 2, [3.0]] for rank in range(2)]


def test_a_machine_that_crashes_is_told_by_its_name(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2)
    job = ByHand("h1", REIGEN_SECRET=SECRET, PS_HEARTBEAT_INTERVAL="0.3", PS_HEARTBEAT_TIMEOUT="8")
    scheduler = job.scheduler(one)
    there = job.node(two, "worker", 1, "servers", "barrier never")
    nodes = [
        job.node(one, "worker", 0, "servers", "barrier start"),
        job.node(one, "server", 0, "serve"),
        job.node(one, "server", 1, "serve"),
    ]
    wait_for(lambda: len(answers(there)) == 2, "the start")
    two.crash()
    assert nodes[0].wait(60) == 0
    error = answers(nodes[0])[-1]
    assert (error["error"], error["ranks"]) == ("PeerLostError", [1])
    assert "worker 1 on host h2 is lost: nothing was heard of it for 8 s" in error["text"]
    assert scheduler.wait(60) == WORKERS_LOST_EXIT_CODE


def test_without_a_secret_each_host_says_what_to_set(make_hosts: MakeHosts) -> None:
    one, two = make_hosts(2)
    job = ByHand("h1", REIGEN_START_TIMEOUT="60")
    scheduler = job.scheduler(one, REIGEN_START_TIMEOUT="2")
    worker, other = job.node(one, "worker", 0, "servers"), job.node(two, "worker", 1)
    assert other.wait(60) == 1
    assert "REIGEN_SECRET_FILE" in answers(other)[0]["text"]
    assert worker.wait(60) == 0
    assert "worker 1, servers 0 and 1" in answers(worker)[1]["text"]
    assert scheduler.wait(60) == 1
    misplaced = ByHand("h1", REIGEN_SECRET=SECRET).scheduler(two)
    assert misplaced.wait(60) == 1
    assert "DMLC_PS_ROOT_URI is h1, which means 10.77.0.1" in misplaced.output()[1]
