"""Servers and scheduler, planned: how many, what they are told, how often they start; and what is said of them."""

import sys

import pytest

from reigen.cluster.topology import Topology
from reigen.errors import ConfigError
from reigen.launch.job import Failure, Finish
from reigen.launch.local import Cores, Services, command_of, plan, plan_servants
from reigen.launch.output import Lines, Log
from reigen.launch.record import Record
from reigen.launch.report import Whereabouts, report
from reigen.launch.servants import Household, Leniency, Servers, leniency, names_of, servants_of

SECRET = b"\xab" * 32
SERVICES = Services("10.0.0.1:4242", SECRET, 31999, "10.0.0.1", Household("10.0.0.1", 9091, 2, 3), "10.0.0.7")


def places(environ=None, of_servers=None):
    return plan_servants(servants_of(2, Servers(3)), SERVICES, environ or {}, of_servers or {})


def test_numbers_come_behind_those_of_the_ranks():
    assert names_of(2, Servers(3)) == {2: "server 0", 3: "server 1", 4: "server 2", 5: "scheduler"}
    assert names_of(2, None) == {}


def test_what_makes_no_sense():
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        Servers(0)
    with pytest.raises(ConfigError, match="-1 times"):
        Servers(1, num_restarts=-1)


def test_a_server_is_started_again_only_where_it_keeps_snapshots():
    keeps = {"REIGEN_KV_SNAPSHOT_DIR": "/s"}
    assert leniency(2, None, {}) == Leniency()
    assert leniency(1, Servers(2), {}) == Leniency({1: 0, 2: 0, 3: 3})
    assert leniency(1, Servers(2), keeps) == Leniency({1: 3, 2: 3, 3: 3})
    assert leniency(1, Servers(1, environ=keeps, num_restarts=1), {}) == Leniency({1: 1, 2: 1})
    assert leniency(1, Servers(1, num_restarts=0), keeps) == Leniency({1: 0, 2: 0})


def test_what_servers_do_without_a_worker_is_what_the_launcher_does():
    def on_loss(policy):
        return leniency(2, Servers(1), {"REIGEN_KV_ON_WORKER_LOSS": policy})

    assert on_loss("abort") == leniency(2, Servers(1), {}) == Leniency({2: 0, 3: 3})
    assert on_loss("continue") == Leniency({2: 0, 3: 3}, goes_on=True)
    assert on_loss("wait") == Leniency({0: 3, 1: 3, 2: 0, 3: 3})
    assert leniency(2, None, {"REIGEN_KV_ON_WORKER_LOSS": "continue"}) == Leniency()


def test_everybody_is_told_the_same_in_mxnets_words():
    workers, _ = plan([Topology.on_one_host(rank, 2) for rank in range(2)], SERVICES, {}, Cores((0,)))
    everybody = [place.environ for place in (*workers, *places())]
    told = ["DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_NODE_HOST"]
    assert {tuple(environ[name] for name in told) for environ in everybody} == {
        ("10.0.0.1", "9091", "2", "3", "10.0.0.7")
    }
    assert [f"{environ['DMLC_ROLE']} {environ['DMLC_TASK_ID']}" for environ in everybody] == [
        *("worker 0", "worker 1", "server 0", "server 1", "server 2", "scheduler 0")
    ]
    assert {environ["REIGEN_SECRET"] for environ in everybody} == {SECRET.hex()}
    assert {environ["DMLC_NUM_ATTEMPT"] for environ in everybody} == {"0"}


def test_the_scheduler_has_patience_with_workers_that_take_their_time():
    assert [place.environ["REIGEN_DEADLINE"] for place in places({"REIGEN_DEADLINE": "3"})] == ["3"] * 3 + ["1209600"]


def test_without_servers_nobody_is_told_of_any():
    services = Services("127.0.0.1:4242", SECRET, 31999)
    ranks, _ = plan([Topology.alone()], services, {}, Cores((0,)))
    assert not [name for name in ranks[0].environ if name.startswith("DMLC_")]


def test_a_servant_is_no_rank_whatever_it_inherits():
    environ = {"REIGEN_RANK": "1", "HOROVOD_SIZE": "4", "WORLD_SIZE": "4", "SEED": "7"}
    for place in places(environ):
        assert place.environ["SEED"] == "7"
        assert not {"REIGEN_RANK", "HOROVOD_SIZE", "WORLD_SIZE"} & place.environ.keys()


def test_variables_of_servers_are_not_the_schedulers():
    assert [place.environ.get("A") for place in places({"A": "1"}, {"A": "2"})] == ["2", "2", "2", "1"]


def test_reigens_own_programs():
    own = (sys.executable, "-P", "-m", "reigen")
    assert [command_of(place, ("true",), ()) for place in places()] == [(*own, "server")] * 3 + [(*own, "scheduler")]
    assert {command_of(place, ("true",), ("x",)) for place in places()} == {("x",)}


def test_lines_carry_the_name():
    screen = Log(prefix=True, names={2: "server 0"})
    assert Lines(screen, (2, 0)).feed(b"hello\n") == b"[server 0] hello\n"
    assert Lines(screen, (1, 0)).feed(b"hello\n") == b"[1] hello\n"


def test_a_record_goes_on_when_a_server_is_started_again(tmp_path):
    complaints = []
    record = Record(tmp_path / "server.0", 0, complaints.append)
    for text in (b"one\n", b"two\n"):
        record.write(text)
        record.close()
    assert (tmp_path / "server.0/stdout").read_bytes() == b"one\ntwo\n"
    assert complaints == []


WHERE = Whereabouts({0: "h1", 1: "h1", 2: "h2", 3: "h1"}, {2: "server 0", 3: "scheduler"})


def said(failure, whereabouts=WHERE, tail=(b"its last line",)):
    return report(Finish(1, failure, None), tail, whereabouts).decode().splitlines()


def test_a_server_that_failed_is_named_with_what_to_do():
    assert said(Failure(2, -9, 2)) == [
        "reigen run: server 0 (host h2) failed first: killed by SIGKILL",
        "  the last lines of its stderr:",
        "    its last line",
        "  it was not started again: a server is only where it keeps snapshots (REIGEN_KV_SNAPSHOT_DIR)",
        "  2 ranks were stopped because of it",
    ]


def test_a_server_that_was_started_again_in_vain():
    lines = said(Failure(2, -9, 1, num_restarts=3), Whereabouts(names=WHERE.names), tail=())
    assert lines == [
        "reigen run: server 0 failed first: killed by SIGKILL",
        "  it wrote nothing to stderr",
        "  it had been started again 3 times before",
        "  1 rank was stopped because of it",
    ]


def test_a_server_that_ended_by_itself():
    assert said(Failure(2, 1, 0), Whereabouts(names=WHERE.names))[-1] == (
        "  it was not started again: it has ended by itself"
    )


def test_a_host_that_was_lost_with_everything_on_it():
    hosts = {0: "h1", 1: "h2", 2: "h2", 3: "h2", 4: "h1"}
    where = Whereabouts(hosts, {3: "server 0", 4: "scheduler"}, {"h2": "unplugged"})
    assert said(Failure(1, 255, 1, "unplugged"), where) == [
        "reigen run: host h2 was lost, with ranks 1, 2 and server 0: unplugged",
        "  1 other rank was stopped because of it",
    ]
