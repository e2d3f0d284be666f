"""Who started this process: each launcher's environment as it is documented by that launcher."""

import pytest

from reigen.cluster.environ import detect
from reigen.cluster.topology import Topology
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
    job = detect({"PATH": "/bin", "REIGEN_PLANE": "shm"})
    assert job.topology == Topology(0, 1, 0, 1, 0, 1)
    assert (job.rendezvous, job.secret, job.launcher) == (None, None, "none")
    assert "no launcher" in job.reason


def test_started_by_reigen_run():
    job = detect(REIGEN)
    assert job.topology == Topology(1, 2, 1, 2, 0, 1)
    assert job.rendezvous == "127.0.0.1:4242"
    assert job.secret == b"\xab" * 32
    assert job.launcher == "reigen run"


def test_reigens_own_variables_come_first():
    assert detect({**REIGEN, "RANK": "0", "WORLD_SIZE": "9", "PMI_SIZE": "4", "PMI_RANK": "2"}).topology.size == 2


def test_the_secret_is_not_shown():
    assert "ab" * 8 not in repr(detect(REIGEN))
    assert "xab" not in repr(detect(REIGEN))


def test_every_missing_and_wrong_variable_is_named_at_once_and_no_secret():
    environ = {"REIGEN_RANK": "one", "REIGEN_SIZE": "2", "REIGEN_RENDEZVOUS": "nowhere", "REIGEN_SECRET": "tiny"}
    with pytest.raises(ConfigError) as caught:
        detect(environ)
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
        detect({**REIGEN, name: value})


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}, "torchrun"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, "Open MPI"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4"}, "MPICH"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}, "Slurm"),
        ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "horovodrun"),
        ({"RANK": "0", "WORLD_SIZE": "many"}, "torchrun"),
    ],
)
def test_other_launchers_are_recognised_and_refused(environ, launcher):
    with pytest.raises(ConfigError, match=launcher) as caught:
        detect(environ)
    assert "reigen run -np N" in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "4"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        # a batch script that reserved 8 tasks but is itself one process
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"},
    ],
)
def test_one_process_of_another_launcher_is_alone(environ):
    assert detect(environ).topology.size == 1
