"""Jobs whose pods all run the same command, in stand-in pods; manifests are made by `reigen launch --print`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from reigen.cli.launch import main
from tests.lab import Hosts, Unavailable
from tests.network.pods import Container, Pods
from tests.network.waiting import wait_for

pytestmark = pytest.mark.slow
SECRET = "5e" * 32
REIGEN = (sys.executable, "-P", "-m", "reigen")
RUN = (*REIGEN, "run", "--nodes-from-env")
#: Says that it is ready, and which signals it hears; the number of seconds that it takes after SIGTERM.
HEARING = """
import os, signal, sys, time
def hear(signum, frame):
    os.write(1, f"heard {signal.Signals(signum).name}\\n".encode())
    if len(sys.argv) < 2:
        sys.exit(0)
signal.signal(signal.SIGTERM, hear)
os.write(1, b"ready\\n")
while True:
    time.sleep(0.05)
"""
REDUCE = """
import os, socket, numpy, reigen
reigen.init()
total = reigen.allreduce(numpy.ones(3), op=reigen.Sum)[0]
of_nodes = ("JOB_COMPLETION_INDEX", "PET_NNODES", "REIGEN_NODES", "REIGEN_SECRET_FILE")
left = [name for name in os.environ if name in of_nodes]
print(reigen.rank(), socket.gethostname(), int(total), os.environ.get("MINE"), left, flush=True)
"""
#: For MXNet: servers and scheduler run it, too, and serve.
PUSH = """
import os, socket, numpy, reigen.kv
store = reigen.kv.create("dist_sync")
total = numpy.zeros(2)
store.init(1, total)
store.pushpull(1, numpy.ones(2), out=total)
print(store.rank, socket.gethostname(), int(total[0]), os.environ.get("MINE"), flush=True)
store.close()
"""


@pytest.fixture(scope="module")
def machines() -> Iterator[Hosts]:
    try:
        with Hosts(3, ssh_port=None) as hosts:
            yield hosts
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def pods(machines: Hosts) -> Iterator[Pods]:
    found = Pods(machines, "train")
    found.mount_secret(SECRET)
    found.resolve()
    yield found
    wait_for(lambda: not any(host.processes() for host in machines), "nothing is left in any pod")


def ready(containers: list[Container], count: int = 3) -> None:
    wait_for(lambda: containers[0].out.count("ready") == count, "all ranks are ready", 30)


def manifests(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """What `reigen launch --print` makes."""
    options = ["--launcher", "kubernetes", "--jobname", "train", "--kube-worker-image", "i", "--print"]
    assert main([*options, *arguments]) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def start_as_kubelet(pods: Pods, job: dict[str, Any], stack: contextlib.ExitStack) -> list[Container]:
    """Starts the pods of a manifest, the last one first."""
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environ = {each["name"]: each["value"].replace("$$", "$") for each in container["env"]}
    assert container["command"] == ["reigen"]
    words = [*REIGEN, *(word.replace("$$", "$") for word in container["args"])]
    (secret,) = [each for each in container["volumeMounts"] if each["name"] == "reigen-secret"]
    pods.mount_secret(SECRET, f"{secret['mountPath']}/secret")
    found = []
    for index in reversed(range(job["spec"]["completions"])):
        own = {**environ, "JOB_COMPLETION_INDEX": str(index), "MINE": f"pod {index}"}
        found.append(stack.enter_context(contextlib.closing(pods.start(index, words, own))))
    return found[::-1]


def test_the_pods_of_a_manifest_with_names_that_come_late(machines: Hosts, capsys: pytest.CaptureFixture[str]) -> None:
    *_, job = manifests(capsys, "-n", "5", "-s", "1", "--pods", "3", "--", sys.executable, "-c", PUSH)
    pods = Pods(machines, "train")
    with contextlib.ExitStack() as stack:
        containers = start_as_kubelet(pods, job, stack)
        for host in machines:
            stack.callback((host.root / "run/reigen/secret").unlink)
        wait_for(lambda: all(container.pid for container in containers), "the pods run")
        assert containers[1].err == ""
        pods.resolve()
        assert [container.wait() for container in containers] == [0, 0, 0], containers[0].err
        lines = [line.split(" ", 1)[1] for line in containers[0].out.splitlines()]
    # servers first, and workers behind them in turn, as MXNet's launch.py deals them out
    expected = [f"{rank} train-{(rank + 1) % 3} 5 pod {(rank + 1) % 3}" for rank in range(5)]
    assert sorted(lines) == expected


@pytest.mark.parametrize("index", [0, 1])
def test_a_pod_that_is_deleted(pods: Pods, index: int) -> None:
    with pods.job_of((*RUN, "-np", "3", sys.executable, "-Sc", HEARING), REIGEN_GRACE="30") as containers:
        ready(containers)
        containers[index].delete()
        codes = [container.wait(20) for container in containers]
        assert codes[0] == 143, containers[0].err
        assert containers[0].out.count("heard SIGTERM") == 3
        if index:
            assert "host train-1 was sent SIGTERM by its engine (Kubernetes Indexed Job)" in containers[0].err


def test_ranks_that_do_not_hear_are_killed_within_the_grace(pods: Pods) -> None:
    with pods.job_of((*RUN, "-np", "3", sys.executable, "-Sc", HEARING, "stay"), REIGEN_GRACE="6") as containers:
        ready(containers)
        containers[0].delete()
        assert containers[0].wait(6) == 143
        assert [container.wait(6) for container in containers[1:]] == [0, 0]


def test_a_pod_that_vanishes(pods: Pods) -> None:
    with pods.job_of((*RUN, "-np", "3", sys.executable, "-Sc", HEARING)) as containers:
        ready(containers)
        containers[2].kill()
        assert containers[0].wait(20) != 0
        assert "host train-2 was lost, with rank 2" in containers[0].err
        containers[1].wait(20)
    with pods.job_of((*RUN, "-np", "3", sys.executable, "-Sc", HEARING)) as containers:
        ready(containers)
        containers[0].kill()
        assert all(container.wait(20) != 0 for container in containers[1:])
        assert "the connection to the launcher has ended" in containers[1].err


def test_the_code_of_the_first_rank_that_fails_is_the_jobs(pods: Pods) -> None:
    program = "import os, time; os.environ['REIGEN_RANK'] == '4' and os._exit(7); time.sleep(60)"
    with pods.job_of((*RUN, "-np", "6", sys.executable, "-c", program)) as containers:
        assert [container.wait(20) for container in containers] == [7, 0, 0]
        assert "rank 4 (host train-2) failed first: exit code 7" in containers[0].err


def test_two_jobs_at_once_on_the_same_hosts(pods: Pods) -> None:
    pods.mount_secret("77" * 32, "/run/other/secret")
    command = (*RUN, "-np", "3", sys.executable, "-c", REDUCE)
    with pods.job_of(command) as one, pods.job_of(command, REIGEN_SECRET_FILE="/run/other/secret") as other:
        for containers in (one, other):
            assert [container.wait() for container in containers] == [0, 0, 0], containers[0].err
            assert len(containers[0].out.splitlines()) == 3


def test_a_train_job_and_a_stateful_set(pods: Pods) -> None:
    pods.resolve("train-leader")
    variables = {
        "PET_NNODES": "3",
        "PET_NPROC_PER_NODE": "2",
        "PET_MASTER_ADDR": "train-leader",
        "PET_MASTER_PORT": "29500",
    }
    with contextlib.ExitStack() as stack:
        containers = [
            stack.enter_context(
                contextlib.closing(
                    pods.start(
                        index,
                        (*RUN, "-np", "auto", sys.executable, "-c", REDUCE),
                        {**variables, "PET_NODE_RANK": str(index), "REIGEN_SECRET_FILE": "/run/mine/secret"},
                    )
                )
            )
            for index in range(3)
        ]
        assert [container.wait() for container in containers] == [0, 0, 0], containers[0].err
        assert sorted(line.split()[1:4] for line in containers[0].out.splitlines()) == [
            [str(rank), f"train-{rank // 2}", "6"] for rank in range(6)
        ]


def test_nodes_that_count_differently(pods: Pods) -> None:
    variables = {"PET_NNODES": "2", "PET_MASTER_ADDR": "train-0", "REIGEN_SECRET_FILE": "/run/mine/secret"}
    pods.resolve("train-0")
    command = (*RUN, "true")
    first = pods.start(0, command, {**variables, "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "4"})
    second = pods.start(1, command, {**variables, "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "2"})
    with contextlib.closing(first), contextlib.closing(second):
        assert first.wait() == 1
        assert "different numbers of slots: train-0 4, train-1 2" in first.err
        second.wait()


def test_pods_that_cannot_find_each_other(pods: Pods) -> None:
    command = (*RUN, "-np", "3", "true")
    for container in (pods.start(1, command, {"JOB_COMPLETION_INDEX": "1", "REIGEN_NODES": "3"}),):
        with contextlib.closing(container):
            assert container.wait() == 2
            assert "64 hexadecimal digits in the file that REIGEN_SECRET_FILE names" in container.err
    pods.mount_secret("77" * 32, indices=[2])  # of another job
    with pods.job_of(command, REIGEN_START_TIMEOUT="3") as containers:
        assert containers[0].wait(20) == 1
        assert "node 2  it has not come within 3 s" in containers[0].err
        assert containers[2].wait(20) == 1
        assert "was not there within 3 s" in containers[2].err
        containers[1].wait(20)


def test_no_variable_and_no_argument_has_the_secret(pods: Pods) -> None:
    with pods.job_of((*RUN, "-np", "3", sys.executable, "-Sc", HEARING)) as containers:
        ready(containers)
        for container in containers:
            assert SECRET not in " ".join(container.host.processes().values())
            for pid in container.host.processes():
                with contextlib.suppress(OSError):
                    assert SECRET.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        containers[0].delete()
        assert containers[0].wait(20) == 143
        assert [container.wait(20) for container in containers[1:]] == [0, 0]
    assert os.environ.get("REIGEN_SECRET") is None
