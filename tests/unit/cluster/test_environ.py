"""Who started this process: each launcher's environment as it is documented by that launcher."""

import pytest

from reigen.cluster.environ import detect_job, job_from_arguments
from reigen.cluster.launcher_detection import first_host
from reigen.errors import ConfigError

REIGEN = {
    "REIGEN_RANK": "1",
    "REIGEN_SIZE": "2",
    "REIGEN_LOCAL_RANK": "1",
    "REIGEN_LOCAL_SIZE": "2",
    "REIGEN_CROSS_RANK": "0",
    "REIGEN_CROSS_SIZE": "1",
    "REIGEN_RENDEZVOUS": "127.0.0.1:4242",
    "REIGEN_SECRET": "ab" * 32,
}


def test_alone():
    job = detect_job({"PATH": "/bin", "REIGEN_PLANE": "shm"})
    assert (job.rank, job.size, job.local) == (0, 1, (0, 1))
    assert (job.rendezvous, job.secret, job.launcher) == (None, None, "none")
    assert "no launcher" in job.reason


def test_started_by_reigen_run():
    job = detect_job(REIGEN)
    assert (job.rank, job.size, job.local) == (1, 2, (1, 2))
    assert job.rendezvous == "127.0.0.1:4242"
    assert job.secret == b"\xab" * 32
    assert job.launcher == "reigen run"


def test_reigens_own_variables_come_first():
    assert detect_job({**REIGEN, "RANK": "0", "WORLD_SIZE": "9", "PMI_SIZE": "4", "PMI_RANK": "2"}).size == 2


def test_the_secret_is_not_shown():
    assert "ab" * 8 not in repr(detect_job(REIGEN))
    assert "xab" not in repr(detect_job(REIGEN))


def test_every_missing_and_wrong_variable_is_named_at_once_and_no_secret():
    environ = {"REIGEN_RANK": "one", "REIGEN_SIZE": "2", "REIGEN_RENDEZVOUS": "nowhere", "REIGEN_SECRET": "tiny"}
    with pytest.raises(ConfigError) as caught:
        detect_job(environ)
    message = str(caught.value)
    for part in (
        "REIGEN_RANK is 'one', not a number",
        "REIGEN_LOCAL_RANK is not set",
        "REIGEN_LOCAL_SIZE is not set",
        "REIGEN_CROSS_RANK is not set",
        "REIGEN_CROSS_SIZE is not set",
        "REIGEN_RENDEZVOUS is 'nowhere', not host:port",
        "REIGEN_SECRET is not 64 hexadecimal digits",
        "reigen run -np N",
    ):
        assert part in message
    assert "tiny" not in message


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("REIGEN_RANK", "2", "rank is 2, but must be from 0 to 1"),
        ("REIGEN_LOCAL_SIZE", "3", "local_size is 3"),
        ("REIGEN_RANK", "-1", "not a number"),
        ("REIGEN_SIZE", "", "not a number"),
        ("REIGEN_RENDEZVOUS", "localhost:99999", "not host:port"),
        ("REIGEN_RENDEZVOUS", ":80", "not host:port"),
        ("REIGEN_SECRET", "zz" * 32, "hexadecimal"),
    ],
)
def test_contradictory_variables(name, value, complaint):
    with pytest.raises(ConfigError, match=complaint):
        detect_job({**REIGEN, name: value})


# -- programs that start their ranks themselves -----------------------------------------------------------------------


def test_what_a_program_says():
    job = job_from_arguments(1, 4, "h1:4321")
    assert (job.rank, job.size, job.coordinator, job.port, job.job_id) == (1, 4, "h1", 4321, "4321")
    assert job.reason == "init(rank=1, size=4, coordinator='h1:4321')"
    assert job_from_arguments(0, 2, "[::1]:80").coordinator == "::1"


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ((4, 4, "h:1"), "ranks go from 0 to size - 1"),
        ((-1, 4, "h:1"), "ranks go"),
        ((0, 0, "h:1"), "ranks go"),
        ((0, 2, "h"), "must be host:port"),
        ((0, 2, ":1"), "must be host:port"),
        ((0, 2, "h:0"), "must be host:port"),
        ((0, 2, "h:70000"), "must be host:port"),
    ],
)
def test_what_a_program_says_makes_no_sense(place, complaint):
    with pytest.raises(ConfigError, match=complaint):
        job_from_arguments(*place)


# -- launchers of others ----------------------------------------------------------------------------------------------

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "3",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "5",
    "MASTER_ADDR": "h1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "abc",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-h1-77@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM_JOB = {
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_NTASKS": "5",
    "SLURM_NNODES": "4",
    "SLURM_CLUSTER_NAME": "c",
}
#: 2 tasks on n2, 2 on n3, 1 on n4; this is the second of n3
SLURM_STEP = {
    **SLURM_JOB,
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "n[2-4]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2", "algo-3"]', "SM_CURRENT_HOST": "algo-2", "TRAINING_JOB_NAME": "t-1"}
KUBEFLOW = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
JAX = {"JAX_COORDINATOR_ADDRESS": "job-0.job:6666", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
JSRUN = {
    "JSM_NAMESPACE_RANK": "7",
    "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "3",
    "JSM_NAMESPACE_LOCAL_SIZE": "4",
    "LSB_JOBID": "123",
}
SKYPILOT = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-7",
}
HOROVODRUN = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}


@pytest.mark.parametrize(
    ("environ", "launcher", "place", "local", "coordinator", "job_id", "by_mpi"),
    [
        (TORCHRUN, "torchrun", (5, 6), (2, 3), "h1", "29500 abc 0", False),
        (OPEN_MPI, "mpirun (Open MPI)", (3, 4), (1, 2), None, "prterun-h1-77@1", True),
        (HYDRA, "mpiexec (MPICH, Intel MPI or MVAPICH)", (1, 4), (1, 2), None, "", True),
        (SLURM_STEP, "srun (a Slurm step)", (3, 5), (1, 2), "n2", "c 17 2", False),
        (SAGEMAKER, "SageMaker, one process a host", (1, 3), None, "algo-1", "t-1", False),
        (KUBEFLOW, "Kubeflow, one process a container", (2, 3), None, "job-node-0-0.job", "29400", False),
        (JAX, "Kubeflow, or whoever set JAX_PROCESS_ID", (1, 2), None, "job-0.job", "6666", False),
        (JSRUN, "jsrun (LSF)", (7, 8), (3, 4), None, "123", True),
        (SKYPILOT, "SkyPilot, one process a node", (1, 2), None, "10.0.0.4", "sky-7", False),
        (HOROVODRUN, "horovodrun", (1, 2), (1, 2), None, "127.0.0.1 4711", False),
    ],
)
def test_launchers(environ, launcher, place, local, coordinator, job_id, by_mpi):
    job = detect_job({"PATH": "/bin", **environ})
    assert (job.launcher, (job.rank, job.size), job.local) == (launcher, place, local)
    assert (job.coordinator, job.job_id, job.by_mpi) == (coordinator, job_id, by_mpi)
    assert (job.rendezvous, job.secret) == (None, None)
    assert "ignored" not in job.reason


def test_whether_all_ranks_are_on_one_host():
    for one in (HOROVODRUN, {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, {**TORCHRUN, "LOCAL_WORLD_SIZE": "6"}):
        assert detect_job(one).is_on_one_host
    for several in (TORCHRUN, OPEN_MPI, HYDRA, SAGEMAKER, JSRUN, SLURM_STEP, {"PMI_RANK": "0", "PMI_SIZE": "2"}):
        assert not detect_job(several).is_on_one_host


@pytest.mark.parametrize(("node", "tasks"), [("0", 2), ("1", 2), ("2", 1)])
def test_tasks_of_a_node_of_slurm(node, tasks):
    assert detect_job({**SLURM_STEP, "SLURM_NODEID": node, "SLURM_LOCALID": "0"}).local == (0, tasks)


@pytest.mark.parametrize(
    ("inner", "outer", "launcher", "ignored"),
    [
        (OPEN_MPI, {**SLURM_STEP, "SLURM_PROCID": "0"}, "Open MPI", "srun (a Slurm step) (SLURM_PROCID=0"),
        (HYDRA, SLURM_STEP, "MPICH", "srun"),
        (TORCHRUN, SLURM_STEP, "torchrun", "srun"),
        (TORCHRUN, OPEN_MPI, "torchrun", "mpirun (Open MPI) (OMPI_COMM_WORLD_RANK=3, OMPI_COMM_WORLD_SIZE=4)"),
        (OPEN_MPI, SKYPILOT, "Open MPI", "SkyPilot"),
        (TORCHRUN, KUBEFLOW, "torchrun", "Kubeflow"),
        (TORCHRUN, SAGEMAKER, "torchrun", "SageMaker"),
        (SLURM_STEP, {"PMI_RANK": "3", "PMI_SIZE": "5"}, "srun", None),  # srun --mpi=pmi2 says the same
        (OPEN_MPI, SLURM_JOB, "Open MPI", None),
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, SLURM_STEP, "torchrun", "srun"),
        (TORCHRUN, {"OMPI_COMM_WORLD_RANK": "broken"}, "torchrun", None),
    ],
)
def test_the_innermost_launcher_counts_and_the_others_are_told(inner, outer, launcher, ignored):
    inner = {**inner, "LOCAL_WORLD_SIZE": "1"} if inner.get("WORLD_SIZE") == "1" else inner
    job = detect_job({**outer, **inner})
    assert launcher in job.launcher
    if ignored is None:
        assert "ignored" not in job.reason
    else:
        assert f"; ignored, as it is further out: {ignored}" in job.reason


def test_a_step_with_pmi_can_use_mpi():
    assert detect_job({**SLURM_STEP, "PMI_RANK": "3", "PMI_SIZE": "5"}).by_mpi
    assert detect_job({**SLURM_STEP, "PMIX_RANK": "3"}).by_mpi


def test_master_addr_names_the_coordinator_where_the_launcher_does_not():
    assert detect_job({**OPEN_MPI, "MASTER_ADDR": "h9"}).coordinator == "h9"
    assert detect_job({**SLURM_STEP, "MASTER_ADDR": "h9", "WORLD_SIZE": "5"}).coordinator == "n2"


def test_a_secret_alone_makes_no_job():
    assert detect_job({"REIGEN_SECRET": "ab" * 32}).size == 1
    assert detect_job({**TORCHRUN, "REIGEN_SECRET": "ab" * 32}).secret is None


@pytest.mark.parametrize(
    ("environ", "complaints"),
    [
        ({"RANK": "0", "WORLD_SIZE": "many"}, ["WORLD_SIZE is 'many', not a number"]),
        ({"TORCHELASTIC_RUN_ID": "x"}, ["torchrun", "RANK is not set", "WORLD_SIZE is not set"]),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["RANK is 4, but must be less than WORLD_SIZE, 4"]),
        ({"RANK": "0", "WORLD_SIZE": "0"}, ["WORLD_SIZE is 0, but must be at least 1"]),
        ({**TORCHRUN, "LOCAL_RANK": "3"}, ["its number on its host is 3 of 3, in a job of 6"]),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, ["2 of 9, in a job of 6"]),
        ({**TORCHRUN, "RANK": "-1", "LOCAL_RANK": "x"}, ["RANK is '-1'", "LOCAL_RANK is 'x'"]),
        ({"OMPI_COMM_WORLD_RANK": "1"}, ["Open MPI", "OMPI_COMM_WORLD_SIZE is not set"]),
        ({"PMI_SIZE": "1"}, ["MPICH", "PMI_RANK is not set"]),
        ({**SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": "2(x"}, ["SLURM_STEP_TASKS_PER_NODE is '2(x'"]),
        ({**SLURM_STEP, "SLURM_STEP_TASKS_PER_NODE": "9(x99999999)"}, ["its number on its host is 1 of 9"]),
        ({**SLURM_STEP, "SLURM_NODEID": "3"}, ["SLURM_NODEID is 3, but", "has 3 nodes"]),
        ({**SAGEMAKER, "SM_CURRENT_HOST": "x"}, ["SM_CURRENT_HOST is 'x', which is not in SM_HOSTS"]),
        ({**SAGEMAKER, "SM_HOSTS": "algo-1"}, ["SM_HOSTS is 'algo-1', not a list"]),
        ({"SM_HOSTS": '["a", "b"]'}, ["SM_CURRENT_HOST is not set"]),
        ({**KUBEFLOW, "PET_NPROC_PER_NODE": "2"}, ["PET_NPROC_PER_NODE is '2'", "torchrun train.py"]),
        ({**KUBEFLOW, "PET_NNODES": "1:4"}, ["PET_NNODES is '1:4', not a number"]),
        ({"JSM_NAMESPACE_SIZE": "2"}, ["jsrun", "JSM_NAMESPACE_RANK is not set"]),
        ({"SKYPILOT_NUM_NODES": "2"}, ["SkyPilot", "SKYPILOT_NODE_RANK is not set"]),
        ({"HOROVOD_RANK": "0"}, ["horovodrun", "HOROVOD_SIZE is not set"]),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "h1"}, ["WORLD_SIZE=4, MASTER_ADDR=h1", "which RANK"]),
        ({"RANK": "1", "MASTER_ADDR": "h1"}, ["RANK=1, MASTER_ADDR=h1", "WORLD_SIZE"]),
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "n"}, ["PMIX_RANK=1", "how many"]),
    ],
)
def test_what_is_missing_or_contradictory_is_one_error_that_lists_it_all(environ, complaints):
    with pytest.raises(ConfigError) as caught:
        detect_job(environ)
    for complaint in complaints:
        assert complaint in str(caught.value)
    assert "reigen run -np N" in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "4"},
        {"RANK": "4"},
        {"WORLD_SIZE": "1", "MASTER_ADDR": "h1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        # a batch script that reserved 5 tasks but is itself one process
        {
            **SLURM_JOB,
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
            "SLURM_TASKS_PER_NODE": "2(x2),1",
        },
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        {"PET_NNODES": "1", "PET_NODE_RANK": "0"},
        {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "1"},
    ],
)
def test_one_process_is_alone(environ):
    job = detect_job(environ)
    assert (job.rank, job.size, job.local) == (0, 1, (0, 1))


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-3,7],m2", "n1"),
        ("n[007-010]", "n007"),
        ("rack[2,4]-n[5-6].x,other", "rack2-n5.x"),
        ("", None),
    ],
)
def test_the_first_host_of_a_list_of_slurm(nodes, first):
    assert first_host(nodes) == first
