"""Launcher in jobs of LSF: hosts and slots are the job's, and agents are started by blaunch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace

from reigen.errors import ConfigError
from reigen.launch.base import AgentCommand, HostProblem, JobPlan, explain_agent_exit, find_problem, last_line
from reigen.launch.batch import (
    REQUEUE_EXIT_CODE,
    BatchJob,
    BatchLauncher,
    check_program,
    parse_host_lines,
    read_host_file,
)
from reigen.launch.engines import EngineJob
from reigen.launch.hosts import HostInfo
from reigen.launch.options import LaunchOptions
from reigen.launch.supervision.spawn import CLIENT_END_SECONDS, spawn_client

#: Set where a job's first host is a batch or launch node that has no slots for computing.
_LAUNCH_NODE_VARIABLE = "CSM_ALLOCATION_ID"
_PROBLEMS = (
    (r"not (an )?(execution host|allocated)|is not used by|not part of", "it is not among the hosts of this job", ""),
    (r"(LIM|SBD|RES|sbatchd|res) .*(down|not respond|not running|not ready)", "LSF does not reach it", "see bhosts"),
    (r"User permission denied|No permission", "LSF does not permit it", ""),
    (r"Job .*(finished|not found|exited)", "the job has ended", ""),
)


class LsfLauncher(BatchLauncher):
    """Launcher and starter of agents in the job that the environment describes.

    Raises:
        ConfigError: this is no job of LSF's, or not enough of one, or there is no blaunch.
    """

    #: A task of blaunch's has them; a rank is none.
    removed_variables = ("LSF_PM_TASKID", "LSF_PM_HOSTIDS", "LSF_PM_SOCKFD")

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        job = find_allocation(environ)
        if job is None:
            raise ConfigError(
                "--launcher lsf: this process is in no job of LSF's (LSB_JOBID, and LSB_MCPU_HOSTS or "
                "LSB_DJOB_HOSTFILE, are not set): run it in a script for bsub -n N"
            )
        super().__init__(options, environ, job)

    def check_tools(self) -> None:
        """Raise ConfigError where there is no blaunch."""
        check_engine(self.environ)

    @property
    def agents(self) -> LsfLauncher:
        """Return this: it starts agents, too."""
        return self

    @property
    def remote_shell(self) -> tuple[str, ...]:
        """Return nothing: the hosts of such clusters share their directories."""
        return ()

    def allocate(self, wait: Callable[[float], None]) -> JobPlan:
        """Return the plan: LSF has granted the slots before."""
        return replace(super().allocate(wait), describe_notice=_describe_notice, requeue=lambda: REQUEUE_EXIT_CODE)

    def start_agent(self, host: str, agent: AgentCommand) -> subprocess.Popen[bytes]:
        """Start the agent in a task of the job."""
        return spawn_client(["blaunch", "-no-shell", host, *agent.argv_with_environ], end_seconds=CLIENT_END_SECONDS)

    def explain_exit(self, host: str, exit_code: int | None, output: str) -> HostProblem:
        """Explain the end of a task by the words of blaunch, or of the agent."""
        if problem := find_problem(host, output, _PROBLEMS):
            return problem
        if "blaunch" in output and "reigen" not in output:
            return HostProblem(host, f"blaunch failed: {last_line(output)}", f"try it by hand: blaunch {host} hostname")
        return explain_agent_exit(host, exit_code, output, self.options.ssh.python)


def find_allocation(environ: Mapping[str, str]) -> BatchJob | None:
    """Read the job that this process is in; None: it is in none.

    Raises:
        ConfigError: the list of hosts is not in order, or jsrun has started this process several times.
    """
    job_id = environ.get("LSB_JOBID")
    listed, file = environ.get("LSB_MCPU_HOSTS", ""), environ.get("LSB_DJOB_HOSTFILE", "")
    if not job_id or not (listed or file):
        return None
    if environ.get("JSM_NAMESPACE_SIZE", "1") != "1":
        raise ConfigError(
            f"jsrun has started `reigen run` {environ['JSM_NAMESPACE_SIZE']} times, and each would start a whole job: "
            "leave jsrun out, `reigen run` reaches the hosts by itself"
        )
    if listed:
        hosts = parse_mcpu_hosts(listed)
    else:
        hosts = parse_host_lines(read_host_file(file, f"LSB_DJOB_HOSTFILE of LSF job {job_id}"), file)
    if environ.get(_LAUNCH_NODE_VARIABLE) and len(hosts) > 1 and hosts[0].slots == 1:
        hosts = hosts[1:]
    index = environ.get("LSB_JOBINDEX", "0")
    remark = "" if index in {"", "0"} else f"element {index} of an array, each of which is a job of its own"
    return BatchJob("lsf", "LSF", job_id, "LSB_JOBID", hosts, "bsub -n N", remark)


def find_engine_job(environ: Mapping[str, str]) -> EngineJob | None:
    """Find LSF's job for `launch.engines`."""
    job = find_allocation(environ)
    return None if job is None else job.engine_job


def check_engine(environ: Mapping[str, str]) -> str:
    """Look whether agents can be started, for `launch.engines`; raises ConfigError where there is no blaunch."""
    check_program("blaunch", environ, "LSF", ". LSF_TOP/conf/profile.lsf")
    return ""


def parse_mcpu_hosts(text: str) -> tuple[HostInfo, ...]:
    """Parse LSB_MCPU_HOSTS: names and numbers of slots in turn; those of a host that is named twice are added.

    Raises:
        ConfigError: it has another form; the message has the position of the word.

    Example:
        >>> parse_mcpu_hosts("h1 4 h2 2")
        (HostInfo(name='h1', slots=4), HostInfo(name='h2', slots=2))
    """
    words = list(re.finditer(r"\S+", text))
    slots: dict[str, int] = {}
    for name, number in zip(words[::2], [*words[1::2], None], strict=False):
        if number is None or not re.fullmatch(r"[1-9][0-9]{0,8}", number[0]):
            position = len(text) if number is None else number.start()
            raise ConfigError(f"LSB_MCPU_HOSTS {text!r}: at position {position}, there is no number of slots")
        slots[name[0]] = slots.get(name[0], 0) + int(number[0])
    if not slots:
        raise ConfigError("LSB_MCPU_HOSTS names no host")
    return tuple(HostInfo(name, num) for name, num in slots.items())


def _describe_notice(output: str) -> str:
    return "by LSF: the job is to end (bkill), or its run limit (-W) or warning time (-wt) is reached"
