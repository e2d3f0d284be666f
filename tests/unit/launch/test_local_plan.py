"""Where ranks are placed and what they are told."""

import itertools
from pathlib import Path

import pytest

from reigen.cluster.environ import detect_job
from reigen.cluster.topology import Topology
from reigen.errors import ConfigError
from reigen.launch.local_plan import (
    AvailableCpus,
    JobServices,
    bind_cores,
    detect_cpus,
    plan_ranks,
    single_host_topologies,
)

SERVICES = JobServices("127.0.0.1:4242", b"\xab" * 32, 31999)
CORES = AvailableCpus((0, 4, 1, 5))


def environ_of(rank, num_ranks=2, environ=None, **options):
    return plan_ranks(single_host_topologies(num_ranks), SERVICES, environ or {}, CORES, **options)[0][rank].environ


def test_every_name_of_the_contract():
    assert environ_of(1) == {
        "REIGEN_RANK": "1",
        "REIGEN_SIZE": "2",
        "REIGEN_LOCAL_RANK": "1",
        "REIGEN_LOCAL_SIZE": "2",
        "REIGEN_CROSS_RANK": "0",
        "REIGEN_CROSS_SIZE": "1",
        "REIGEN_RENDEZVOUS": "127.0.0.1:4242",
        "REIGEN_SECRET": "ab" * 32,
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "OMP_NUM_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
    }


TORCHRUN_NAMES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def test_torchruns_variables_are_set_on_request_only():
    asked = environ_of(1, 3, environ={"REIGEN_TORCHRUN_ENV": "1"})
    assert {name: asked[name] for name in TORCHRUN_NAMES} == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "31999",
    }
    for text in ("0", ""):
        assert not TORCHRUN_NAMES & environ_of(1, environ={"REIGEN_TORCHRUN_ENV": text}).keys()


def test_what_the_launcher_says_is_what_init_reads():
    job = detect_job(environ_of(2, 3))
    assert (job.rank, job.size, job.secret) == (2, 3, b"\xab" * 32)


def test_the_users_environment_is_kept_and_a_job_inside_a_job_is_a_new_job():
    environ = environ_of(
        0, environ={"HOME": "/h", "OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": "", "RANK": "3", "REIGEN_RANK": "3"}
    )
    assert (environ["HOME"], environ["OMP_NUM_THREADS"], environ["PYTHONUNBUFFERED"]) == ("/h", "7", "")
    assert environ["REIGEN_RANK"] == "0"
    assert "RANK" not in environ  # that of the job around this one


@pytest.mark.parametrize(
    ("cores", "num_ranks", "threads"),
    [
        (AvailableCpus((0, 1, 2, 3)), 3, "1"),
        (AvailableCpus((0, 1)), 8, "1"),
        (AvailableCpus(tuple(range(64)), quota=8.0), 2, "4"),
        (AvailableCpus(tuple(range(64)), quota=0.5), 2, "1"),
        (AvailableCpus((0, 1, 2, 3), quota=100.0), 1, "4"),
    ],
)
def test_threads_fill_the_processors_and_no_more(cores, num_ranks, threads):
    places, _ = plan_ranks(single_host_topologies(num_ranks), SERVICES, {}, cores)
    assert {place.environ["OMP_NUM_THREADS"] for place in places} == {threads}


def test_the_start_timeout_reaches_init():
    assert environ_of(0, start_timeout_seconds=2.5)["REIGEN_START_TIMEOUT"] == "2.5"
    assert "REIGEN_START_TIMEOUT" not in environ_of(0)


def test_the_secret_is_not_shown():
    shown = repr(plan_ranks(single_host_topologies(2), SERVICES, {}, CORES)) + repr(SERVICES)
    assert "abab" not in shown
    assert "xab" not in shown


def test_ranks_get_neighbouring_processors():
    assert bind_cores(2, (0, 4, 1, 5), None)[0] == [(0, 4), (1, 5)]
    assert bind_cores(3, (0, 1, 2, 3), "cores")[0] == [(0,), (1,), (2, 3)]


def test_every_processor_is_used_once_and_evenly():
    for num_ranks, num_cpus in itertools.product(range(1, 9), range(1, 20)):
        shares, _ = bind_cores(num_ranks, range(num_cpus), None)
        if num_ranks > num_cpus:
            assert shares == [()] * num_ranks
        else:
            assert [cpu for share in shares for cpu in share] == list(range(num_cpus))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_ranks_than_processors_share_them_only_when_asked():
    assert bind_cores(3, (0, 1), None) == (
        [(), (), ()],
        "not bound: 3 ranks on 2 processors are better placed by the kernel",
    )
    assert bind_cores(5, (6, 7), "cores")[0] == [(6,), (7,), (6,), (7,), (6,)]


def test_binding_can_be_turned_off():
    assert bind_cores(2, (0, 1), "none") == ([(), ()], "not bound: --bind none")


def test_what_makes_no_sense():
    with pytest.raises(ConfigError, match="no such binding"):
        bind_cores(1, (0,), "sockets")


def test_a_host_plans_its_own_ranks_and_names_rank_0s_host():
    topologies = [Topology(3, 5, 0, 2, 1, 2), Topology(4, 5, 1, 2, 1, 2)]
    services = JobServices("10.0.0.1:4242", b"\xab" * 32, 31999, "10.0.0.7")
    places, _ = plan_ranks(topologies, services, {"REIGEN_TORCHRUN_ENV": "1"}, CORES)
    assert [place.topology for place in places] == topologies
    assert [place.cpus for place in places] == [(0, 4), (1, 5)]
    environ = places[1].environ
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("10.0.0.7", "31999")
    assert (environ["OMP_NUM_THREADS"], environ["LOCAL_WORLD_SIZE"], environ["HOROVOD_CROSS_RANK"]) == ("2", "2", "1")


def test_threads_of_one_physical_core_stand_side_by_side(tmp_path, monkeypatch):
    for cpu, core in ((0, 0), (1, 1), (2, 0), (3, 1)):
        topology = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text("0\n")
        (topology / "core_id").write_text(f"{core}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 2, 1, 0})
    assert detect_cpus(tmp_path, tmp_path / "proc") == AvailableCpus((0, 2, 1, 3), None)


def in_group(proc: Path, groups: str, mount: str) -> None:
    (proc / "self").mkdir(parents=True, exist_ok=True)
    (proc / "self/cgroup").write_text(f"{groups}\n")
    (proc / "self/mountinfo").write_text(f"{mount}\n")


def test_the_least_quota_of_a_control_group_and_those_above_it_counts(tmp_path):
    top, proc = tmp_path / "cgroup", tmp_path / "proc"
    (top / "a/b").mkdir(parents=True)
    in_group(proc, "0::/a/b", f"30 24 0:26 / {top} rw - cgroup2 cgroup2 rw")
    (top / "a/cpu.max").write_text("150000 100000\n")
    (top / "a/b/cpu.max").write_text("max 100000\n")
    assert detect_cpus(tmp_path, proc).quota == 1.5
    (top / "a/b/cpu.max").write_text("50000 100000\n")
    assert detect_cpus(tmp_path, proc).quota == 0.5
    (top / "a/cpu.max").write_text("max 100000\n")
    (top / "a/b/cpu.max").write_text("max 100000\n")
    assert detect_cpus(tmp_path, proc).quota is None


def test_quotas_of_older_control_groups(tmp_path):
    top, proc = tmp_path / "cpu,cpuacct", tmp_path / "proc"
    (top / "job").mkdir(parents=True)
    in_group(proc, "4:cpu,cpuacct:/job\n1:memory:/", f"35 31 0:32 / {top} rw - cgroup cgroup rw,cpu,cpuacct")
    for group, quota in ((top, -1), (top / "job", 250_000)):
        (group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (group / "cpu.cfs_period_us").write_text("100000\n")
    assert detect_cpus(tmp_path, proc).quota == 2.5
