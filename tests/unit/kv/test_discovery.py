"""Where nodes listen, on this machine; several machines are in tests/network/test_kv_nodes.py."""

from __future__ import annotations

import socket

import pytest

from reigen.cluster.bootstrap import local
from reigen.config import load_config
from reigen.errors import ConfigError
from reigen.kv.membership.discovery import (
    SchedulerLocator,
    choose_listen_host,
    expand_interfaces,
    scheduler_host,
    scheduler_secret,
)
from reigen.kv.membership.environment import ProcessConfig, read_process_config
from reigen.net.interfaces import local_addresses


def settings(role: str = "server", uri: str = "127.0.0.1", **variables: str) -> ProcessConfig:
    environ = {
        "DMLC_ROLE": role,
        "DMLC_PS_ROOT_URI": uri,
        "DMLC_PS_ROOT_PORT": "9091",
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "1",
        **variables,
    }
    return read_process_config(environ, load_config(environ))


def test_a_server_listens_where_the_way_to_the_scheduler_begins() -> None:
    assert choose_listen_host(settings())[0] == "127.0.0.1"
    assert choose_listen_host(settings(uri="::1"))[0] == "::1"
    assert choose_listen_host(settings(REIGEN_SECRET="ab" * 32))[0] == "127.0.0.1"


def test_a_server_listens_where_it_is_told_to() -> None:
    address, why = choose_listen_host(settings(DMLC_NODE_HOST="localhost"))
    assert address in {"127.0.0.1", "::1"}
    assert why == "DMLC_NODE_HOST is localhost"
    assert choose_listen_host(settings(DMLC_INTERFACE="lo"))[0] == "127.0.0.1"


@pytest.mark.parametrize("host", ["192.0.2.7", "0.0.0.0", "no-such-host.invalid"])
def test_a_place_that_is_not_here_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=f"DMLC_NODE_HOST is {host}.*no address of this host"):
        choose_listen_host(settings(DMLC_NODE_HOST=host))
    with pytest.raises(ConfigError, match=f"DMLC_PS_ROOT_URI is {host}.*Start the scheduler on the host that it names"):
        scheduler_host(settings("scheduler", host))


def test_a_scheduler_behind_another_address_listens_at_its_own() -> None:
    told = settings("scheduler", "192.0.2.7", DMLC_NODE_HOST="127.0.0.1")
    assert scheduler_host(told) == "127.0.0.1"


def test_a_secret_whose_keeper_does_not_answer_is_not_replaced_by_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_HANDSHAKE_SECONDS", 0.05)
    scheduler = settings("scheduler", DMLC_PS_ROOT_PORT="9093", REIGEN_START_TIMEOUT="0.1")
    assert scheduler_secret(scheduler)[1] is False, "there is no keeper"
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(local.bootstrap_socket_name("kv", "keeper 127.0.0.1 9093", 1))
        stopped.listen(8)
        with pytest.raises(ConfigError, match=r"9093, and has not answered for 0.1 s .*let it go on, or end it"):
            scheduler_secret(scheduler)


def test_an_interface_may_be_named_by_its_beginning() -> None:
    assert expand_interfaces(()) == ()
    assert expand_interfaces(("lo",)) == ("lo",)
    assert expand_interfaces(("l",)) == tuple(sorted(name for name in local_addresses() if name.startswith("l")))
    assert expand_interfaces(("nothing0",)) == ("nothing0",)  # what is missing is told by whoever looks for it


def test_processes_of_several_hosts_need_a_secret() -> None:
    with pytest.raises(
        ConfigError, match=r"192\.0\.2\.7 \(DMLC_PS_ROOT_URI\), which is another host.*REIGEN_SECRET_FILE"
    ):
        SchedulerLocator(settings("worker", "192.0.2.7"))
    given = SchedulerLocator(settings("worker", "192.0.2.7", REIGEN_SECRET="ab" * 32))
    assert [pointer.address for pointer in given.candidates()] == ["192.0.2.7:9091"]
