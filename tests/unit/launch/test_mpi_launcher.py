"""Two mpiruns and a scheduler: who starts what, where, and what they are told."""

import contextlib

import pytest

from reigen.launch.hosts import HostInfo
from reigen.launch.metrics.options import MetricsOptions
from reigen.launch.mpi import launcher
from reigen.launch.mpi.launcher import plan_mpirun_calls
from reigen.launch.mpi.mpirun import Mpirun, MpirunContext, MpirunFamily, exported_names, mpirun_command, mpirun_environ
from reigen.launch.options import LaunchOptions
from reigen.launch.ps_processes import PsRole, ServerOptions
from reigen.launch.ssh.command import SshOptions

SECRET = b"\xab" * 32
COMMAND = ("python", "train.py")
NUMBERED = 'sh -c export DMLC_TASK_ID="${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"; exec "$@" sh '


def planned(options, environ=None, here=("h1",)):
    return plan_mpirun_calls(
        options, environ or {}, ("10.0.0.1", 9091), SECRET, lambda name: name in {*here, "localhost"}
    )


def line(call):
    there = MpirunContext(is_root=False, num_cores=8, has_remote_hosts=False, variables=())
    return " ".join(mpirun_command(Mpirun("mpirun", MpirunFamily.OPEN_MPI_5, ""), call.options, there))


@pytest.mark.parametrize("is_wanted", [False, True])
def test_ranks_elsewhere_are_told_where_to_report_their_metrics_and_no_token(monkeypatch, tmp_path, is_wanted):
    monkeypatch.setattr(launcher, "find_mpirun", lambda environ: Mpirun("/x/mpirun", MpirunFamily.OPEN_MPI_5, ""))

    def choose(*_):
        assert is_wanted, "nobody calls this host: mpirun may know hosts that have no address here"
        return "10.0.0.1", "the way there"

    monkeypatch.setattr(launcher, "choose_own_address", choose)
    metrics = MetricsOptions(file=tmp_path / "m.jsonl" if is_wanted else None)
    options = LaunchOptions(COMMAND, 2, hosts=(HostInfo("h9.invalid", 2),), metrics=metrics)
    environ = {"REIGEN_METRICS_TOKEN": "x", "REIGEN_METRICS_SERVICE": "another:1", "SEED": "5"}
    with contextlib.closing(launcher.MpiLauncher(options, environ)) as mpi:
        plan = mpi.allocate(lambda seconds: None)
    assert plan.report_address == ("10.0.0.1" if is_wanted else "127.0.0.1")
    (spec,) = plan.processes
    command = list(spec.command)
    names = {command[place + 1] for place, word in enumerate(command) if word == "-x"}
    assert "SEED" in names
    reports = {"REIGEN_METRICS_SECONDS", "REIGEN_METRICS_SERVICE", "REIGEN_METRICS_SECRET"}
    assert {name for name in names if name.startswith("REIGEN_METRICS")} == (reports if is_wanted else set())
    assert not {"REIGEN_METRICS_TOKEN", "REIGEN_METRICS_SERVICE"} & set(spec.environ)


def test_on_this_host():
    (workers, servers), place = planned(LaunchOptions(COMMAND, 2, servers=ServerOptions(3, command=COMMAND)))
    assert line(workers) == (
        f"mpirun -np 2 -H localhost:2 --bind-to none --map-by slot --tag-output {NUMBERED}python train.py"
    )
    assert line(servers) == (
        f"mpirun -np 3 -H localhost:3 --bind-to none --map-by slot --tag-output {NUMBERED}python train.py"
    )
    assert (place.command, place.ps_process.role) == (COMMAND, PsRole.SCHEDULER)


def test_servers_first_then_workers_in_turn():
    servers = ServerOptions(2, command=COMMAND, round_robin_workers=True)
    hosts = (HostInfo("h1", 1), HostInfo("h2", 1), HostInfo("h3", 1))
    (workers, others), _ = planned(LaunchOptions(COMMAND, 3, hosts=hosts, servers=servers))
    assert workers.options.hosts == (HostInfo("h3", 1), HostInfo("h1", 1), HostInfo("h2", 1))
    assert others.options.hosts == (HostInfo("h1", 1), HostInfo("h2", 1))
    assert (workers.options.num_ranks, others.options.num_ranks) == (3, 2)


def test_reigens_own_servers_are_those_of_the_python_there():
    options = LaunchOptions(
        COMMAND, 1, hosts=(HostInfo("h2", 1),), servers=ServerOptions(1), ssh=SshOptions(python="/opt/python")
    )
    (_, servers), scheduler = planned(options)
    assert servers.options.command[-5:] == ("/opt/python", "-P", "-m", "reigen", "server")
    assert scheduler.command[1:] == ("-P", "-m", "reigen", "scheduler")


def test_what_everybody_is_told():
    servers = ServerOptions(1, environ={"A": "1"}, worker_environ={"B": "2"})
    (workers, others), place = planned(LaunchOptions(COMMAND, 2, servers=servers), {"SEED": "7", "REIGEN_RANK": "3"})
    for role, environ in (("worker", workers.environ), ("server", others.environ), ("scheduler", place.environ)):
        told = [environ[name] for name in ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER")]
        assert told == [role, "10.0.0.1", "9091", "2"]
        assert (environ["REIGEN_SECRET"], environ["SEED"]) == (SECRET.hex(), "7")
        assert "REIGEN_RANK" not in environ
        assert (environ.get("A"), environ.get("B")) == {"worker": (None, "2"), "server": ("1", None)}.get(
            role, (None, None)
        )


def test_a_host_finds_its_own_address_where_there_are_several():
    hosts = (HostInfo("h1", 1), HostInfo("h2", 1))
    (workers, _), _ = planned(LaunchOptions(COMMAND, 2, hosts=hosts, servers=ServerOptions(1)))
    assert "DMLC_NODE_HOST" not in workers.environ
    (workers, _), _ = planned(LaunchOptions(COMMAND, 2, servers=ServerOptions(1)))
    assert workers.environ["DMLC_NODE_HOST"] == "10.0.0.1"


def test_everything_travels_by_name_and_the_secret_is_on_no_command_line():
    hosts = (HostInfo("h1", 1), HostInfo("h2", 1))
    options = LaunchOptions(COMMAND, 2, hosts=hosts, servers=ServerOptions(1))
    (workers, _), _ = planned(options)
    environ = mpirun_environ(MpirunFamily.OPEN_MPI_5, options, workers.environ, is_terminal=False, num_cores=2)
    names = exported_names({**environ, "REIGEN_SECRET": SECRET.hex()}, ())
    assert {"DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_NUM_SERVER", "REIGEN_SECRET"} <= set(names)
    there = MpirunContext(is_root=False, num_cores=8, has_remote_hosts=True, variables=names)
    words = mpirun_command(Mpirun("/usr/bin/mpirun", MpirunFamily.OPEN_MPI_5, ""), workers.options, there)
    assert words[words.index("REIGEN_SECRET") - 1] == "-x"
    assert not [word for word in words if SECRET.hex() in word]
    assert SECRET.hex() not in repr(workers)
