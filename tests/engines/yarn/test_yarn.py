"""Jobs by `reigen launch --launcher yarn` on a stand-in cluster that speaks Hadoop's RPC, with Hadoop's own client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import zipfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.network.waiting import wait_for

SECONDS = 60.0
SOURCE = Path(__file__).parents[3] / "src"


class Client:
    """A running `reigen launch --launcher yarn`, with what it has printed so far."""

    def __init__(self, cluster, directory: Path, options: list[str], program: str, **environ: str) -> None:
        (directory / "train.py").write_text(program)
        self.cluster, self.directory = cluster, directory
        before = set(cluster.applications)
        conf = cluster.write_configuration(directory / "conf")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "reigen", "launch", "--launcher", "yarn", *options, sys.executable, "train.py"],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "HADOOP_CONF_DIR": str(conf), **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._before = before

    def _read(self) -> None:
        for line in self.process.stdout:
            self.output += line

    @property
    def application(self):
        [name] = set(self.cluster.applications) - self._before
        return self.cluster.applications[name]

    def printed(self, text: str, count: int = 1) -> None:
        """Wait until ``text`` was printed so often."""
        wait_for(lambda: self.output.count(text) >= count or self.process.poll() is not None, repr(text), SECONDS)
        assert self.output.count(text) >= count, self.output

    def container_of(self, rank: int):
        """The container in which a rank runs, by what it has printed."""
        self.printed(f"rank {rank} in container_")
        name = re.search(rf"rank {rank} in (container_\w+)", self.output)[1]
        return self.application.containers[name]

    def end(self) -> int:
        """Wait for the end; whatever the end was, nothing is left."""
        try:
            code = self.process.wait(SECONDS)
        finally:
            self.close()
        wait_for(lambda: self.application.is_over, "the end of the application")
        wait_for(lambda: not self.cluster.running, "the end of all containers")
        wait_for(lambda: not self.left(), "the end of all processes in containers")
        assert not list(self.directory.glob("staged/*"))
        return code

    def left(self) -> list[int]:
        """Processes of the application's containers."""
        mark = f"CONTAINER_ID=container_1700000000000_{self.application.number:04d}_".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes() and (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(SECONDS)
        self.process.stdout.close()


@pytest.fixture
def launch(cluster, tmp_path):
    clients = []

    def start(options: str, program: str, **environ: str) -> Client:
        words = [*options.split(), "--hdfs-tempdir", f"file://{tmp_path}/staged", "--worker-memory", "256m"]
        clients.append(Client(cluster, tmp_path, [*words, "--server-memory", "256m"], program, **environ))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


TRAIN = """
import os
import numpy as np
import reigen.kv
import reigen.numpy_ops as ops
store = reigen.kv.create("dist_sync")
ops.init()
store.init(3, np.zeros(4))
store.push(3, np.ones(4))
out = np.zeros(4)
store.pull(3, out=out)
total = ops.allreduce(np.full(3, ops.rank() + 1.0), op=ops.Sum)
print("rank", ops.rank(), "of", ops.size(), out.tolist(), total.tolist(), open("data.txt").read(), flush=True)
print("things", sorted(os.listdir("things")), "greeting", repr(os.environ["GREETING"]), flush=True)
print("rank", ops.rank(), "in", os.environ["CONTAINER_ID"], flush=True)
"""
#: Ranks that wait to be ended.
WAIT = """
import os, signal, time
print("rank", os.environ["REIGEN_RANK"], "in", os.environ["CONTAINER_ID"], flush=True)
if os.environ.get("DMLC_ROLE") == "worker" and os.environ["REIGEN_RANK"] == os.environ.get("BAD_RANK"):
    eval(os.environ["BAD_DEED"])
signal.pause()
"""
WAIT_ROLE = WAIT.replace(
    "import os,",
    'import os\nif os.environ["DMLC_ROLE"] != "worker": import reigen.kv; reigen.kv.create("dist_sync")\nimport',
    1,
)


def test_a_job_with_servers_files_and_variables(cluster, launch, tmp_path):
    (tmp_path / "data.txt").write_text("the data")
    with zipfile.ZipFile(tmp_path / "things.zip", "w") as archive:
        archive.writestr("one.txt", "1")
    greeting = 'it\'s "5 $HOME" = `x`\nü'
    options = "-n 3 -s 2 --files data.txt --archives things.zip#things --jobname night"
    job = launch(options, TRAIN, GREETING=greeting, MY_PASSWORD="not-for-anybody")
    assert job.end() == 0, job.output
    for rank in range(3):
        assert f"rank {rank} of 3 [3.0, 3.0, 3.0, 3.0] [6.0, 6.0, 6.0] the data" in job.output
    assert job.output.count(f"things ['one.txt'] greeting {greeting!r}") == 3
    application = job.application
    assert (application.final, application.diagnostics) == ("SUCCEEDED", "exit code 0 of reigen launch")
    assert application.context.getApplicationName() == "night"
    # a master, three workers, two servers, each in a container of its own
    assert len(application.containers) == 6
    assert len({job.container_of(rank).number for rank in range(3)}) == 3
    # what YARN records of them: no password, no ticket
    records = " ".join(cluster.records)
    assert "not-for-anybody" not in records
    assert "ticket" not in records
    assert not re.search(r"[0-9a-f]{64}", records)
    # the log that YARN keeps has the output, too
    logs = cluster.directory / "logs" / application.id.toString() / application.master.id.toString()
    log = (logs / "stdout").read_text()
    assert "rank 2 of 3" in log


def test_one_container_on_each_node(launch):
    job = launch("-n 20 -s 1 --containers-by-host", WAIT_ROLE, BAD_RANK="", BAD_DEED="")
    job.printed(" in container_", 20)
    try:
        numbers = [job.container_of(rank).number for rank in range(20)]
        # two nodes have 8 - 1 cores for them, and the third (2560 - 1024) / 256 MB
        assert sorted(numbers.count(number) for number in set(numbers)) == [6, 7, 7]
        assert numbers == sorted(numbers, key=numbers.index)
        assert len(job.application.containers) == 5
    finally:
        job.process.send_signal(signal.SIGINT)
    assert job.end() == 130


@pytest.mark.parametrize(
    ("deed", "code", "words"),
    [("os._exit(7)", 7, "exit code 7"), ("os.kill(os.getpid(), 9)", 137, "SIGKILL")],
)
def test_a_rank_that_fails_is_named(launch, deed, code, words):
    job = launch("-n 2 -s 1", WAIT_ROLE, BAD_RANK="1", BAD_DEED=deed)
    assert job.end() == code, job.output
    name = f"{job.container_of(1).node.host}/{job.container_of(1).id.toString()[-6:]}"
    assert re.search(rf"rank 1 \(host {re.escape(name)}\) failed first: .*{words}", job.output), job.output
    assert job.application.final == "FAILED"
    assert job.application.diagnostics.startswith(f"exit code {code} of reigen launch: rank 1 ")


def test_a_container_that_yarn_ends_is_explained(cluster, launch):
    job = launch("-n 2 -s 1", WAIT_ROLE, BAD_RANK="", BAD_DEED="")
    job.printed(" in container_", 2)
    said = "Container is running beyond physical memory limits. Current usage: 300 MB of 256 MB physical memory used"
    cluster.end_container(job.container_of(1), -104, said)
    assert job.end() != 0
    assert "YARN has killed it: it used more memory than it has" in job.output, job.output
    assert said in job.output
    assert re.search(r"host [\d.]+/\d{6} (was sent SIGTERM by YARN|was lost)", job.output), job.output


def test_ctrl_c_ends_everything(launch):
    job = launch("-n 2 -s 1", WAIT_ROLE, BAD_RANK="", BAD_DEED="")
    job.printed(" in container_", 2)
    job.process.send_signal(signal.SIGINT)
    assert job.end() == 130
    assert "SIGINT: YARN application" in job.output
    assert job.application.final == "KILLED"


def test_killed_by_yarn(cluster, launch):
    job = launch("-n 2 -s 1", WAIT_ROLE, BAD_RANK="", BAD_DEED="")
    job.printed(" in container_", 2)
    cluster.kill_application(job.application)
    assert job.end() == 143
    assert "it was killed (Application killed by user.)" in job.output, job.output


def test_the_master_is_killed(launch):
    job = launch("-n 2 -s 1", WAIT_ROLE, BAD_RANK="", BAD_DEED="")
    job.printed(" in container_", 2)
    os.kill(job.application.master.process.pid, signal.SIGKILL)
    assert job.end() == 137
    assert "its master has ended: it was killed (SIGKILL)" in job.output, job.output


def test_the_resource_manager_goes_away_and_comes_back(cluster, launch, tmp_path):
    program = WAIT_ROLE.replace(
        "signal.pause()", f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.05)"
    )
    job = launch("-n 2 -s 1", program, BAD_RANK="", BAD_DEED="")
    job.printed(" in container_", 2)
    cluster.stop_resource_manager()
    try:
        (tmp_path / "go").touch()
        # YARN cannot be asked how it has ended; the master has said it
        assert job.process.wait(SECONDS) == 0, job.output
    finally:
        cluster.start_resource_manager()
        cluster.kill_application(job.application)
    wait_for(lambda: not job.left(), "the end of all processes in containers")


def test_too_much_memory_is_said_before_anything_is_submitted(cluster, launch):
    job = launch("-n 2 -s 1 --worker-cores 99", WAIT, BAD_RANK="", BAD_DEED="")
    assert job.process.wait(SECONDS) == 1
    job.close()
    assert "nothing was submitted: a worker needs 256 MB and 99 cores; the ResourceManager gives" in job.output
    assert job.application.context is None


def test_what_would_be_submitted(tmp_path):
    (tmp_path / "train.py").touch()
    command = [sys.executable, "-m", "reigen", "launch", "--launcher", "yarn", "--print", "-n", "8", "-s", "2"]
    command += ["--worker-memory", "4g", "--worker-cores", "2", "--queue", "night", "python", "train.py"]
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "HADOOP_CONF_DIR": str(tmp_path)}
    shown = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True).stdout
    assert "application 'train.py' in queue night" in shown
    assert "8 workers of 4096 MB and 2 cores: python train.py" in shown
    assert f"file train.py: {tmp_path / 'train.py'}" in shown


SPARK = """
from pyspark.sql import SparkSession
session = SparkSession.builder.getOrCreate()
print("the sum is", session.sparkContext.parallelize(range(100), 4).sum())
session.stop()
"""


def test_spark_submits_to_the_same_cluster(cluster, tmp_path):
    """Spark's own client, master and executors take the stand-in for a cluster: it is not made for ours alone."""
    (tmp_path / "sum.py").write_text(SPARK)
    jars = Path(find_spec("pyspark").submodule_search_locations[0])
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.yarn.stagingDir": f"file://{tmp_path}/staged",
        "spark.yarn.jars": f"local:{jars}/jars/*",
        "spark.ui.enabled": "false",
        "spark.executor.instances": "2",
        "spark.executor.memory": "512m",
        "spark.executorEnv.SPARK_LOCAL_IP": "127.0.0.1",
    }
    command = [str(jars / "bin" / "spark-submit"), "--master", "yarn", "--deploy-mode", "client"]
    command += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    environ = {**os.environ, "HADOOP_CONF_DIR": str(cluster.write_configuration(tmp_path / "conf"))}
    environ |= {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    before = set(cluster.applications)
    done = subprocess.run(
        [*command, str(tmp_path / "sum.py")], env=environ, capture_output=True, text=True, timeout=150, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["the sum is 4950"]), done.stderr
    [name] = set(cluster.applications) - before
    application = cluster.applications[name]
    wait_for(lambda: application.is_over, "the end of the application")
    assert (application.final, len(application.containers)) == ("SUCCEEDED", 3)
