"""Where ranks are placed and what they are told."""

import itertools

import pytest

from reigen.cluster.environ import detect
from reigen.cluster.topology import Topology
from reigen.errors import ConfigError
from reigen.launch.local import Cores, Services, all_here, cores_here, plan, share_cores

SERVICES = Services("127.0.0.1:4242", b"\xab" * 32, 31999)
CORES = Cores((0, 4, 1, 5))


def environ_of(rank, num_ranks=2, environ=None, **options):
    return plan(all_here(num_ranks), SERVICES, environ or {}, CORES, **options)[0][rank].environ


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
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "31999",
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "2",
        "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "2",
        "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1",
        "OMP_NUM_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
    }


def test_what_the_launcher_says_is_what_init_reads():
    job = detect(environ_of(2, 3))
    assert (job.rank, job.size, job.secret) == (2, 3, b"\xab" * 32)


def test_the_users_environment_is_kept_and_a_job_inside_a_job_is_a_new_job():
    environ = environ_of(0, environ={"HOME": "/h", "OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": "", "RANK": "3"})
    assert (environ["HOME"], environ["OMP_NUM_THREADS"], environ["PYTHONUNBUFFERED"]) == ("/h", "7", "")
    assert environ["RANK"] == "0"


@pytest.mark.parametrize(
    ("cores", "num_ranks", "threads"),
    [
        (Cores((0, 1, 2, 3)), 3, "1"),
        (Cores((0, 1)), 8, "1"),
        (Cores(tuple(range(64)), quota=8.0), 2, "4"),
        (Cores(tuple(range(64)), quota=0.5), 2, "1"),
        (Cores((0, 1, 2, 3), quota=100.0), 1, "4"),
    ],
)
def test_threads_fill_the_processors_and_no_more(cores, num_ranks, threads):
    places, _ = plan(all_here(num_ranks), SERVICES, {}, cores)
    assert {place.environ["OMP_NUM_THREADS"] for place in places} == {threads}


def test_the_start_timeout_reaches_init():
    assert environ_of(0, start_timeout_seconds=2.5)["REIGEN_START_TIMEOUT"] == "2.5"
    assert "REIGEN_START_TIMEOUT" not in environ_of(0)


def test_the_secret_is_not_shown():
    shown = repr(plan(all_here(2), SERVICES, {}, CORES)) + repr(SERVICES)
    assert "abab" not in shown
    assert "xab" not in shown


def test_ranks_get_neighbouring_processors():
    assert share_cores(2, (0, 4, 1, 5), None)[0] == [(0, 4), (1, 5)]
    assert share_cores(3, (0, 1, 2, 3), "cores")[0] == [(0,), (1,), (2, 3)]


def test_every_processor_is_used_once_and_evenly():
    for num_ranks, num_cpus in itertools.product(range(1, 9), range(1, 20)):
        shares, _ = share_cores(num_ranks, range(num_cpus), None)
        if num_ranks > num_cpus:
            assert shares == [()] * num_ranks
        else:
            assert [cpu for share in shares for cpu in share] == list(range(num_cpus))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_ranks_than_processors_share_them_only_when_asked():
    assert share_cores(3, (0, 1), None) == (
        [(), (), ()],
        "not bound: 3 ranks on 2 processors are better placed by the kernel",
    )
    assert share_cores(5, (6, 7), "cores")[0] == [(6,), (7,), (6,), (7,), (6,)]


def test_binding_can_be_turned_off():
    assert share_cores(2, (0, 1), "none") == ([(), ()], "not bound: --bind none")


def test_what_makes_no_sense():
    with pytest.raises(ConfigError, match="no such binding"):
        share_cores(1, (0,), "sockets")


def test_a_host_plans_its_own_ranks_and_names_rank_0s_host():
    topologies = [Topology(3, 5, 0, 2, 1, 2), Topology(4, 5, 1, 2, 1, 2)]
    services = Services("10.0.0.1:4242", b"\xab" * 32, 31999, "10.0.0.7")
    places, _ = plan(topologies, services, {}, CORES)
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
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    (tmp_path / "fs/cgroup/cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 2, 1, 0})
    assert cores_here(tmp_path) == Cores((0, 2, 1, 3), 1.5)
    (tmp_path / "fs/cgroup/cpu.max").write_text("max 100000\n")
    assert cores_here(tmp_path).quota is None
