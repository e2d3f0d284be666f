"""Containers of a job on YARN against a ResourceManager that answers as the test says. No Java."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from reigen.launch.yarn import containers
from reigen.launch.yarn.containers import Containers
from reigen.launch.yarn.job import Ended, Granted, MasterEvent, Refused, StartAgent, Unanswered, YarnJob
from reigen.launch.yarn.requests import ContainerSize
from tests.unit.launch.stand_in_hadoop import Hadoop, Java, returns

SIZE = ContainerSize(1024, 1)
JOB = YarnJob(("-n", "2"), ("python",), {}, (), "00", 2, 0, SIZE, SIZE, (), "hdfs:///job", (), {})


def container(name: str, priority: int = 2) -> Any:
    return SimpleNamespace(
        getId=returns(SimpleNamespace(toString=returns(name))),
        getPriority=returns(SimpleNamespace(getPriority=returns(priority))),
        getNodeId=returns(SimpleNamespace(getHost=returns("h1"))),
    )


def end(name: str, status: int) -> Any:
    identity = returns(SimpleNamespace(toString=returns(name)))
    return SimpleNamespace(getContainerId=identity, getExitStatus=returns(status), getDiagnostics=returns(None))


def answer(given: Sequence[Any] = (), ended: Sequence[Any] = ()) -> Any:
    return SimpleNamespace(getAllocatedContainers=returns(given), getCompletedContainersStatuses=returns(ended))


class ResourceManager(Java):
    """Answers, one after the other, and no news from then on."""

    def __init__(self, answers: Sequence[Any]) -> None:
        self.answers, self.num_asked = list(answers), 0
        capability = SimpleNamespace(getMemorySize=returns(4096), getVirtualCores=returns(8))
        self.registerApplicationMaster = returns(SimpleNamespace(getMaximumResourceCapability=returns(capability)))

    def addContainerRequest(self, asked: object) -> None:  # noqa: N802  Hadoop's name
        self.num_asked += 1

    def allocate(self, progress: float) -> Any:
        found = self.answers.pop(0) if self.answers else answer()
        if isinstance(found, Exception):
            raise found
        return found


class Master:
    """Containers, and what they tell."""

    def __init__(self, *answers: Any, job: YarnJob = JOB, has_java: bool = True) -> None:
        self.manager = ResourceManager(answers)
        self.events: queue.SimpleQueue[MasterEvent] = queue.SimpleQueue()
        hadoop = Hadoop(
            AMRMClient=SimpleNamespace(createAMRMClient=returns(self.manager), ContainerRequest=returns(object()))
        )
        hadoop.has_ended = not has_java
        self.containers = Containers(hadoop, Java(), job, ("h0", 1), self.events.put)  # type: ignore[arg-type]
        self.containers.start()

    def told(self) -> MasterEvent:
        return self.events.get(timeout=30)

    def close(self) -> None:
        self.containers.finish(0, "", is_cancelled=False, timeout_seconds=30)
        assert not self.containers._thread.is_alive()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "_WAITING_SECONDS", 0.001)
    monkeypatch.setattr(containers, "_RUNNING_SECONDS", 0.001)


def test_a_heartbeat_that_fails_is_followed_by_others() -> None:
    master = Master(
        ConnectionError("refused"),
        ConnectionError("refused"),
        answer([container("c1"), container("c2")]),
        ConnectionError("reset"),
        answer(ended=[end("c1", -102)]),
    )
    assert master.told() == Unanswered("YARN's ResourceManager: refused")  # once
    granted = master.told()
    assert isinstance(granted, Granted)
    assert [each.container for each in granted.grants] == ["c1", "c2"]
    assert master.told() == Unanswered("YARN's ResourceManager: reset")
    assert master.told() == Ended("c1", -102, "")
    master.close()


def test_a_resource_manager_that_does_not_come_back_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "_LOST_SECONDS", -1.0)
    master = Master(ConnectionError("refused"))
    assert master.told() == Refused("YARN's ResourceManager: refused; it has not answered for 0 s")
    master.close()


def test_without_its_java_process_nothing_is_tried_again() -> None:
    master = Master(ConnectionError("the Java process has ended"), has_java=False)
    assert master.told() == Refused("YARN's ResourceManager: the Java process has ended")
    master.close()


def test_a_container_that_is_taken_back_before_the_others_have_come_is_asked_for_again() -> None:
    master = Master(
        answer([container("c1")]),
        answer(ended=[end("c1", -100)]),  # expired: it was not used
        answer([container("c2"), container("c3")]),
        answer(ended=[end("c2", -100)]),
    )
    granted = master.told()
    assert isinstance(granted, Granted)
    assert [each.container for each in granted.grants] == ["c2", "c3"]
    assert master.manager.num_asked == 3
    assert master.told() == Ended("c2", -100, "")  # from here on it is the launcher's matter
    master.close()


def test_whatever_ends_the_thread_is_told_and_no_agent_waits_for_it() -> None:
    by_host = YarnJob(("-n", "9"), ("python",), {}, (), "00", 9, 0, SIZE, SIZE, (("h1", 9),), "hdfs:///job", (), {})
    master = Master(job=by_host)
    refused = master.told()
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("a container of 9 workers needs 9216 MB and 9 cores; the ResourceManager gives")
    master.containers.request(StartAgent("c1", ("python",), "ticket"))
    assert master.told() == Ended("c1", -1000, refused.reason)
    master.close()
    broken = Master(answer(None))  # type: ignore[arg-type]
    refused = broken.told()
    assert refused == Refused("the application's master has failed: TypeError: 'NoneType' object is not iterable")
    broken.close()
