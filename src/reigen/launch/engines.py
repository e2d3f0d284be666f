"""Detection of the engine whose job this process is in, and the choice of the launcher that follows.

An engine's detection is a function of the environment beside its launcher's line in the registry, and of the list of
hosts that a variable names; nothing of the engine is imported or asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from reigen.cluster.environ import RANK_VARIABLES
from reigen.launch.base import DEFAULT_LAUNCHER
from reigen.launch.hosts import HostInfo

#: Function ``(environ) -> EngineJob | None`` of each launcher whose engine gives a job its hosts.
ENGINES: Mapping[str, str] = {
    "slurm": "reigen.launch.slurm.allocation:find_engine_job",
    "sge": "reigen.launch.sge.allocation:find_engine_job",
    "lsf": "reigen.launch.lsf:find_engine_job",
    "pbs": "reigen.launch.pbs:find_engine_job",
    "yarn": "reigen.launch.yarn.launcher:find_engine_job",
}
#: Function ``(environ) -> str`` of a launcher that looks whether agents can be started in the job: returns a remark,
#: which may be empty, or raises ConfigError. It may ask the engine.
CHECKS: Mapping[str, str] = {
    "slurm": "reigen.launch.slurm.launcher:check_engine",
    "sge": "reigen.launch.sge.launcher:check_engine",
    "lsf": "reigen.launch.lsf:check_engine",
    "pbs": "reigen.launch.pbs:check_engine",
}

#: Elastic jobs that each launcher can have, in words.
ELASTIC_JOBS: Mapping[str, str] = {
    "slurm": "--min-np: ranks, agents and nodes may fail (nodes where sbatch had --no-kill); Slurm adds no nodes",
    "sge": "--min-np: ranks may fail; a lost host, or an agent that is killed, ends Grid Engine's job",
    "lsf": "--min-np: ranks may fail; what follows from the loss of a host is the site's policy (not tried)",
    "pbs": "--min-np: ranks may fail; what follows from the loss of a host is the site's policy (not tried)",
    "yarn": "none: containers are granted before the job begins; Spark on YARN has them (reigen.spark.run_elastic)",
    "nodes": "--min-np: nodes other than node 0 may go, come anew, and be more than at the beginning",
    DEFAULT_LAUNCHER: "--min-np, and --host-discovery-script for hosts that come and go",
}


@dataclass(frozen=True, slots=True)
class EngineJob:
    """Job of an engine in which this process runs.

    Attributes:
        launcher: name of the launcher that starts ranks there.
        description: the engine, the job and its evidence, in words.
        hosts: the job's, with their slots, in the order of ranks.
    """

    launcher: str
    description: str
    hosts: tuple[HostInfo, ...]

    @property
    def num_slots(self) -> int:
        """Slots of all hosts."""
        return sum(host.slots for host in self.hosts)


@dataclass(frozen=True, slots=True)
class LauncherChoice:
    """Launcher of a job, the engine's job that it runs in (None: in none), and the reason in words.

    ``uses_hosts_of_engine``: the hosts are the engine's; otherwise the user's, or this one.
    """

    launcher: str
    reason: str
    engine_job: EngineJob | None = None
    uses_hosts_of_engine: bool = False


def detect_engine(environ: Mapping[str, str]) -> EngineJob | None:
    """Find the engine's job that this process is in; None: it is in none, or is a rank of a job of Reigen's.

    Raises:
        ConfigError: the engine's variables are not in order, or the engine has started this process several times.
    """
    if RANK_VARIABLES[0] in environ:  # the innermost counts
        return None
    return next((job for name in ENGINES if (job := _find_job(name, environ)) is not None), None)


def choose_launcher_in_engine(
    named: str | None, environ: Mapping[str, str], *, has_hosts: bool = False
) -> LauncherChoice:
    """Choose the launcher: the named one, else ssh for hosts that the user names, else that of the engine, else ssh.

    Args:
        named: by the user; None: not at all.
        environ: the launcher's environment.
        has_hosts: the user names hosts.

    Raises:
        ConfigError: as `detect_engine`, where the engine counts.
    """
    if named is not None:
        job = _find_job(named, environ) if named in ENGINES else None
        return LauncherChoice(named, "it was named", job, named in ENGINES and not has_hosts)
    if has_hosts:
        return LauncherChoice(DEFAULT_LAUNCHER, "hosts are named")
    job = detect_engine(environ)
    if job is None:
        return LauncherChoice(DEFAULT_LAUNCHER, "this process is in no engine's job")
    if len(job.hosts) == 1:
        return LauncherChoice(DEFAULT_LAUNCHER, f"{job.description}, which has this host alone", job)
    return LauncherChoice(job.launcher, job.description, job, uses_hosts_of_engine=True)


def check_engine(launcher: str, environ: Mapping[str, str]) -> str:
    """Look whether a launcher can start agents in the job that this process is in; returns a remark, maybe empty.

    Raises:
        ConfigError: it cannot, and why.
    """
    if launcher not in CHECKS:
        return ""
    module, _, function = CHECKS[launcher].partition(":")
    remark: str = getattr(import_module(module), function)(environ)
    return remark


def _find_job(launcher: str, environ: Mapping[str, str]) -> EngineJob | None:
    module, _, function = ENGINES[launcher].partition(":")
    job: EngineJob | None = getattr(import_module(module), function)(environ)
    return job
