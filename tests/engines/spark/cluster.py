"""A real Spark cluster on stand-in machines: a standalone master and a driver on the first, a worker on each."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from reigen.compat import DIRECTORY
from tests.lab import Host, HostProcess, Hosts

SOURCE = Path(__file__).parents[3]
_MASTER_PORT = 7077
#: What Spark's own scripts give to Java 17.
_OPENED = (
    "lang",
    "lang.invoke",
    "lang.reflect",
    "io",
    "net",
    "nio",
    "util",
    "util.concurrent",
    "util.concurrent.atomic",
)
_JAVA_OPTIONS = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    *(f"--add-opens=java.base/java.{name}=ALL-UNNAMED" for name in _OPENED),
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.cs=ALL-UNNAMED",
    "--add-opens=java.base/sun.security.action=ALL-UNNAMED",
    "--add-opens=java.base/sun.util.calendar=ALL-UNNAMED",
)
#: Quick to start rather than quick: these JVMs do little.
_QUICK = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx300m")


def why_no_spark() -> str:
    """Why there can be no cluster here; empty if there can."""
    if find_spec("pyspark") is None:
        return "pyspark is not installed here (pip install 'reigen[spark]')"
    return "" if shutil.which("java") else "there is no java (openjdk-17-jre-headless of Debian)"


class SparkCluster:
    """The cluster; it ends with the machines.

    Args:
        hosts: of its workers.
        cores: of each worker.
    """

    def __init__(self, hosts: Hosts, cores: int = 2) -> None:
        self.hosts, self.cores = hosts, cores
        self.master = f"spark://{hosts[0].address}:{_MASTER_PORT}"
        spec = find_spec("pyspark")
        assert spec is not None, "why_no_spark() is asked first"
        assert spec.origin is not None, "it is a package"
        self._home = Path(spec.origin).parent
        options = ("--host", hosts[0].address, "--port", str(_MASTER_PORT), "--webui-port", "0")
        self._daemons = [self._daemon(hosts[0], "org.apache.spark.deploy.master.Master", *options)]
        hosts[0].wait_until_listening(_MASTER_PORT)
        self._daemons += [self.start_worker(host) for host in hosts]

    def start_worker(self, host: Host) -> HostProcess:
        """Starts a worker on a machine."""
        options = ("--host", host.address, "--webui-port", "0", "--cores", str(self.cores), "--memory", "2g")
        return self._daemon(host, "org.apache.spark.deploy.worker.Worker", *options, "-d", "/tmp/work", self.master)

    @contextmanager
    def driver(self, **conf: str) -> Iterator[Driver]:
        """A driver on the first machine, which has this configuration, too: ``a__b="c"`` for a.b."""
        address = self.hosts[0].address
        settings = {
            "spark.master": self.master,
            "spark.driver.host": address,
            "spark.driver.bindAddress": address,
            "spark.driver.memory": "600m",
            "spark.executor.memory": "600m",
            "spark.driver.extraJavaOptions": " ".join(_QUICK[:2]),
            "spark.executor.extraJavaOptions": " ".join(_QUICK[:2]),
            # for ranks that others start, pyspark's TorchDistributor for example
            "spark.executorEnv.REIGEN_SECRET": secrets.token_hex(32),
            "spark.ui.enabled": "false",
            "spark.executorEnv.PYTHONPATH": f"{SOURCE / 'src'}:{SOURCE}:{DIRECTORY}",
            **{name.replace("__", "."): value for name, value in conf.items()},
        }
        driver = Driver(self.hosts[0], settings, self._home)
        try:
            yield driver
        finally:
            driver.close()

    def jobs(self) -> list[str]:
        """Command lines of what runs on the machines for a job of Reigen's."""
        commands = [command for host in self.hosts for command in host.processes().values()]
        return [command for command in commands if re.search(r"reigen\.(launch|runner)|task_main", command)]

    def kill_executor(self, host: Host, number: int = signal.SIGKILL) -> None:
        """Kills the executors' JVMs on a machine."""
        for pid, command in host.processes().items():
            if "CoarseGrainedExecutorBackend" in command:
                os.kill(pid, number)

    def _daemon(self, host: Host, kind: str, *options: str) -> HostProcess:
        command = ["java", *_QUICK, *_JAVA_OPTIONS, "-cp", f"{self._home}/jars/*", kind, *options]
        scala = next((self._home / "jars").glob("spark-core_*.jar")).name.split("_")[1].split("-")[0]
        environ = {"SPARK_HOME": str(self._home), "SPARK_LOCAL_IP": host.address, "SPARK_SCALA_VERSION": scala}
        return host.start(command, env=environ)


class Driver:
    """A driver program that does what it is told, one thing after the other (`tests.engines.spark.program`)."""

    def __init__(self, host: Host, conf: dict[str, str], home: Path) -> None:
        path = f"{SOURCE / 'src'}:{SOURCE}"
        environ = {
            "PYTHONPATH": path,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": host.address,
            "PYSPARK_PYTHON": sys.executable,
        }
        program = Path(__file__).with_name("program.py")
        self.process = host.start([sys.executable, program, json.dumps(conf)], env=environ, cwd=SOURCE, has_input=True)
        self._num_answers = 0

    def ask(self, name: str, timeout: float = 90.0, **arguments: Any) -> Any:
        """Calls a function of the program; returns its result."""
        self.tell(name, **arguments)
        return self.answer(timeout)

    def tell(self, name: str, **arguments: Any) -> None:
        """Has a function called."""
        self.process.tell(json.dumps([name, arguments]).encode() + b"\n")

    def answer(self, timeout: float = 90.0) -> Any:
        """The result of the oldest function that was called and not asked for; its error is raised."""
        until = time.monotonic() + timeout
        while len(found := self._answers()) <= self._num_answers:
            assert time.monotonic() < until, f"no answer in {timeout:g} s: {self.describe()}"
            assert self.process.returncode is None, f"the driver has ended: {self.describe()}"
            time.sleep(0.01)
        self._num_answers += 1
        kind, value = json.loads(found[self._num_answers - 1])
        assert kind == "result", f"{value}\n{self.describe()}"
        return value

    def describe(self) -> str:
        """The last that it has written."""
        out, err = self.process.output()
        return f"\nstdout: {out[-2000:]}\nstderr: {err[-6000:]}"

    def _answers(self) -> list[str]:
        out = self.process.output()[0]
        return [
            line.removeprefix("ANSWER ")
            for line in out.splitlines(keepends=True)
            if line.startswith("ANSWER ") and line.endswith("\n")
        ]

    def close(self) -> None:
        """Ends it, as a user's program ends."""
        if self.process.returncode is None:
            self.process.end_input()
            self.process.wait(60)
        self.process.close()
