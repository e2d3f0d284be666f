"""Launcher inside a parallel job of Grid Engine's: hosts and slots are the job's, and agents are started by qrsh.

A task of a parallel environment that a signal ends, or whose qrsh does, takes the whole job with it: its execution
daemon kills that within 2 s. A task that exits, with whatever code, does not. So agents, and ranks below them, are told
to end through their connection, and qrsh is left alone until it has ended by itself.
"""

from __future__ import annotations

import re
import resource
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from reigen.errors import ConfigError, LaunchError
from reigen.launch.base import AgentCommand, HostProblem, JobPlan, explain_agent_exit, find_problem, last_line
from reigen.launch.batch import REQUEUE_EXIT_CODE, BatchLauncher, check_program
from reigen.launch.job_state import FinishJob
from reigen.launch.options import LaunchOptions
from reigen.launch.sge.allocation import find_allocation, is_serial_job
from reigen.launch.sge.environment import explain_parallel_environment, read_parallel_environment
from reigen.launch.supervision.spawn import CLIENT_END_SECONDS, spawn_client

#: Variables that bend qrsh: a program before the command there, and messages between its own.
_BENDING = ("QRSH_WRAPPER", "SGE_DEBUG_LEVEL")
_PROBLEMS = (
    (r"can't resolve host name", "its name cannot be resolved", ""),
    (r"connection refused|got send error|can't find connection", "its execution daemon does not answer", "see qhost"),
    (r"job .* does not exist|unknown job|no such job", "the job has ended", ""),
)


class SgeLauncher(BatchLauncher):
    """Launcher and starter of agents in the job that the environment describes.

    Raises:
        ConfigError: this is no parallel job, or not enough of one, or there is no qrsh.
    """

    #: Directories of the job on each host.
    kept_variables = ("TMP", "SGE_JOB_SPOOL_DIR", "SGE_ARCH", "SGE_BINARY_PATH", "ARC")
    removed_variables: tuple[str, ...] = ("QRSH_COMMAND", "QRSH_PORT")

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        job = find_allocation(environ)
        if job is None:
            raise ConfigError(f"--launcher sge: {_why_no_allocation(environ)}")
        if environ.get("SGE_TASK_ID") == "undefined":
            arrays = ("SGE_TASK_ID", "SGE_TASK_FIRST", "SGE_TASK_LAST", "SGE_TASK_STEPSIZE")
            self.removed_variables = (*self.removed_variables, *arrays)
        super().__init__(options, environ, job)

    def check_tools(self) -> None:
        """Raise ConfigError where there is no qrsh."""
        check_qrsh(self.environ)

    @property
    def agents(self) -> SgeLauncher:
        """Return this: it starts agents, too."""
        return self

    @property
    def remote_shell(self) -> Sequence[str]:
        """Return qrsh in the form of ssh."""
        return _QRSH

    def allocate(self, wait: Callable[[float], None]) -> JobPlan:
        """Return the plan: Grid Engine has granted the slots before."""
        return replace(
            super().allocate(wait),
            describe_notice=self._describe_notice,
            requeue=lambda: REQUEUE_EXIT_CODE,
            hint=_hint,
        )

    def start_agent(self, host: str, agent: AgentCommand) -> subprocess.Popen[bytes]:
        """Start the agent in a task of the parallel environment."""
        # a shell there reads the words, joined by blanks; exec: that shell would be another process that can be killed
        command = f"exec {shlex.join(agent.argv_with_environ)}"
        return spawn_client([*_QRSH, host, command], end_seconds=CLIENT_END_SECONDS)

    def explain_exit(self, host: str, exit_code: int | None, output: str) -> HostProblem:
        """Explain the end of a task by the words of qrsh, or of the agent."""
        if "didn't accept task" in output:
            return HostProblem(host, f"its execution daemon takes no task ({last_line(output)})", self._refusal())
        if problem := find_problem(host, output, _PROBLEMS):
            return problem
        if re.search(r"^\s*error: ", output, re.MULTILINE) and "reigen" not in output:
            return HostProblem(
                host, f"qrsh failed: {last_line(output)}", f"try it by hand in a job: qrsh -inherit {host} hostname"
            )
        return explain_agent_exit(host, exit_code, output, self.options.ssh.python)

    def _refusal(self) -> str:
        """Return why a host takes no task of the job."""
        name = self.environ.get("PE", "")
        with suppress(LaunchError):
            if problem := explain_parallel_environment(name, read_parallel_environment(name)):
                return problem
        return "the job has as many tasks there as slots (an agent needs one, rsync another), or has ended"

    def _describe_notice(self, output: str) -> str:
        return "by Grid Engine: the job is deleted or suspended (-notify), or its time is nearly over (s_rt)"


_QRSH = ("env", *(word for name in _BENDING for word in ("-u", name)), "qrsh", "-inherit")


def check_qrsh(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where there is no qrsh."""
    check_program("qrsh", environ, "Grid Engine", ". $SGE_ROOT/default/common/settings.sh")


def check_engine(environ: Mapping[str, str]) -> str:
    """Look whether agents can be started in this job; returns a remark, which may be empty.

    Raises:
        ConfigError: they cannot, and why.
    """
    check_qrsh(environ)
    name = environ.get("PE", "")
    try:
        settings = read_parallel_environment(name)
    except LaunchError as error:
        return f"the parallel environment {name} could not be looked at: {error}"
    if problem := explain_parallel_environment(name, settings):
        raise ConfigError(problem)
    return ""


def _why_no_allocation(environ: Mapping[str, str]) -> str:
    if is_serial_job(environ):
        return f"Grid Engine job {environ['JOB_ID']} is not a parallel one: submit it with qsub -pe NAME N"
    return (
        "this process is in no parallel job of Grid Engine's (JOB_ID, NSLOTS and PE_HOSTFILE are not set): run it in a "
        "script for qsub -pe NAME N, or have a job submitted by reigen launch --launcher sge"
    )


def _hint(finish: FinishJob) -> str:
    """Return what may have killed a rank in a job with limits; empty: nothing that is known."""
    failure = finish.failure
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if failure is None or failure.exit_code != -signal.SIGKILL or limit == resource.RLIM_INFINITY:
        return ""
    return (
        f"processes of this job may have {limit >> 20} MiB of address space, by h_vmem or s_vmem, which are per slot; "
        "if it was memory, ask for more: -l h_vmem=..."
    )
