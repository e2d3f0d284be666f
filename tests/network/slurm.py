"""A real Slurm cluster on stand-in machines: the controller on the first, a node on each."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.lab import Host, HostProcess, Hosts
from tests.network.test_hosts import wait_for

_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "sinfo", "munged")

_CONFIG = """
ClusterName=stand-in
SlurmctldHost={controller}
AuthType=auth/munge
AuthInfo=socket=/run/reigen-munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir=/run/reigen-slurmd
SlurmctldPidFile=/run/reigen-slurmctld.pid
SlurmdPidFile=/run/reigen-slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SchedulerParameters=bf_interval=1
NodeName={nodes} CPUs=4 State=UNKNOWN
PartitionName=all Nodes={nodes} Default=YES MaxTime=10 State=UP OverSubscribe=FORCE
"""


def why_no_slurm() -> str:
    """Why there can be no cluster here; empty if there can."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [program for program in _PROGRAMS if shutil.which(program, path=path) is None]
    return f"not installed: {', '.join(missing)} (slurmctld slurmd slurm-client munge of Debian)" if missing else ""


class Slurm:
    """The cluster; it ends with the machines.

    Args:
        hosts: its nodes.
        directory: one that all of them share.
    """

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts, self.directory = hosts, directory
        self._controller = hosts[0]
        (directory / "state").mkdir()
        self._config = directory / "slurm.conf"
        nodes = ",".join(host.name for host in hosts)
        self._config.write_text(_CONFIG.format(controller=hosts[0].name, directory=directory, nodes=nodes))
        (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        key = directory / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._daemons = [self._authenticate(host, key) for host in hosts]
        for host in hosts:
            self._await_file(host, "run/reigen-munge.socket")
        self._daemons.append(self._daemon(hosts[0], "slurmctld", "-D"))
        hosts[0].wait_until_listening(6817)
        for host in hosts:
            (host.root / "run/reigen-slurmd").mkdir()
            self._daemons.append(self._daemon(host, "slurmd", "-D", "-N", host.name))
        wait_for(lambda: self.num_idle() == len(hosts), "all nodes of the cluster to be idle")

    def start(self, *command: str, env: dict[str, str] | None = None, cwd: str = "/") -> HostProcess:
        """Starts one of Slurm's commands on the controller."""
        return self._controller.start(command, env={**self._environ, **(env or {})}, cwd=cwd)

    def run(self, *command: str, env: dict[str, str] | None = None, timeout: float = 60.0) -> tuple[int, str, str]:
        """Runs one of Slurm's commands to its end: exit code, stdout, stderr."""
        with contextlib.closing(self.start(*command, env=env)) as process:
            return process.wait(timeout), *process.output()

    @contextlib.contextmanager
    def allocation(self, *options: str) -> Iterator[dict[str, str]]:
        """An allocation without a process; yields the variables that a batch script on its first node would have."""
        code, _, err = self.run("salloc", "--no-shell", *options)
        assert code == 0, err
        job_id = err.split("job allocation ")[1].split()[0]
        try:
            _, out, _ = self.run("squeue", "-h", "-j", job_id, "-O", "NodeList:50")
            nodes = out.strip()
            found = {"SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": nodes, "SLURMD_NODENAME": self._controller.name}
            yield {**self._environ, **found}
        finally:
            self.run("scancel", job_id)
            wait_for(lambda: self.num_idle() == len(self.hosts), "the nodes to be idle again")

    def stop_daemon(self, host: Host) -> None:
        """Ends a node's slurmd, but nothing that it has started."""
        for pid, command in host.processes().items():
            if command.startswith("/usr/sbin/slurmd"):
                os.kill(pid, signal.SIGKILL)

    @property
    def _environ(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self._config), "PATH": f"{os.environ['PATH']}:/usr/sbin"}

    def _authenticate(self, host: Host, key: Path) -> HostProcess:
        files = [f"--{name}=/run/reigen-munge.{name}" for name in ("pid-file", "log-file", "seed-file")]
        command = ["/usr/sbin/munged", "--force", "--foreground", "-S", "/run/reigen-munge.socket"]
        return host.start([*command, f"--key-file={key}", *files, "--origin=127.0.0.1"])

    def _daemon(self, host: Host, *command: str) -> HostProcess:
        return host.start([f"/usr/sbin/{command[0]}", *command[1:]], env=self._environ)

    def _await_file(self, host: Host, path: str) -> None:
        wait_for((host.root / path).exists, f"{path} on {host.name}")

    def num_idle(self) -> int:
        """How many nodes have nothing to do."""
        code, out, _ = self.run("sinfo", "-h", "-o", "%D", "-t", "idle")
        return sum(map(int, out.split())) if code == 0 else 0
