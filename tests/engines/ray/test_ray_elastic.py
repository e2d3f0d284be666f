"""An elastic job on a real cluster of Ray's with three nodes, which are stand-in machines."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.elastic.engine_training import Step, Training
from tests.engines.ray.cluster import RayCluster
from tests.lab import Host, Hosts, Unavailable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
BEGINNING = """
import json, os
import ray
ray.init(log_to_driver=False, logging_level="error")
import reigen.ray
from reigen.ray import RayExecutor
def say(**facts):
    print("FACT " + json.dumps(facts), flush=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    directory = tmp_path_factory.mktemp("ray")
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(3, shared=[directory]))
        except Unavailable as error:
            pytest.skip(str(error))
        yield RayCluster(hosts, directory)


@pytest.fixture(autouse=True)
def no_leaks() -> None:
    """In the place of the check for all tests: a node that the test starts is the cluster's, and ends with it."""


def rank_of(cluster: RayCluster, slot: int) -> tuple[Host, int]:
    """The node and the process of a place of an elastic job."""
    found = [
        (host, pid)
        for host in cluster.hosts
        for pid, command in host.processes().items()
        if "reigen.runner.task" in command
        and f"REIGEN_SLOT={slot}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    assert len(found) == 1, found
    return found[0]


def test_an_elastic_job_goes_on_when_ranks_actors_and_nodes_go_and_come(cluster: RayCluster):
    directory = cluster.directory / "elastic"
    directory.mkdir()
    training = Training(directory)
    program = (
        BEGINNING
        + f"""
from tests.elastic.engine_training import train_until
executor = RayExecutor(min_workers=2, max_workers=6, cpus_per_worker=2, cooldown_range=[1, 1])
executor.start()
say(results=executor.run(train_until, [{str(directory)!r}]))
try:
    executor.run_remote(len)
except NotImplementedError as error:
    say(remote=str(error))
executor.shutdown()
"""
    )
    with closing(cluster.start(program)) as driver:
        try:
            first = training.wait_for_size(6, 120)
            assert {step.host for step in first} == {host.name for host in cluster.hosts}
            os.kill(rank_of(cluster, first[5].slot)[1], signal.SIGKILL)
            second = training.wait_for_size(6, is_so=lambda steps: steps[5].process != first[5].process)
            assert [step.process for step in second[:5]] == [step.process for step in first[:5]]
            # an actor that keeps an agent: both ranks of its node go, and another actor is asked for
            host, rank = rank_of(cluster, second[3].slot)
            assert host.name == second[3].host
            os.kill(actor_above(rank), signal.SIGKILL)
            third = training.wait_for_size(6, 120, is_so=lambda steps: second[3].process not in processes_of(steps))
            assert third[0].process == second[0].process
            # a node goes and comes: not the head's, and not that of rank 0
            lost = next(each for each in list(cluster.hosts)[1:] if each.name != third[0].host)
            cluster.stop_node(lost)
            fourth = training.wait_for_size(4, 120)
            assert lost.name not in {step.host for step in fourth}
            cluster.nodes[lost.name] = cluster.start_node(lost, 0)
            fifth = training.wait_for_size(6, 120)
            assert lost.name in {step.host for step in fifth}
        except BaseException:
            print(driver.output())
            raise
        training.end()
        assert driver.wait(60) == 0, driver.output()
        out = driver.output()[0]
    facts = {}
    for line in out.splitlines():
        if line.startswith("FACT "):
            facts |= json.loads(line.removeprefix("FACT "))
    assert [result[:2] for result in facts["results"]] == [[rank, 6] for rank in range(6)]
    assert "run_remote" in facts["remote"]
    training.check()
    cluster.wait_until_empty()


def processes_of(steps: list[Step]) -> set[tuple[str, int]]:
    return {step.process for step in steps}


def actor_above(pid: int) -> int:
    """The worker of Ray's that is an ancestor of a process."""
    while "ray::" not in (command := Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert pid > 1, command
    return pid
