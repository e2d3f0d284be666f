"""What a process is in a job with parameter servers, from its environment."""

from __future__ import annotations

import pytest

from reigen.config import load_config
from reigen.errors import ConfigError
from reigen.kv.membership.environment import ProcessConfig, read_process_config

DMLC = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "10.0.0.7",
    "DMLC_PS_ROOT_PORT": "9091",
    "DMLC_NUM_WORKER": "4",
    "DMLC_NUM_SERVER": "2",
}
SECRET = "ab" * 32


def found(environ: dict[str, str], **changes: str) -> ProcessConfig:
    environ = {**environ, **changes}
    return read_process_config(environ, load_config(environ))


def test_mxnets_variables_are_enough() -> None:
    settings = found(DMLC)
    assert (settings.role, settings.number, settings.num_workers, settings.num_servers) == ("worker", None, 4, 2)
    assert (settings.scheduler, settings.secret) == (("10.0.0.7", 9091), None)
    assert settings.reason == "DMLC_ROLE is worker"


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({"DMLC_TASK_ID": "3"}, 3),
        ({"DMLC_TASK_ID": "1", "DMLC_ROLE": "server"}, 1),
        ({"DMLC_TASK_ID": "9", "DMLC_ROLE": "scheduler"}, None),
        # dmlc's local launcher counts servers on from the workers
        ({"DMLC_TASK_ID": "5", "DMLC_ROLE": "server", "DMLC_JOB_CLUSTER": "local"}, 1),
        # mpirun, as dmlc's mpi launcher uses it: one run for the workers, one for the servers
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, 2),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "DMLC_ROLE": "server"}, 1),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "7"}, None),
    ],
)
def test_a_number_is_a_task_number(changes: dict[str, str], number: int | None) -> None:
    assert found(DMLC, **changes).number == number


def test_an_address_of_ipv6_may_have_brackets() -> None:
    assert found(DMLC, DMLC_PS_ROOT_URI="[fd00::1]").scheduler == ("fd00::1", 9091)
    assert found(DMLC, DMLC_PS_ROOT_URI="fd00::1", DMLC_NODE_HOST="[fd00::2]").node_host == "fd00::2"


def test_the_secret_of_a_job_is_that_of_its_port() -> None:
    one, other = found(DMLC, REIGEN_SECRET=SECRET), found(DMLC, REIGEN_SECRET=SECRET, DMLC_PS_ROOT_PORT="9092")
    assert one.secret not in {None, other.secret, bytes.fromhex(SECRET)}
    assert found(DMLC, REIGEN_SECRET=SECRET, DMLC_ROLE="server").secret == one.secret
    assert SECRET not in repr(one)
    assert str(one.secret) not in repr(one)


def test_a_job_of_our_launchers_has_one_number_for_all_its_schedulers() -> None:
    by_hand, launched = {"REIGEN_SECRET": SECRET}, {"REIGEN_SECRET": SECRET, "REIGEN_RENDEZVOUS": "127.0.0.1:1"}
    assert found(DMLC, **by_hand).job == 0
    assert found(DMLC, **launched).job == found(DMLC, DMLC_ROLE="scheduler", **launched).job != 0
    assert found(DMLC, **{**launched, "REIGEN_SECRET": SECRET[::-1]}).job != found(DMLC, **launched).job


def test_all_problems_are_listed() -> None:
    with pytest.raises(ConfigError) as caught:
        found({"DMLC_ROLE": "boss", "DMLC_NUM_WORKER": "0", "DMLC_NUM_SERVER": "0", "DMLC_PS_ROOT_PORT": "70000"})
    assert str(caught.value).splitlines()[1:] == [
        "  DMLC_ROLE is 'boss': it must be worker, server or scheduler",
        "  DMLC_PS_ROOT_URI is not set: name or address of the host where the scheduler runs",
        "  DMLC_PS_ROOT_PORT is '70000', and must be a number from 1 to 65535",
        "  DMLC_NUM_WORKER is '0', and must be a number from 1 to 65535",
        "  DMLC_NUM_SERVER is '0', and must be a number from 1 to 65535: a job has at least one server",
    ]


def test_a_number_beyond_the_job_is_refused() -> None:
    with pytest.raises(ConfigError, match="DMLC_TASK_ID is '4', and must be a number from 0 to 3"):
        found(DMLC, DMLC_TASK_ID="4")


def test_silence_is_longer_than_the_time_between_two_signs_of_life() -> None:
    with pytest.raises(ConfigError, match="PS_HEARTBEAT_TIMEOUT is 2: it must be longer than PS_HEARTBEAT_INTERVAL, 2"):
        found(DMLC, PS_HEARTBEAT_TIMEOUT="2")
    assert found(DMLC, PS_HEARTBEAT_TIMEOUT="0").config.kv_heartbeat_timeout_seconds == 0


def test_a_command_knows_its_role_itself() -> None:
    environ = {name: text for name, text in DMLC.items() if name != "DMLC_ROLE"}
    assert read_process_config(environ, load_config(environ), "server").role == "server"
    with pytest.raises(ConfigError, match="DMLC_ROLE is not set"):
        read_process_config(environ, load_config(environ))


def test_without_servers_it_is_said_how_to_start_them() -> None:
    with pytest.raises(ConfigError, match=r"needs servers.*`reigen run -np 4 -s 2 COMMAND`.*DMLC_PS_ROOT_URI"):
        found({"REIGEN_RANK": "0", "REIGEN_SIZE": "1"})
