"""What engines tell each node of a job, where all run the same command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from reigen.cli.check import collect_results
from reigen.errors import ConfigError
from reigen.launch.local_plan import detect_cpus
from reigen.launch.nodes.failure_file import FailureFile
from reigen.launch.nodes.launcher import count_slots
from reigen.launch.nodes.sources import SOURCES, NodeJob, find_node_job, require_node_job
from reigen.launch.nodes.variables import count_gpus

RESOURCES = "/opt/ml/input/config/resourceconfig.json"
#: As a kubelet writes it for a pod with a subdomain.
HOSTS = (
    "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
    "10.1.2.3\tjob-2.net.space.svc.cluster.local\tjob-2\n"
)


def find(environ: Mapping[str, str], host: str = "", hosts: str = "", **files: str) -> NodeJob | None:
    texts = {"/proc/sys/kernel/hostname": host + "\n", "/etc/hosts": hosts, **files}
    return find_node_job(environ, texts.get)


def test_an_indexed_job() -> None:
    found = find(
        {"JOB_COMPLETION_INDEX": "2", "REIGEN_NODES": "4", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "job-2", HOSTS
    )
    assert found is not None
    assert (found.index, found.size, found.leader) == (2, 4, "job-0.net.space.svc.cluster.local")
    assert (found.job_id, found.slots, found.grace_seconds) == ("job-0", None, 30.0)
    assert found.removed == ("JOB_COMPLETION_INDEX", "REIGEN_NODES")
    assert found.source == "Kubernetes Indexed Job of 4 nodes (REIGEN_NODES), node 2 (JOB_COMPLETION_INDEX)"


def test_a_job_set_with_several_jobs_counts_by_itself() -> None:
    environ = {"JOB_COMPLETION_INDEX": "0", "REIGEN_NODES": "4", "REIGEN_NODE_INDEX": "3", "REIGEN_LEADER": "s-w-0-0.s"}
    found = find(environ, "s-w-3-0")
    assert found is not None
    assert (found.index, found.size, found.leader) == (3, 4, "s-w-0-0.s")
    first = find({**environ, "REIGEN_NODE_INDEX": "0"}, "s-w-0-0")
    assert first is not None
    assert (first.index, first.job_id) == (0, found.job_id)


def test_a_train_job_with_the_torch_policy() -> None:
    environ = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "4",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "job-node-0-0.job",
        "PET_MASTER_PORT": "29500",
        "JOB_COMPLETION_INDEX": "1",  # of the Job inside
    }
    found = find(environ, "job-node-0-1")
    assert found is not None
    assert (found.index, found.size, found.leader, found.slots) == (1, 2, "job-node-0-0.job", 4)
    assert set(found.removed) == set(environ)


def test_the_words_of_torchrun_for_processes() -> None:
    environ = {"PET_NNODES": "1", "PET_NODE_RANK": "0"}
    counts = {}
    for word in ("auto", "cpu", "3"):
        found = find({**environ, "PET_NPROC_PER_NODE": word, "CUDA_VISIBLE_DEVICES": "0,1"})
        assert found is not None
        counts[word] = found.slots
    assert counts == {"auto": 2, "cpu": len(detect_cpus().cpus), "3": 3}
    without = find({**environ, "PET_NPROC_PER_NODE": "auto", "CUDA_VISIBLE_DEVICES": ""})
    assert without is not None
    assert without.slots == len(detect_cpus().cpus)


def test_a_train_job_with_the_jax_policy() -> None:
    environ = {"JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2", "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:6666"}
    found = find(environ, "job-node-0-2")
    assert found is not None
    assert (found.index, found.size, found.leader) == (2, 3, "job-node-0-0.job")


def test_a_leader_worker_set() -> None:
    environ = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "set-0.set.space"}
    found = find(environ, "set-0-1")
    assert found is not None
    assert (found.index, found.size, found.leader) == (1, 2, "set-0.set.space")
    leader = find({**environ, "LWS_WORKER_INDEX": "0"}, "set-0")
    assert leader is not None
    assert (leader.index, leader.leader, leader.job_id) == (0, found.leader, found.job_id)


def test_a_stateful_set() -> None:
    found = find({"REIGEN_NODES": "3", "REIGEN_GRACE": "90"}, "job-2", HOSTS)
    assert found is not None
    assert (found.index, found.size, found.grace_seconds) == (2, 3, 90.0)
    assert found.leader == "job-0.net.space.svc.cluster.local"


@pytest.mark.parametrize(
    ("environ", "host", "said"),
    [
        ({"JOB_COMPLETION_INDEX": "0"}, "job-0", "REIGEN_NODES is not set: Kubernetes does not tell"),
        ({"JOB_COMPLETION_INDEX": "4", "REIGEN_NODES": "4"}, "job-4", "must be less than REIGEN_NODES, 4"),
        ({"JOB_COMPLETION_INDEX": "x", "REIGEN_NODES": "4"}, "job-4", "JOB_COMPLETION_INDEX is 'x', not a number"),
        ({"JOB_COMPLETION_INDEX": "0", "REIGEN_NODES": "0"}, "job-0", "REIGEN_NODES is 0, but must be at least 1"),
        ({"JOB_COMPLETION_INDEX": "1", "REIGEN_NODES": "2"}, "job-1", "the pod has no subdomain"),
        ({"JOB_COMPLETION_INDEX": "1", "REIGEN_NODES": "2"}, "box", "'box' does not end in -NUMBER"),
        ({"REIGEN_NODES": "2"}, "box", "nothing says which node this is"),
        ({"REIGEN_NODES": "2", "REIGEN_GRACE": "soon", "REIGEN_LEADER": "x"}, "a-1", "REIGEN_GRACE is 'soon'"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, "a-0", "PET_MASTER_ADDR is not set"),
        ({"PET_NNODES": "2"}, "a-0", "PET_NODE_RANK is not set"),
        ({"PET_NNODES": "1:4", "PET_NODE_RANK": "0"}, "a-0", "PET_NNODES is '1:4'"),
        ({"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "many"}, "a-0", "neither a number"),
        (
            {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "gpu", "CUDA_VISIBLE_DEVICES": ""},
            "a-0",
            "there is no GPU on this node",
        ),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, "a-1", "JAX_COORDINATOR_ADDRESS is not set"),
        ({"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}, "a-0-1", "LWS_LEADER_ADDRESS is not set"),
    ],
)
def test_variables_that_are_not_in_order(environ: dict[str, str], host: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find(environ, host)


def test_no_node_lists_what_was_looked_for() -> None:
    assert find({}, "box-1", HOSTS) is None
    with pytest.raises(ConfigError) as caught:
        require_node_job({}, lambda path: None)
    assert all(each in str(caught.value) for each in SOURCES)


def resources(**changes: Any) -> str:
    content = {
        "current_host": "algo-10",
        "current_instance_type": "ml.c5.xlarge",
        "hosts": ["algo-2", "algo-10", "algo-1"],
        "network_interface_name": "eth0",
        "instance_groups": [
            {"instance_group_name": "gpu", "instance_type": "ml.p4d.24xlarge", "hosts": ["algo-1", "algo-10"]},
            {"instance_group_name": "cpu", "instance_type": "ml.c5.xlarge", "hosts": ["algo-2"]},
        ],
    }
    return json.dumps({**content, **changes})


def test_a_training_job_by_the_file_of_the_service() -> None:
    found = find({"TRAINING_JOB_NAME": "mine", "SM_NUM_GPUS": "8", "SM_HOSTS": "[]"}, **{RESOURCES: resources()})
    assert found is not None
    assert found.names == ("algo-1", "algo-10", "algo-2")  # as the toolkit sorts them
    assert (found.index, found.size, found.leader, found.slots, found.job_id) == (1, 3, "algo-1", 8, "mine")
    assert (found.failure_file, found.grace_seconds, found.resolve_seconds) == ("/opt/ml/output/failure", 120, 900)
    assert found.environ == {"SM_NETWORK_INTERFACE_NAME": "eth0"}


def test_a_training_job_elsewhere() -> None:
    environ = {"SAGEMAKER_BASE_DIR": "/tmp/x", "CUDA_VISIBLE_DEVICES": ""}
    found = find(environ, **{"/tmp/x/input/config/resourceconfig.json": resources(current_host="algo-1")})
    assert found is not None
    # without GPUs a host takes its share of the ranks that the user names
    assert (found.index, found.slots, found.failure_file) == (0, None, "/tmp/x/output/failure")


@pytest.mark.parametrize(("gpus", "per_node", "slots"), [("4", 2, 2), ("0", 4, 4), ("4", None, 4), ("0", None, None)])
def test_processes_of_a_training_job_s_host(gpus: str, per_node: int | None, slots: int | None) -> None:
    config = json.dumps({"process_count_per_node": per_node, "options": []})
    found = find({"SM_NUM_GPUS": gpus, "SM_DISTRIBUTED_CONFIG": config}, **{RESOURCES: resources()})
    assert found is not None
    assert found.slots == slots


@pytest.mark.parametrize(("current", "expected"), [("algo-10", (1, 2)), ("algo-2", (0, 1))])
def test_groups_that_train(current: str, expected: tuple[int, int]) -> None:
    environ = {"SM_DISTRIBUTION_INSTANCE_GROUPS": '["gpu"]', "SM_NUM_GPUS": "0"}
    found = find(environ, **{RESOURCES: resources(current_host=current)})
    assert found is not None
    assert (found.index, found.size) == expected


def test_a_training_job_by_variables() -> None:
    found = find({"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "4"})
    assert found is not None
    assert (found.index, found.size, found.leader, found.slots) == (1, 2, "algo-1", 4)


@pytest.mark.parametrize(
    ("environ", "file", "said"),
    [
        ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, None, "this host is 'b', which is not among a"),
        ({"SM_HOSTS": '["a"]'}, None, "SM_CURRENT_HOST is not set"),
        ({"SM_HOSTS": "a,b", "SM_CURRENT_HOST": "b"}, None, "SM_HOSTS is no JSON"),
        ({"SM_HOSTS": '{"a": 1}', "SM_CURRENT_HOST": "b"}, None, "not a list in JSON"),
        ({"SM_HOSTS": "[]", "SM_CURRENT_HOST": "b"}, None, "names no hosts"),
        ({}, "{", f"{RESOURCES} is no JSON"),
        ({}, "[]", "not an object in JSON"),
        ({}, resources(hosts=[]), f"{RESOURCES} names no hosts"),
        ({}, resources(hosts="algo-1"), "hosts is 'algo-1': not a list of names"),
        ({}, resources(current_host="algo-7"), "this host is 'algo-7', which is not among algo-1, algo-10, algo-2"),
        ({}, resources(instance_groups=[{"hosts": []}]), "instance_groups is not a list"),
        ({"SM_NUM_GPUS": "all"}, resources(), "SM_NUM_GPUS is 'all', not a number"),
        ({"SM_DISTRIBUTED_CONFIG": '{"process_count_per_node": -1}'}, resources(), "process_count_per_node is -1, not"),
    ],
)
def test_training_jobs_that_are_not_in_order(environ: dict[str, str], file: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("[", "\\[")):
        find(environ, **({} if file is None else {RESOURCES: file}))


def test_a_file_that_cannot_be_read() -> None:
    def read(path: str) -> str | None:
        raise PermissionError(13, "Permission denied")

    with pytest.raises(ConfigError, match=r"resourceconfig\.json cannot be read: Permission denied"):
        find_node_job({}, read)


def test_gpus_are_counted_without_a_library(tmp_path: Any) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus({}, str(tmp_path)) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, str(tmp_path)) == 3
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, str(tmp_path)) == 0
    assert count_gpus({}, str(tmp_path / "none")) == 0


def test_reigen_check_says_which_node_it_is(tmp_path: Any) -> None:
    environ = {
        "REIGEN_NODES": "2",
        "REIGEN_NODE_INDEX": "1",
        "REIGEN_LEADER": "job-0.net",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }

    def found(**more: str) -> list[str]:
        return [each.value for each in collect_results({**environ, **more}) if each.topic == "launcher"]

    engine, node, elastic = found()
    assert engine == "StatefulSet of 2 nodes (REIGEN_NODES), node 1 (REIGEN_NODE_INDEX)"
    assert node.startswith("node 1 of 2 dials job-0.net, with 2 ranks of -np auto; ")
    assert "the nodes need a secret" in node
    assert elastic.startswith("--min-np: nodes other than node 0 may go")
    secret = tmp_path / "secret"
    secret.write_text("5e" * 32)
    secret.chmod(0o400)
    assert found(REIGEN_SECRET_FILE=str(secret))[1].endswith(f"the secret is in {secret}")
    secret.chmod(0o444)
    assert "may be used by others (mode 0444)" in found(REIGEN_SECRET_FILE=str(secret))[1]
    assert found(REIGEN_NODE_INDEX="2") == ["REIGEN_NODE_INDEX is 2, but must be less than REIGEN_NODES, 2"]


def test_the_share_of_a_node() -> None:
    jobs = [NodeJob("", index, 3, "a") for index in range(3)]
    assert [count_slots(job, {}, 7) for job in jobs] == [3, 2, 2]
    assert [count_slots(job, {"CUDA_VISIBLE_DEVICES": "0,1"}, None) for job in jobs] == [2, 2, 2]
    assert count_slots(NodeJob("", 0, 3, "a", slots=4), {}, 7) == 4


def test_the_failure_file(tmp_path: Any) -> None:
    file, complaints = tmp_path / "output/failure", list[str]()
    failure = FailureFile(str(file), complaints.append)
    failure.complain("something odd")
    failure.begin_with("rank 1 failed\n")
    assert file.read_text() == "rank 1 failed\nreigen run: something odd\n"
    failure.close(7)
    assert file.exists()
    failure.close(0)
    assert (file.exists(), complaints) == (False, ["something odd"])
    (tmp_path / "blocked").touch()
    FailureFile(str(tmp_path / "blocked/failure"), complaints.append).begin_with("x")
    assert "cannot be written" in complaints[-1]
