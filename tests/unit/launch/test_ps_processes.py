"""Servers and scheduler, planned: how many, what they are told, how often they start; and what is said of them."""

import sys

import pytest

from reigen.cluster.topology import Topology
from reigen.errors import ConfigError
from reigen.launch.exit_report import SIGKILL_HINT, ProcessLocations, format_exit_report
from reigen.launch.job_state import FinishJob, JobFailure
from reigen.launch.local_plan import AvailableCpus, JobServices, plan_ps_processes, plan_ranks, process_command
from reigen.launch.output.line_prefix import LineSplitter, LogSink
from reigen.launch.output.output_files import OutputFile
from reigen.launch.ps_processes import (
    PsJobSpec,
    PsRole,
    RestartPolicy,
    ServerOptions,
    choose_restart_policy,
    list_ps_processes,
    name_ps_processes,
    servers_keep_values,
)

SECRET = b"\xab" * 32
SERVICES = JobServices("10.0.0.1:4242", SECRET, 31999, "10.0.0.1", PsJobSpec("10.0.0.1", 9091, 2, 3), "10.0.0.7")


def places(environ=None, of_servers=None):
    return plan_ps_processes(list_ps_processes(2, ServerOptions(3)), SERVICES, environ or {}, of_servers or {})


def test_numbers_come_behind_those_of_the_ranks():
    assert name_ps_processes(2, ServerOptions(3)) == {2: "server 0", 3: "server 1", 4: "server 2", 5: "scheduler"}
    assert name_ps_processes(2, None) == {}


def test_what_makes_no_sense():
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        ServerOptions(0)
    with pytest.raises(ConfigError, match="-1 times"):
        ServerOptions(1, num_restarts=-1)
    with pytest.raises(ConfigError, match="--replicate-servers 3: there is 1, and 2"):
        ServerOptions(3, replicas=3)
    with pytest.raises(ConfigError, match="in the memory of another server: use -s 2 or more"):
        ServerOptions(1, replicas=2)


def test_a_server_is_started_again_only_where_it_keeps_snapshots():
    keeps = {"REIGEN_KV_SNAPSHOT_DIR": "/s"}
    assert choose_restart_policy(2, None, {}) == RestartPolicy()
    assert not servers_keep_values(ServerOptions(2), {})
    assert servers_keep_values(ServerOptions(2), {"REIGEN_KV_REPLICAS": "2"})
    assert servers_keep_values(ServerOptions(2), keeps)
    assert choose_restart_policy(1, ServerOptions(2), {}) == RestartPolicy({1: 0, 2: 0, 3: 3})
    assert choose_restart_policy(1, ServerOptions(2), keeps) == RestartPolicy({1: 3, 2: 3, 3: 3})
    assert choose_restart_policy(1, ServerOptions(1, environ=keeps, num_restarts=1), {}) == RestartPolicy({1: 1, 2: 1})
    assert choose_restart_policy(1, ServerOptions(1, num_restarts=0), keeps) == RestartPolicy({1: 0, 2: 0})
    replicated = ServerOptions(2, replicas=2)
    assert choose_restart_policy(1, ServerOptions(2), {}, is_elastic=True) == RestartPolicy({1: 0, 2: 0, 3: 3})
    assert choose_restart_policy(1, replicated, replicated.variables) == RestartPolicy({1: 3, 2: 3, 3: 3})


def test_what_servers_do_without_a_worker_is_what_the_launcher_does():
    def on_loss(policy):
        return choose_restart_policy(2, ServerOptions(1), {"REIGEN_KV_ON_WORKER_LOSS": policy})

    assert on_loss("abort") == choose_restart_policy(2, ServerOptions(1), {}) == RestartPolicy({2: 0, 3: 3})
    assert on_loss("continue") == RestartPolicy({2: 0, 3: 3}, continue_on_failure=True)
    assert on_loss("wait") == RestartPolicy({0: 3, 1: 3, 2: 0, 3: 3})
    assert choose_restart_policy(2, None, {"REIGEN_KV_ON_WORKER_LOSS": "continue"}) == RestartPolicy()


def test_everybody_is_told_the_same_in_mxnets_words():
    workers, _ = plan_ranks([Topology.on_one_host(rank, 2) for rank in range(2)], SERVICES, {}, AvailableCpus((0,)))
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


def test_only_the_scheduler_is_told_that_its_port_is_held():
    household = PsJobSpec("10.0.0.1", 9091, 2, 3, port_is_held=True)
    assert household.variables(PsRole.SCHEDULER, 0, "10.0.0.7")["REIGEN_PORT_IS_HELD"] == "1"
    for told in (household.variables(PsRole.SERVER, 0, "10.0.0.7"), household.variables(PsRole.WORKER, 0, "10.0.0.7")):
        assert "REIGEN_PORT_IS_HELD" not in told
    for place in places({"REIGEN_PORT_IS_HELD": "1"}):  # that of the launcher of this launcher
        assert "REIGEN_PORT_IS_HELD" not in place.environ


def test_without_servers_nobody_is_told_of_any():
    services = JobServices("127.0.0.1:4242", SECRET, 31999)
    ranks, _ = plan_ranks([Topology.alone()], services, {}, AvailableCpus((0,)))
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
    assert [process_command(place, ("true",), ()) for place in places()] == [(*own, "server")] * 3 + [
        (*own, "scheduler")
    ]
    assert {process_command(place, ("true",), ("x",)) for place in places()} == {("x",)}


def test_lines_carry_the_name():
    screen = LogSink(prefix=True, names={2: "server 0"})
    assert LineSplitter(screen, (2, 0)).feed(b"hello\n") == b"[server 0] hello\n"
    assert LineSplitter(screen, (1, 0)).feed(b"hello\n") == b"[1] hello\n"


def test_a_record_goes_on_when_a_server_is_started_again(tmp_path):
    complaints = []
    record = OutputFile(tmp_path / "server.0", 0, complaints.append)
    for text in (b"one\n", b"two\n"):
        record.write(text)
        record.close()
    assert (tmp_path / "server.0/stdout").read_bytes() == b"one\ntwo\n"
    assert complaints == []


@pytest.mark.parametrize("is_link", [True, False])
def test_a_record_does_not_go_on_in_a_file_that_somebody_put_there(tmp_path, is_link):
    """Its name can be foreseen."""
    mine, complaints = tmp_path / "mine", []
    mine.write_text("mine")
    record = OutputFile(tmp_path / "server.0", 0, complaints.append)
    record.write(b"one\n")
    record.close()
    path = tmp_path / "server.0/stdout"
    path.unlink()
    path.symlink_to(mine) if is_link else path.hardlink_to(mine)
    record.write(b"two\n")
    record.write(b"three\n")
    assert mine.read_text() == "mine"
    assert len(complaints) == 1
    assert complaints[0].startswith(f"{path} is not complete: ")


def test_a_record_does_not_go_on_in_a_folder_that_leads_elsewhere(tmp_path):
    """Not even where it leads to the file that was begun: the link may be another one by then."""
    complaints, folder = [], tmp_path / "server.0"
    record = OutputFile(folder, 0, complaints.append)
    record.close()
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    record.write(b"one\n")
    assert (tmp_path / "moved/stdout").read_bytes() == b""
    assert complaints == [f"{folder}/stdout is not complete: {folder} is a link"]


WHERE = ProcessLocations({0: "h1", 1: "h1", 2: "h2", 3: "h1"}, {2: "server 0", 3: "scheduler"})


def said(failure, whereabouts=WHERE, tail=(b"its last line",)):
    return format_exit_report(FinishJob(1, failure, None), tail, whereabouts).decode().splitlines()


def test_a_server_that_failed_is_named_with_what_to_do():
    assert said(JobFailure(2, -9, 2)) == [
        "reigen run: server 0 (host h2) failed first: killed by SIGKILL",
        "  the last lines of its stderr:",
        "    its last line",
        f"  {SIGKILL_HINT}",
        (
            "  it was not started again: a server is only where it keeps snapshots, in the memory of another one "
            "(--replicate-servers 2) or on a disk (REIGEN_KV_SNAPSHOT_DIR)"
        ),
        "  2 ranks were stopped because of it",
    ]


def test_the_keys_that_are_lost_with_a_server_are_named():
    finish = FinishJob(137, JobFailure(2, -9, 2), None)
    locations = ProcessLocations(names={2: "server 0"}, held_keys={2: "5 keys: 'a', 'b', 'c' and 2 others"})
    lines = format_exit_report(finish, [], locations).decode().splitlines()
    assert lines[-2] == "  lost with it are its parts of 5 keys: 'a', 'b', 'c' and 2 others"


def test_a_server_that_was_started_again_in_vain():
    lines = said(JobFailure(2, -9, 1, num_restarts=3), ProcessLocations(names=WHERE.names), tail=())
    assert lines == [
        "reigen run: server 0 failed first: killed by SIGKILL",
        "  it wrote nothing to stderr",
        f"  {SIGKILL_HINT}",
        "  it had been started again 3 times before",
        "  1 rank was stopped because of it",
    ]


def test_a_server_that_ended_by_itself():
    assert said(JobFailure(2, 1, 0), ProcessLocations(names=WHERE.names))[-1] == (
        "  it was not started again: it has ended by itself"
    )


def test_a_host_that_was_lost_with_everything_on_it():
    hosts = {0: "h1", 1: "h2", 2: "h2", 3: "h2", 4: "h1"}
    where = ProcessLocations(hosts, {3: "server 0", 4: "scheduler"}, {"h2": "unplugged"})
    assert said(JobFailure(1, 255, 1, "unplugged"), where) == [
        "reigen run: host h2 was lost, with ranks 1, 2 and server 0: unplugged",
        "  1 other rank was stopped because of it",
    ]


@pytest.mark.parametrize(
    ("sharing", "stopped"),
    [([], ["2 other ranks were"]), ([1], ["1 other rank was"]), ([1, 2], []), ([1, 2, 3], [])],
)
def test_ranks_that_ended_with_the_same_error_do_not_count_as_stopped(sharing, stopped):
    finish = FinishJob(1, JobFailure(0, 1, 2), None)
    lines = format_exit_report(finish, [b"error"], ProcessLocations(), sharing=sharing).decode().splitlines()
    assert [line for line in lines if "stopped" in line] == [f"  {each} stopped because of it" for each in stopped]
