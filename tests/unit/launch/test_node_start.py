"""The start of a node that finds the others by itself: signals, its secret, and the file for why a job has failed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reigen.errors import ConfigError, LaunchError
from reigen.launch.elastic.options import ElasticOptions
from reigen.launch.hosts import HostInfo
from reigen.launch.nodes import launcher
from reigen.launch.nodes.launcher import NodesLauncher, SelfStart, explain_address, find_secret
from reigen.launch.nodes.sources import NodeJob
from reigen.launch.options import LaunchOptions

OPTIONS = LaunchOptions(("true",), 2)


@pytest.fixture
def job(tmp_path: Path) -> NodeJob:
    return NodeJob(
        "an engine", 1, 2, "h0", secret_file=str(tmp_path / "secret"), failure_file=str(tmp_path / "failure")
    )


def start(job: NodeJob, monkeypatch: pytest.MonkeyPatch) -> SelfStart:
    monkeypatch.setattr(launcher, "require_node_job", lambda environ, read_file: job)
    return SelfStart({}, 2)


@pytest.mark.parametrize(
    ("leader", "said"),
    [
        ("127.0.0.2", "127.0.0.2 is 127.0.0.2 here, where no other host reaches node 0 (lo serves nodes of one host)"),
        ("192.0.2.7", "192.0.2.7 is no address of this host, though it is node 0"),
    ],
)
def test_a_leader_without_an_address(leader: str, said: str) -> None:
    assert explain_address(leader) == said


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_others_are_waited_for(job: NodeJob, monkeypatch: pytest.MonkeyPatch, signum: int) -> None:
    before = signal.getsignal(signum)
    node = start(replace(job, makes_secret=True), monkeypatch)  # waits for the secret, which node 0 makes
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signum))
    timer.start()
    with pytest.raises(LaunchError, match=f"stopped by {signal.Signals(signum).name}") as caught:
        node.run(OPTIONS, {"REIGEN_START_TIMEOUT": "60"})
    timer.join()
    assert (caught.value.exit_code, signal.getsignal(signum)) == (128 + signum, before)
    assert Path(job.failure_file).read_text() == f"reigen run: stopped by {signal.Signals(signum).name}\n"


def test_a_handler_that_is_installed_meanwhile_stays(job: NodeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: object) -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the watchdog does in the end
        return 0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(SelfStart, "_run", run)
    try:
        assert start(job, monkeypatch).run(OPTIONS, {}) == 0
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("index", [0, 1])
def test_a_secret_that_is_missing_is_the_reason_on_every_node(
    job: NodeJob, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    with pytest.raises(ConfigError, match="the nodes need a secret"):
        start(replace(job, index=index), monkeypatch).run(OPTIONS, {})
    assert Path(job.failure_file).read_text().startswith("reigen run: an engine: the nodes need a secret")


def test_the_exit_code_of_an_agent_is_in_the_file(job: NodeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = [143, 0]
    monkeypatch.setattr(SelfStart, "_serve", lambda *arguments: codes.pop(0))
    Path(job.secret_file).write_text("5e" * 32)
    Path(job.secret_file).chmod(0o600)
    node = start(job, monkeypatch)
    assert node.run(OPTIONS, {}) == 143
    assert "node 1 (" in Path(job.failure_file).read_text()
    assert "has ended with exit code 143" in Path(job.failure_file).read_text()
    assert node.run(OPTIONS, {}) == 0
    assert not Path(job.failure_file).exists()


def test_the_secret_that_node_0_has_made_goes_where_the_start_fails(
    job: NodeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> Sequence[str]:
        assert Path(job.secret_file).exists()
        raise ConfigError("no")

    monkeypatch.setattr(launcher._Tickets, "of", refuse)
    with pytest.raises(ConfigError):
        start(replace(job, index=0, makes_secret=True), monkeypatch).run(OPTIONS, {})
    assert not Path(job.secret_file).exists()
    Path(job.secret_file).write_text("5e" * 32)
    with pytest.raises(ConfigError):
        start(replace(job, index=1, makes_secret=True), monkeypatch).run(OPTIONS, {})
    assert Path(job.secret_file).exists(), "it is node 0's"


@pytest.mark.parametrize(
    "changes",
    [
        {"hosts": (HostInfo("h1", 2),), "elastic": ElasticOptions(1)},
        {"elastic": ElasticOptions(1, discovery="discover.sh")},
    ],
    ids=str,
)
def test_hosts_of_an_elastic_job_are_the_nodes_and_no_others(
    job: NodeJob, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    nodes = NodesLauncher(start(job, monkeypatch), replace(OPTIONS, **changes), None)
    with pytest.raises(ConfigError, match="leave -H, --hostfile and --host-discovery-script out"):
        nodes.allocate(lambda seconds: None)


@contextmanager
def another_user() -> Iterator[None]:
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_secret_of_another_user_says_what_to_do(job: NodeJob, is_named: bool) -> None:
    file = Path(job.secret_file)
    file.write_text("5e" * 32)
    file.chmod(0)
    environ = {"REIGEN_SECRET_FILE": job.secret_file} if is_named else {}
    with another_user(), pytest.raises(ConfigError, match=r"may not read .*/secret: .*fsGroup: GROUP.*defaultMode"):
        find_secret(job, environ)
