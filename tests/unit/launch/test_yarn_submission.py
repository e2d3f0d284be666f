"""Applications of YARN's as the client follows them, against a ResourceManager that says the test does. No Java."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reigen.launch.submission import SubmissionOptions, SubmissionRequest, SubmittedPhase, SubmittedState
from reigen.launch.yarn import submission
from reigen.launch.yarn.job import EXIT_CODE, STDOUT, STOP, StoredFile
from reigen.launch.yarn.submission import YarnSubmission
from tests.unit.launch.stand_in_hadoop import Hadoop, Java, returns

MAX_WAIT = "yarn.resourcemanager.connect.max-wait.ms"


class Clock:
    """Clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Configuration:
    """The cluster's, with a client's settings above it."""

    def __init__(self, settings: dict[str, str]) -> None:
        self.settings = settings

    def getLong(self, name: str, default: int) -> int:  # noqa: N802  Hadoop's name
        return int(self.settings.get(name, default))

    def get(self, name: str) -> str:
        return self.settings.get(name, "")

    def writeXml(self, stream: list[dict[str, str]]) -> None:  # noqa: N802  Hadoop's name
        stream.append(self.settings)


class File(list[Any]):
    """What was written to it."""

    def close(self) -> None:
        return


class Store:
    """Files of the job."""

    uri = "hdfs:///job"
    written = File()

    def __init__(self, *arguments: object) -> None:
        self.num_removed = 0

    def make_directory(self) -> None:
        return

    def open(self, name: str) -> tuple[str, File]:
        Store.written = File()
        return name, Store.written

    def describe(self, path: str, link: str) -> StoredFile:
        return StoredFile(path, link, is_archive=False, num_bytes=1, modified=1)

    def write(self, name: str, data: bytes) -> StoredFile:
        return self.describe(name, name)

    def remove(self) -> None:
        self.num_removed += 1


class Link:
    """Connection to the master: each of its messages comes once, then it ends, if it is to."""

    def __init__(self, *messages: bytes, ends: bool = False) -> None:
        self.messages, self.ends, self.sent = list(messages), ends, list[bytes]()

    def keep_alive(self, seconds: float) -> None:
        return

    def read(self) -> list[bytes]:
        found, self.messages = self.messages[:1], self.messages[1:]
        if self.ends and not found:
            raise ConnectionResetError
        return found

    def post(self, message: bytes) -> None:
        self.sent.append(message)

    def flush(self) -> bool:
        return True

    def close(self) -> None:
        return


class Client(Java):
    """Hadoop's client of a ResourceManager, which says ``state``."""

    def __init__(self) -> None:
        self.state, self.final, self.diagnostics, self.num_killed = "RUNNING", "UNDEFINED", "", 0

    def createApplication(self) -> Any:  # noqa: N802  Hadoop's name
        capability = SimpleNamespace(getMemorySize=returns(4096), getVirtualCores=returns(8))
        context = Java()
        context.getApplicationId = returns(SimpleNamespace(toString=returns("application_1")))
        return SimpleNamespace(
            getNewApplicationResponse=returns(SimpleNamespace(getMaximumResourceCapability=returns(capability))),
            getApplicationSubmissionContext=returns(context),
        )

    def getApplicationReport(self, application: object) -> Any:  # noqa: N802  Hadoop's name
        return SimpleNamespace(
            getYarnApplicationState=returns(SimpleNamespace(toString=returns(self.state))),
            getFinalApplicationStatus=returns(SimpleNamespace(toString=returns(self.final))),
            getDiagnostics=returns(self.diagnostics),
            getHost=returns("h1"),
            getRpcPort=returns(7),
        )

    def killApplication(self, application: object) -> None:  # noqa: N802  Hadoop's name
        self.num_killed += 1


class Yarn:
    """A submitted application, its ResourceManager, and what `open_connection` finds: a link, or nobody."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client, self.clock = Client(), Clock()
        self.link: Link | None = None
        hadoop = Hadoop(createYarnClient=returns(self.client))
        hadoop.configuration = Configuration  # type: ignore[attr-defined]
        monkeypatch.setattr(submission, "find_hadoop", returns(SimpleNamespace(source="here")))
        monkeypatch.setattr(submission, "Gateway", returns(hadoop))
        monkeypatch.setattr(submission, "FileStore", Store)
        monkeypatch.setattr(submission, "time", self.clock)
        monkeypatch.setattr(submission, "open_connection", self._open)
        options = SubmissionOptions(hdfs_tempdir="hdfs:///tmp")
        request = SubmissionRequest((), ("python", "-V"), 2, 0, options, directory=Path("/nowhere"), grace_seconds=60.0)
        self.job = YarnSubmission(request)
        assert self.job.submit() == "YARN application application_1"

    def _open(self, *arguments: object) -> Any:
        if self.link is None:
            raise ConnectionRefusedError(111, "Connection refused")
        return self.link

    def poll(self, seconds: float = 1.0) -> SubmittedState:
        self.clock.now += seconds
        return self.job.poll()


@pytest.fixture
def yarn(monkeypatch: pytest.MonkeyPatch) -> Yarn:
    return Yarn(monkeypatch)


RUNNING = SubmittedState(SubmittedPhase.RUNNING)


def test_the_master_gets_the_clusters_configuration_as_it_is(yarn: Yarn) -> None:
    assert yarn.job._configuration.settings == {MAX_WAIT: "10000"}  # here something is said before that
    assert Store.written == [{}]


def test_a_connection_that_is_lost_is_made_again(yarn: Yarn, capfd: pytest.CaptureFixture[str]) -> None:
    yarn.link = Link(STDOUT + b"one", ends=True)
    assert yarn.poll() == RUNNING
    assert [list(yarn.job.read_output()) for _ in range(2)] == [[(1, b"one")], []]
    yarn.link = Link(STDOUT + b"two")
    assert yarn.poll() == RUNNING
    assert list(yarn.job.read_output()) == [(1, b"two")]
    assert capfd.readouterr().err.count("the connection to the application's master was lost, and is there again") == 1


def test_a_connection_that_stays_lost_is_complained_about_once(yarn: Yarn, capfd: pytest.CaptureFixture[str]) -> None:
    yarn.link = Link(ends=True)
    yarn.poll()
    list(yarn.job.read_output())
    yarn.link = None
    yarn.poll()  # the master may have ended, which YARN will say
    assert not capfd.readouterr().err
    for _ in range(9):
        assert yarn.poll() == RUNNING
    assert capfd.readouterr().err.count("cannot be reached ([Errno 111] Connection refused), so nothing is shown") == 1


def test_files_of_a_job_that_is_left_are_named(yarn: Yarn) -> None:
    store = yarn.job._store
    assert yarn.job.close() == (
        "the application removes its files when it ends; if YARN kills it: hadoop fs -rm -r hdfs:///job",
    )
    assert store.num_removed == 0


def test_files_of_a_job_that_has_ended_are_removed(yarn: Yarn) -> None:
    store = yarn.job._store
    yarn.client.state = "KILLED"
    yarn.poll()
    assert (yarn.job.close(), store.num_removed) == ((), 1)


@pytest.mark.parametrize("state", ["FINISHED", "FAILED", "KILLED"])
def test_the_exit_code_that_the_job_has_told_counts(yarn: Yarn, state: str) -> None:
    yarn.link = Link(EXIT_CODE + b"7", ends=True)
    yarn.poll()
    assert [list(yarn.job.read_output()) for _ in range(2)] == [[], []]
    yarn.client.state, yarn.client.diagnostics = state, "its node was lost"
    assert yarn.poll() == SubmittedState(SubmittedPhase.ENDED, "", 7)


def test_yarn_kills_what_has_not_ended_after_its_grace(yarn: Yarn) -> None:
    yarn.link = link = Link()
    yarn.poll()
    yarn.job.cancel()
    assert link.sent == [STOP]
    yarn.poll(70.0)
    assert yarn.client.num_killed == 0
    yarn.poll(20.0)
    assert yarn.client.num_killed == 1
