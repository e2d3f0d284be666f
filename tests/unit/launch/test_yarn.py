"""What the launcher on YARN decides by itself: sizes, files, placement, explanations. No Java."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from reigen.errors import ConfigError, LaunchError
from reigen.launch.base import DialCall, find_launcher
from reigen.launch.engines import choose_launcher_in_engine, detect_engine
from reigen.launch.options import LaunchOptions
from reigen.launch.ps_processes import ServerOptions
from reigen.launch.submission import SubmissionOptions, SubmissionRequest, find_submitter
from reigen.launch.yarn import hadoop
from reigen.launch.yarn import launcher as launcher_module
from reigen.launch.yarn.exits import explain_application, explain_container, master_diagnostics, summarize_diagnostics
from reigen.launch.yarn.job import Ended, Grant, Granted, Refused, StartAgent, YarnJob
from reigen.launch.yarn.launcher import MASTER_VARIABLE, MessageSocket, YarnLauncher, find_engine_job, place
from reigen.launch.yarn.requests import (
    ContainerSize,
    NodeSpace,
    check_size,
    container_sizes,
    find_files,
    plan_by_host,
)

OPTIONS = LaunchOptions(("python", "train.py"), 3)


def test_sizes():
    worker, server = container_sizes(SubmissionOptions(worker_memory="4g", worker_cores=2))
    assert (worker, server) == (ContainerSize(4096, 2), ContainerSize(1024, 1))
    with pytest.raises(ConfigError, match=r"--server-cores 0: at least 1"):
        container_sizes(SubmissionOptions(server_cores=0))


def test_a_size_above_the_maximum_names_both():
    check_size("a worker", "--worker-memory", ContainerSize(4096, 2), ContainerSize(4096, 2))
    with pytest.raises(ConfigError) as caught:
        check_size("a worker", "--worker-memory", ContainerSize(8192, 2), ContainerSize(4096, 4))
    assert "8192 MB and 2 cores" in str(caught.value)
    assert "4096 MB (yarn.scheduler.maximum-allocation-mb)" in str(caught.value)


def test_files_of_the_command_are_sent(tmp_path):
    for name in ("train.py", "data.txt", "env.tar.gz"):
        (tmp_path / name).touch()
    options = SubmissionOptions(files=("data.txt#table,hdfs:///models/one.pt",), archives=("env.tar.gz#env",))
    command = ("python", "train.py", "--data", "data.txt", "missing.py", str(tmp_path / "train.py"))
    found = find_files(options, command, tmp_path)
    assert [(each.name, each.is_archive, each.is_remote) for each in found] == [
        ("env", True, False),
        ("table", False, False),
        ("one.pt", False, True),
        ("train.py", False, False),
        ("data.txt", False, False),
    ]
    assert [each.name for each in find_files(replace(options, auto_file_cache=False), command, tmp_path)] == [
        "env",
        "table",
        "one.pt",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (SubmissionOptions(files=("none.txt",)), r"--files none.txt: there is no such file"),
        (SubmissionOptions(archives=("data.txt",)), r"YARN unpacks .zip, .tar, .tar.gz"),
        (SubmissionOptions(files=("data.txt", "data.txt#other", "one#other")), r"something else under the name other"),
        (SubmissionOptions(files=("data.txt#reigen-dial",)), r"something else under the name reigen-dial"),
    ],
)
def test_files_that_cannot_be_sent(options, words, tmp_path):
    for name in ("data.txt", "one"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=words):
        find_files(options, (), tmp_path)


def test_words_of_the_command_that_are_no_files_here(tmp_path):
    (tmp_path / "work").mkdir()
    for name in ("train.py", "work/data.txt"):
        (tmp_path / name).touch()
    long = "import numpy; " * 400
    found = find_files(
        SubmissionOptions(), ("python", "-c", long, "./data.txt", "data.txt", "../none.py"), tmp_path / "work"
    )
    assert [each.name for each in found] == ["data.txt"]
    with pytest.raises(ConfigError, match=r"--files import numpy.*: there is no such file"):
        find_files(SubmissionOptions(files=(long,)), (), tmp_path)
    command = ("python", "../train.py")
    with pytest.raises(
        ConfigError, match=r"outside of this directory.*--files \.\./train\.py, and train\.py in the command"
    ):
        find_files(SubmissionOptions(), command, tmp_path / "work")
    assert not find_files(SubmissionOptions(auto_file_cache=False), command, tmp_path / "work")
    sent = find_files(SubmissionOptions(files=("../train.py",)), ("python", "train.py"), tmp_path / "work")
    assert [each.name for each in sent] == ["train.py"]


def test_one_container_on_each_node():
    nodes = [NodeSpace("h1", 5120, 9), NodeSpace("h2", 9216, 9), NodeSpace("h3", 900, 1)]
    size, maximum = ContainerSize(1024, 2), ContainerSize(8192, 8)
    # a gigabyte and a core of each node are left to the master
    assert plan_by_host(6, size, nodes, maximum) == ([("h1", 4), ("h2", 2)], "")
    assert plan_by_host(8, size, nodes, maximum)[0] == [("h1", 4), ("h2", 4)]
    hosts, reason = plan_by_host(9, size, nodes, maximum)
    assert (hosts, reason) == ([], "the 3 nodes have space for 8 processes of 1024 MB and 2 cores now; 9 are wanted")


# ------------------------------------------------------------------------------------------------ placement

GRANTS = [
    Grant("c_000003", "h2", is_worker=True, slots=1),
    Grant("c_000002", "h1", is_worker=True, slots=1),
    Grant("c_000004", "h2", is_worker=True, slots=1),
    Grant("c_000005", "h1", is_worker=False, slots=1),
]


def test_ranks_of_a_node_are_neighbours():
    assignments, named = place(GRANTS[:3], OPTIONS)
    assert [(each.host, each.ranks) for each in assignments] == [
        ("h2/000003", (0,)),
        ("h2/000004", (1,)),
        ("h1/000002", (2,)),
    ]
    locals_ = [(each.local_rank, each.local_size, each.cross_rank) for own in assignments for each in own.topologies]
    assert locals_ == [(0, 2, 0), (1, 2, 0), (0, 1, 1)]
    assert {name: grant.node for name, grant in named.items()} == {
        "h2/000003": "h2",
        "h2/000004": "h2",
        "h1/000002": "h1",
    }


def test_servers_have_containers_of_their_own_and_the_scheduler_has_none():
    assignments, named = place(GRANTS, replace(OPTIONS, servers=ServerOptions(1)))
    assert [(each.host, each.is_local, [one.name for one in each.ps_processes]) for each in assignments[3:]] == [
        ("h1/000005", False, ["server 0"]),
        ("the master", True, ["scheduler"]),
    ]
    assert "the master" not in named


def test_a_container_for_several_ranks():
    grants = [Grant("c_000002", "h1", is_worker=True, slots=2), Grant("c_000003", "h2", is_worker=True, slots=1)]
    assert [each.ranks for each in place(grants, OPTIONS)[0]] == [(0, 1), (2,)]


# ------------------------------------------------------------------------------------------------ the launcher


@pytest.fixture
def master():
    """The master's end of a launcher's socket, and the launcher's variables."""
    ours, theirs = socket.socketpair()
    with theirs:
        end = MessageSocket(ours.detach(), msgspec.json.Decoder(StartAgent | type(None)))
        yield end, {MASTER_VARIABLE: str(theirs.fileno()), "CONTAINER_ID": "container_1_0001_01_000001"}
    os.close(end.fileno())
    end._socket.detach()


def close(launcher: YarnLauncher) -> None:
    launcher._master._socket.close()


def test_only_a_master_is_inside(master):
    _, environ = master
    assert find_launcher("yarn") is YarnLauncher
    assert detect_engine({"CONTAINER_ID": "container_1_0001_01_000002", "NM_HOST": "h1"}) is None
    job = find_engine_job(environ)
    assert "CONTAINER_ID=container_1_0001_01_000001" in job.description
    assert choose_launcher_in_engine("yarn", environ).engine_job == job
    with pytest.raises(ConfigError, match="`reigen launch` submits such jobs"):
        YarnLauncher(OPTIONS, {})
    with pytest.raises(ConfigError, match="--files, --archives"):
        YarnLauncher(replace(OPTIONS, sync_directory="x"), environ)


def test_containers_are_waited_for(master):
    end, environ = master
    launcher = YarnLauncher(OPTIONS, environ)
    waits = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            end.send(Granted(tuple(GRANTS[:3])))

    plan = launcher.allocate(wait)
    assert len(waits) == 3
    assert plan.addresses == {"h2/000003": "h2", "h2/000004": "h2", "h1/000002": "h1"}
    assert launcher.options.network.start_timeout_seconds == 600
    assert plan.directory == ""  # where the agents run: a container's directory is YARN's choice
    close(launcher)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            Ended("c_000002", -100, "lost"),
            r"c_000002: its container has ended: YARN has released it.*nothing was started",
        ),
        (Refused("the queue has gone"), "the queue has gone"),
    ],
)
def test_containers_that_do_not_come(master, event, words):
    end, environ = master
    launcher = YarnLauncher(OPTIONS, environ)
    end.send(event)
    with pytest.raises(LaunchError, match=words):
        launcher.allocate(lambda seconds: None)
    close(launcher)


def test_hosts_that_are_lost_together_are_not_waited_for_one_by_one(master, monkeypatch):
    monkeypatch.setattr(launcher_module, "_STATUS_SECONDS", 0.05)
    end, environ = master
    launcher = YarnLauncher(OPTIONS, environ)
    end.send(Granted(tuple(GRANTS[:3])))
    launcher.allocate(lambda seconds: None)
    waits = []
    read = launcher._master.read
    monkeypatch.setattr(launcher._master, "read", lambda seconds=0.0: waits.append(seconds) or read(seconds))
    assert "YARN does not say why: see yarn logs of c_000003" in launcher.explain_exit("h2/000003", None, "").what
    num_waits = sum(seconds > 0 for seconds in waits)
    assert num_waits > 0
    assert "YARN does not say why: see yarn logs of c_000004" in launcher.explain_exit("h2/000004", None, "").what
    end.send(Ended("c_000002", -100, ""))
    assert "its node was lost" in launcher.explain_exit("h1/000002", None, "").what
    assert sum(seconds > 0 for seconds in waits) == num_waits
    close(launcher)


def test_a_ticket_is_not_shown():
    assert "0123" not in repr(DialCall("h1", "ticket 0123"))
    assert "0123" not in repr(StartAgent("c", ("python",), "ticket 0123"))
    job = YarnJob((), (), {"A": "0123"}, (), "0123", 1, 1, *[ContainerSize(1, 1)] * 2, (), "hdfs:///tmp", (), {})
    assert "0123" not in repr(job)


# ------------------------------------------------------------------------------------------------ explanations


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (-100, "its node was lost"),
        (-101, "no good disk"),
        (-102, "preempted"),
        (-103, "virtual memory"),
        (-104, "used more memory than it has"),
        (137, "SIGKILL"),
        (143, "SIGTERM"),
        (3, "exit code 3"),
    ],
)
def test_ends_of_containers(status, words):
    problem = explain_container("h1/000002", status, "Container killed on request.\n\tat org.apache.Hadoop(X.java:1)\n")
    assert words in problem.what
    assert problem.what.endswith("(Container killed on request.)")


def test_diagnostics_without_traces():
    begin = "[2026-01-01 10:00:00.000]Exception from container-launch.\nContainer id: c\nExit code: 1\n"
    text = begin + "\n[2026-01-01 10:00:00.001]no  space\nno  space\n\tat a.b(C)\n"
    assert summarize_diagnostics(text) == "no space"
    assert len(summarize_diagnostics("x" * 5000)) < 500


@pytest.mark.parametrize(
    ("state", "final", "diagnostics", "code", "words"),
    [
        ("FINISHED", "SUCCEEDED", master_diagnostics(0), 0, ""),
        ("FINISHED", "FAILED", master_diagnostics(7, "rank 1 failed first"), 7, ""),
        ("KILLED", "KILLED", "Application killed by user.", 143, "it was killed (Application killed by user.)"),
        ("FAILED", "FAILED", "AM Container for a1 exited with  exitCode: -104\n", 1, "--worker-memory"),
        ("FAILED", "FAILED", "AM Container for a1 exited with  exitCode: 137\n", 137, "SIGKILL"),
        ("FAILED", "FAILED", "the queue was removed", None, "the queue was removed"),
        ("FINISHED", "SUCCEEDED", "", 0, ""),
    ],
)
def test_ends_of_applications(state, final, diagnostics, code, words):
    found, reason = explain_application(state, final, diagnostics)
    assert found == code
    assert words in reason


def test_words_of_java():
    text = (
        "org.apache.hadoop.yarn.exceptions.YarnException: java.io.IOException: no such queue: x\n\tat a.b.C(D.java:3)\n"
    )
    assert hadoop.summarize_java_error(text) == "no such queue: x"


# ------------------------------------------------------------------------------------------------ the client


def request(**environ: str) -> SubmissionRequest:
    return SubmissionRequest((), ("python", "train.py"), 2, 1, environ=environ)


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def has_py4j(monkeypatch):
    """Whatever is installed: py4j is, pyspark is not."""
    monkeypatch.setattr(hadoop, "find_spec", lambda name: object() if name == "py4j" else None)


def test_without_a_hadoop_client_it_says_how_to_get_one(monkeypatch, has_py4j, tmp_path):
    java = program(tmp_path / "bin" / "java")
    with pytest.raises(
        ConfigError, match=r"no Hadoop client here: .*`hadoop` or `yarn` is in PATH.*pip install pyspark"
    ):
        find_submitter("yarn")(request(PATH=str(java.parent)))
    monkeypatch.setattr(hadoop, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs py4j.*install py4j.*pip install pyspark"):
        find_submitter("yarn")(request(PATH=str(java.parent)))


@pytest.mark.usefixtures("has_py4j")
def test_clients_that_are_found(tmp_path):
    java = program(tmp_path / "bin" / "java")
    with pytest.raises(ConfigError, match=r"needs Java.*JAVA_HOME is not set"):
        hadoop.find_hadoop({"PATH": str(tmp_path)})
    with pytest.raises(ConfigError, match="JAVA_HOME=/nowhere has none"):
        hadoop.find_hadoop({"PATH": str(java.parent), "JAVA_HOME": "/nowhere"})
    jar = tmp_path / "spark" / "jars" / "hadoop-client-runtime-3.jar"
    jar.parent.mkdir(parents=True)
    jar.touch()
    environ = {"PATH": str(java.parent), "SPARK_HOME": str(tmp_path / "spark")}
    with pytest.raises(ConfigError, match="HADOOP_CONF_DIR is not set"):
        hadoop.find_hadoop(environ)
    found = hadoop.find_hadoop({**environ, "HADOOP_CONF_DIR": "/etc/hadoop"})
    assert found.classpath == f"/etc/hadoop{os.pathsep}{jar.parent}/*"
    # what would be submitted is for everybody to see, and its name is, in YARN
    secret = SubmissionRequest(
        (), ("python", "train.py", "--token", "hunter2"), 2, 1, environ={**environ, "HADOOP_CONF_DIR": "/etc/hadoop"}
    )
    assert find_submitter("yarn")(secret).preview.startswith("application 'train.py' in queue default")
    # the cluster's own client comes first
    own = program(tmp_path / "hadoop" / "bin" / "hadoop")
    found = hadoop.find_hadoop({**environ, "HADOOP_HOME": str(tmp_path / "hadoop")})
    assert (found.program, found.classpath) == (str(own), "")
