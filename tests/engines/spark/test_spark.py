"""`reigen.spark` in a real Spark cluster: a standalone master and two workers, which are stand-in machines."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.elastic.engine_training import Training
from tests.engines.spark.cluster import Driver, SparkCluster, why_no_spark
from tests.lab import Host, Hosts, Unavailable
from tests.network.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
#: Seconds in which a failure of a rank is the driver's exception; the figure is 2 where no other process runs.
SOON_SECONDS = 8.0
SCRIPT = """
import sys
import numpy as np
import reigen
reigen.init()
total = reigen.allreduce(np.ones(2), op=reigen.Sum)
with open(f"/tmp/script.{reigen.rank()}", "w") as file:
    file.write(f"{sys.argv[1:]} {reigen.rank()} {reigen.size()} {total[0]} {__name__}")
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that all machines have."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def cluster(shared: Path) -> Iterator[SparkCluster]:
    if reason := why_no_spark():
        pytest.skip(reason)
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(2, shared=[shared]))
        except Unavailable as error:
            pytest.skip(str(error))
        yield SparkCluster(hosts)


@pytest.fixture(scope="module")
def driver(cluster: SparkCluster) -> Iterator[Driver]:
    with cluster.driver() as driver:
        assert driver.ask("plain", tasks=4, timeout=120)[0] == ["h1", "h1", "h2", "h2"]
        yield driver


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: SparkCluster) -> Iterator[None]:
    yield
    wait_for(lambda: not cluster.jobs(), "nothing of a job runs on the machines")


def test_results_output_and_environment_by_rank(driver: Driver) -> None:
    found = driver.ask("results", tasks=4)
    hosts = [host for host, *_ in found["results"]]
    assert sorted(hosts) == ["h1", "h1", "h2", "h2"]
    assert hosts[0] == hosts[1]
    assert [place for _, place, *_ in found["results"]] == [[0, 0, 2, 0], [1, 1, 2, 0], [2, 0, 2, 1], [3, 1, 2, 1]]
    assert {(total, product) for _, _, total, product, *_ in found["results"]} == {(10.0, 21)}
    for rank, (*_, seen, has_secret, directory) in enumerate(found["results"]):
        assert seen["OF_ALL"] == "x y"
        assert seen["OF_DRIVER"] is None, "the driver's variables stay with it"
        assert seen["RANK"] is None, f"torchrun's variables, in rank {rank}"
        assert not has_secret
        assert directory.startswith("/tmp/work/"), "the executor's directory"
    assert sorted(found["output"].splitlines()) == sorted(f"[{rank}] from {host}" for rank, host in enumerate(hosts))
    assert ["spark.authenticate" in text for text in found["warned"]] == [True]
    assert driver.ask("results", tasks=4)["warned"] == [], "once for an application"


def test_parameter_servers_and_a_timeline(driver: Driver, shared: Path) -> None:
    timeline = shared / "timeline.json"
    assert driver.ask("servers", tasks=4, timeline=str(timeline)) == [[rank, 4, 10.0, "2"] for rank in range(4)]
    assert "seen" in timeline.read_text()


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise", 1, "raised ValueError: ('oops', "),
        ("exit", 7, "exited with code 7"),
        ("kill", 137, "was killed by SIGKILL"),
    ],
)
def test_a_rank_that_fails_is_the_drivers_exception(driver: Driver, how: str, code: int, words: str) -> None:
    found = driver.ask("fail", how=how, tasks=4)
    assert (found["rank"], found["code"]) == (1, code), found
    assert words in found["text"]
    assert found["host"] in {"h1", "h2"}
    assert "(Spark executor " in found["text"].splitlines()[0]
    assert found["cause"].startswith("ValueError('oops', 'h" if how == "raise" else "None")
    assert found["seconds"] < SOON_SECONDS


def test_an_agent_that_is_killed_takes_its_ranks_along(driver: Driver) -> None:
    found = driver.ask("fail", how="kill the agent", tasks=4)
    assert found["rank"] in {0, 1}, found
    assert "the agent of task" in found["text"], "Spark says why"


@pytest.mark.parametrize(("how", "words"), [("job group", "cancelled"), ("interrupt", "")])
def test_a_job_that_is_cancelled(driver: Driver, how: str, words: str) -> None:
    found = driver.ask("interrupted", how=how, tasks=4)
    assert found["kind"] == ("LaunchError" if words else "KeyboardInterrupt"), found
    assert words in found["text"]
    assert found["seconds"] < SOON_SECONDS


@pytest.mark.timeout(3000)
def test_ends_in_a_row(driver: Driver, cluster: SparkCluster) -> None:
    """REIGEN_TEST_ENDS=100: as many as were looked at by hand."""
    ends = ("raise", "kill", "job group", "kill the agent", "interrupt", "exit", "")
    for number in range(int(os.environ.get("REIGEN_TEST_ENDS", "3"))):
        how = ends[number % len(ends)]
        if not how:
            driver.ask("repeat", times=1, tasks=4)
        elif how in {"job group", "interrupt"}:
            assert driver.ask("interrupted", how=how, tasks=4)["kind"] in {"LaunchError", "KeyboardInterrupt"}
        else:
            assert driver.ask("fail", how=how, tasks=4)["rank"] in {0, 1}
        wait_for(lambda: not cluster.jobs(), f"nothing is left of end {number}, {how or 'in good order'}", 10.0)
    assert driver.ask("leftovers") == {"jobs": 0, "threads": []}


def test_too_few_slots(driver: Driver) -> None:
    kind, text = driver.ask("refused", call="reigen.spark.run(len, num_proc=9, start_timeout=1.5)")
    assert (kind, text.split(" for ")[0]) == ("TimeoutError", "Spark has 4 of 9 slots")
    kind, text = driver.ask("held", tasks=4)
    assert (kind, text.split(" for ")[0]) == ("TimeoutError", "Spark has 0 of 2 slots")


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        ("reigen.spark.run(len, num_proc=0)", "ConfigError", "num_proc must be"),
        ("reigen.spark.run(len, num_proc=2, start_timeout=-1)", "ConfigError", "start_timeout must be"),
        ("reigen.spark.run(len, num_proc=2, use_mpi=True)", "ConfigError", "use_mpi"),
        ("reigen.spark.run_elastic(len, num_proc=2, min_num_proc=3, max_num_proc=1)", "ConfigError", "more than"),
        (
            "reigen.spark.run_elastic(len, min_num_proc=5, max_num_proc=6, start_timeout=2)",
            "TimeoutError",
            " of 5 slots",
        ),
        (
            "reigen.spark.run(len, (__import__('threading').Lock(),), num_proc=2)",
            "UnsupportedTypeError",
            "cannot be sent",
        ),
        ("reigen.spark.Distributor(0)", "ConfigError", "positive"),
        ("reigen.spark.Distributor(2, local_mode=False)", "RuntimeError", "gpu usage is unavailable"),
        ("reigen.spark.Distributor(2, False, False).run('x.py', a=1)", "ConfigError", "no keyword arguments"),
    ],
)
def test_calls_that_cannot_be_done(driver: Driver, call: str, kind: str, words: str) -> None:
    found, text = driver.ask("refused", call=call)
    assert found == kind, text
    assert words in text


def test_one_run_after_the_other(driver: Driver) -> None:
    assert len(driver.ask("repeat", times=3, tasks=4)) == 3
    kind, value = driver.ask("refused", call="reigen.spark.run_elastic(int, num_proc=1, min_num_proc=1)")
    assert (kind, value) == ("", "[0]")


def test_horovods_names(driver: Driver) -> None:
    found, output = driver.ask("horovod_names", tasks=2, timeout=150.0)
    assert found == [[0, 2.0, []], [1, 2.0, []]]
    lines = [line.split(", local_rank")[0] for line in sorted(output.splitlines())]
    assert lines == ["[0] Hello, rank = 0", "[1] Hello, rank = 1"]


def test_an_estimator_of_spark_ml(driver: Driver, shared: Path) -> None:
    epochs, rows, error = driver.ask("train_estimator", tasks=4, directory=str(shared / "store"), timeout=170)
    assert (epochs, rows) == (15, 101)
    assert error < 0.1
    assert [each.name for each in (shared / "store").iterdir()] == ["runs"], "the rows' files are gone"


def test_functions_and_scripts_in_the_distributor(driver: Driver, cluster: SparkCluster) -> None:
    assert driver.ask("distributor", what="function", tasks=4, path="") == [10, [5, 10, 15, 20]]
    result, variables = driver.ask("distributor", what="local", tasks=2, path="")
    assert (result, variables) == (10, [[str(rank), "2", str(rank), "127.0.0.1", "True"] for rank in range(2)])
    variables = driver.ask("distributor", what="torch", tasks=4, path="")
    assert [each[:3] for each in variables] == [[str(rank), "4", str(rank % 2)] for rank in range(4)]
    assert {each[3] for each in variables} <= {host.address for host in cluster.hosts} | {"h1", "h2"}
    with script_on(cluster) as written:
        assert driver.ask("distributor", what="script", tasks=4, path="/tmp/script.py") is None
        assert written() == [f"['a b', '7'] {rank} 4 4.0 __main__" for rank in range(4)]


def test_scripts_in_torch_distributor(driver: Driver, cluster: SparkCluster) -> None:
    with script_on(cluster) as written:
        driver.ask("distributor", what="theirs", tasks=2, path="/tmp/script.py", timeout=150.0)
        assert written() == [f"['a b', '7'] {rank} 2 2.0 __main__" for rank in range(2)]


@contextmanager
def script_on(cluster: SparkCluster) -> Iterator[Callable[[], list[str]]]:
    """A script on all machines; what its ranks have written, sorted."""
    directories = [host.root / "tmp" for host in cluster.hosts]
    for directory in directories:
        (directory / "script.py").write_text(SCRIPT)

    def files() -> list[Path]:
        return [file for directory in directories for file in directory.glob("script.[0-9]")]

    yield lambda: sorted(file.read_text() for file in files())
    for file in files():
        file.unlink()


def test_an_elastic_job_goes_on_when_ranks_and_executors_die(
    driver: Driver, cluster: SparkCluster, shared: Path
) -> None:
    directory = shared / "elastic"
    directory.mkdir()
    training = Training(directory)
    driver.tell("elastic", least=2, most=5, directory=str(directory))
    try:
        first = training.wait_for_size(4, 90)
        host, rank = rank_of(cluster, first[3].slot)
        assert host.name == first[3].host
        os.kill(rank, signal.SIGKILL)
        second = training.wait_for_size(
            4, 90, is_so=lambda steps: first[3].process not in {each.process for each in steps}
        )
        assert [each.process for each in second[:3]] == [each.process for each in first[:3]]
        lost = next(host for host in cluster.hosts if host.name != second[0].host)
        cluster.kill_executor(lost)
        third = training.wait_for_size(2)
        assert [each.process for each in third] == [each.process for each in second if each.host != lost.name]
        fourth = training.wait_for_size(4, 120)  # Spark runs the tasks again, in another executor
        assert [each.process for each in fourth[:2]] == [each.process for each in third]
    except BaseException:
        print(driver.describe())
        raise
    training.end()
    found = driver.answer()
    assert [result[:2] for result in found["results"]] == [[rank, 4] for rank in range(4)], found
    assert len({tuple(result[2:]) for result in found["results"]}) == 1
    training.check()


def rank_of(cluster: SparkCluster, slot: int) -> tuple[Host, int]:
    """The machine and the process of a place of an elastic job."""
    found = [
        (host, pid)
        for host in cluster.hosts
        for pid, command in host.processes().items()
        if "reigen.runner.task" in command
        and f"REIGEN_SLOT={slot}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    assert len(found) == 1, found
    return found[0]


def test_an_executor_that_is_killed(driver: Driver, cluster: SparkCluster, tmp_path: Path) -> None:
    driver.tell("interrupted", how="/tmp/running", tasks=4)
    running = cluster.hosts[0].root / "tmp/running"
    wait_for(running.exists, "the ranks run")
    started = time.monotonic()
    cluster.kill_executor(cluster.hosts[1])
    found = driver.answer()
    assert time.monotonic() - started < SOON_SECONDS
    assert found["host"] == "h2", found
    assert "ExecutorLostFailure" in found["text"] or "Spark executor" in found["text"]
    running.unlink()
    wait_for(lambda: driver.ask("plain", tasks=4)[0] == ["h1", "h1", "h2", "h2"], "Spark has another executor")
    assert driver.ask("repeat", times=1, tasks=4)


def test_a_driver_that_is_killed(driver: Driver, cluster: SparkCluster) -> None:
    driver.tell("interrupted", how="/tmp/running-2", tasks=4)
    wait_for((cluster.hosts[0].root / "tmp/running-2").exists, "the ranks run")
    assert cluster.jobs()
    driver.process.kill()
    wait_for(lambda: not cluster.jobs(), "nothing of the job runs")
