"""A real cluster of Ray's on stand-in machines: the head on the first, a node on each."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from tests.lab import Host, HostProcess, Hosts
from tests.network.waiting import wait_for

PORT = 6379
CPUS = 4
#: Of the last node. Ray counts what it is told that there is.
GPUS = 4
_SOURCE = Path(__file__).parents[3]
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_ENVIRON = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # whether or not this user has a token for another cluster
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_autoscaler_v2": "0",
    "PYTHONPATH": f"{_SOURCE / 'src'}:{_SOURCE}",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
}
_AWAIT = """
import ray, sys, time
ray.init(address="auto", log_to_driver=False, logging_level="error")
until = time.monotonic() + 60
while sum(node["Alive"] for node in ray.nodes()) != int(sys.argv[1]):
    assert time.monotonic() < until, ray.nodes()
    time.sleep(0.05)
"""


class RayCluster:
    """The cluster; it ends with the machines.

    Args:
        hosts: its nodes.
        directory: where programs are written.
    """

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts, self.directory = hosts, directory
        self._num_programs = 0
        head = hosts[0]
        self.address = f"{head.address}:{PORT}"
        self.nodes = {
            head.name: self._start_node(
                head, "--head", f"--port={PORT}", "--include-dashboard=false", "--ray-client-server-port=10001"
            )
        }
        head.wait_until_listening(PORT)
        for host in list(hosts)[1:]:
            self.nodes[host.name] = self.start_node(host, GPUS if host is hosts[-1] else 0)
        code, out = self.run(_AWAIT, str(len(hosts)))
        assert code == 0, out

    def start_node(self, host: Host, num_gpus: int) -> HostProcess:
        """Starts a node of the cluster on a machine, which is not the head's."""
        return self._start_node(host, f"--address={self.address}", f"--num-gpus={num_gpus}")

    def _start_node(self, host: Host, *options: str) -> HostProcess:
        common = ("--node-ip-address", host.address, f"--num-cpus={CPUS}", "--object-store-memory=100000000")
        rest = ("--temp-dir=/run/ray", "--disable-usage-stats", "--block")
        return host.start([*_RAY, "start", *options, *common, *rest], env=_ENVIRON)

    def stop_node(self, host: Host) -> None:
        """`ray stop` on a machine."""
        host.run([*_RAY, "stop"], env=_ENVIRON)

    def start(self, program: str, *arguments: str, env: dict[str, str] | None = None, host: int = 0) -> HostProcess:
        """Starts a driver on a machine; the program's modules are found on all of them."""
        self._num_programs += 1
        file = self.directory / f"program{self._num_programs}.py"
        file.write_text(program)
        environ = {**_ENVIRON, "RAY_ADDRESS": self.address, **(env or {})}
        return self.hosts[host].start([sys.executable, file, *arguments], env=environ, cwd=self.directory)

    def run(
        self, program: str, *arguments: str, env: dict[str, str] | None = None, timeout: float = 120.0, host: int = 0
    ) -> tuple[int, str]:
        """Runs a driver to its end: exit code, and what it has written."""
        with closing(self.start(program, *arguments, env=env, host=host)) as process:
            code = process.wait(timeout)
            return code, "\n".join(process.output())

    def left_of_jobs(self) -> list[str]:
        """What of jobs, and not of the cluster, runs anywhere."""
        marks = ("reigen.launch.agent", "reigen.runner", "AgentActor", "JobActor", "ResultsActor")
        return [
            f"{host.name}: {command}"
            for host in self.hosts
            for command in host.processes().values()
            if any(mark in command for mark in marks)
        ]

    def processes(self, word: str) -> list[int]:
        """Processes of jobs, anywhere, that have this in their command line."""
        return [pid for host in self.hosts for pid, command in host.processes().items() if word in command]

    def wait_until_empty(self, timeout: float = 30.0) -> None:
        """Waits until nothing of any job runs."""
        wait_for(lambda: not self.left_of_jobs(), f"the end of {self.left_of_jobs()}", timeout)
