"""Launcher inside an allocation of Slurm's: the nodes and tasks are the job's, and agents are started by srun."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from reigen.errors import ConfigError
from reigen.launch.base import (
    AgentCommand,
    AgentStarter,
    DialBackStarter,
    HostProblem,
    JobPlan,
    assign_processes,
    explain_agent_exit,
    find_problem,
    last_line,
)
from reigen.launch.hosts import HostAssignment, is_this_host
from reigen.launch.options import LaunchOptions, complain
from reigen.launch.slurm.allocation import find_allocation
from reigen.launch.slurm.command import rank_variables, remote_shell, srun_command
from reigen.launch.slurm.step_starter import SlurmStepStarter
from reigen.launch.supervision.spawn import CLIENT_END_SECONDS, spawn_client

#: Variables whose values on a host are that host's, where it has them.
KEPT_VARIABLES = ("SLURM_", "SLURMD_")
#: Other nodes that are reached by an srun each; more are reached by one srun, whose agents dial back.
MAX_STEPS = 64
MAX_STEPS_VARIABLE = "REIGEN_SLURM_STEPS"
_SCONTROL_SECONDS = 10.0
#: Seconds before its end in which a job that is asked to stop has run out of time.
_LAST_SECONDS = 180

#: Pattern of Slurm's message about an end that it has brought about, and its meaning; the first that matches holds.
_ENDS = (
    (r"DUE TO TIME LIMIT", "the job's time is over"),
    (r"DUE TO PREEMPTION", "the job is preempted by another"),
    (r"DUE TO NODE FAILURE|NODE_FAIL|Node failure on", "the node has failed"),
    (r"Step .*exceeded .*memory limit|Detected \d+ oom", "it needed more memory than the job has"),
    (r"CANCELLED AT", "the job, or this step of it, was cancelled"),
)
#: Pattern of srun's message, its meaning and advice; the first that matches holds.
_PROBLEMS = (
    (
        r"(down|drained|drain|not responding|not available).*reserved|node.* (is|are) down|nodes? .*DOWN",
        "Slurm does not use it: it is down or drained",
        "see sinfo -R",
    ),
    (
        r"Requested nodes are busy|temporarily disabled|Resource temporarily unavailable",
        "Slurm starts no step there now",
        "another step holds the node: start that with srun --overlap, or wait for it",
    ),
    (
        r"invalid job id|Job/step already complet|job .*(has|is).*(revoked|expired)|allocation.*(revoked|expired)",
        "the job has ended",
        "",
    ),
    (r"step limit|MaxStepCount", "the job has started as many steps as it may", "see scontrol show config"),
    (
        r"Invalid node name|not in (the )?(job|allocation)|configuration is not available",
        "it is not in this job",
        "",
    ),
    (
        r"Unable to contact slurm controller|Connection (refused|timed out)|Socket timed out",
        "Slurm's controller or the node's slurmd does not answer",
        "see sinfo",
    ),
    (
        r"Communication connection failure|Task launch .* failed|Aborting, .*timeout|Timed out waiting for job step",
        "its slurmd does not answer",
        "see sinfo -R",
    ),
    (r"Access/permission denied|Invalid account|User's group not permitted", "Slurm does not permit it", ""),
)
#: Lines of srun's that say nothing about a failure, or only that there was one.
_NOISE = re.compile(
    r"^srun: (cluster configuration lacks support for cpu binding|"
    r"error: \S+: tasks? [\d,-]+: Exited with exit code \d+)\n?",
    re.MULTILINE,
)


class SlurmLauncher:
    """Launcher and starter of agents in the allocation that the environment describes.

    The hosts are the allocation's, or those that the user names, if they are among them; this one is used without srun.

    Raises:
        ConfigError: there is no allocation, or not enough in it, or no srun.
    """

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        allocation = find_allocation(environ)
        if allocation is None:
            raise ConfigError(
                "--launcher slurm: this process is in no job of Slurm's (SLURM_JOB_ID and SLURM_JOB_NODELIST are not "
                "set): run it in a script for sbatch, or under salloc"
            )
        self.options, self._allocation, self._environ = options, allocation, environ
        self._max_steps = _read_max_steps(environ)
        self._check_hosts()
        if not options.hosts:
            allocation.check_size(options.num_ranks)
        hosts = options.hosts or allocation.hosts
        self._assignments = _with_rank_variables(assign_processes(options, hosts, self._is_local), environ)
        if not all(each.is_local for each in self._assignments):
            check_srun(environ)

    @property
    def remote_shell(self) -> Sequence[str]:
        """Return srun in the form of ssh."""
        return remote_shell(self._allocation, self._environ)

    def allocate(self, wait: Callable[[float], None]) -> JobPlan:
        """Return the plan: Slurm has granted the nodes before."""
        num_others = sum(not each.is_local for each in self._assignments)
        starter: AgentStarter | DialBackStarter = self
        if num_others > self._max_steps:
            starter = SlurmStepStarter(self._allocation, self._environ, self.remote_shell, self.explain_exit)
        return JobPlan(
            self._assignments,
            starter,
            kept_variables=KEPT_VARIABLES,
            describe_notice=self._describe_notice,
            requeue=self._requeue,
            is_local=self._is_local,
        )

    def close(self) -> tuple[str, ...]:
        """Give nothing back: a step ends with its agent, and the allocation is the user's."""
        return ()

    def start_agent(self, host: str, agent: AgentCommand) -> subprocess.Popen[bytes]:
        """Start the agent in a step of one task. A killed srun does not always end its task's stdin."""
        command = [*srun_command(self._allocation, self._environ, host), *agent.argv_with_environ]
        return spawn_client(command, end_seconds=CLIENT_END_SECONDS)

    def explain_exit(self, host: str, exit_code: int | None, output: str) -> HostProblem:
        """Explain the end of a step by the words of srun and slurmstepd, or that of the agent."""
        output = _NOISE.sub("", output)
        for pattern, meaning in _ENDS:
            if match := re.search(rf"^.*({pattern}).*$", output, re.MULTILINE):
                return HostProblem(host, f"Slurm has ended it: {meaning} ({match[0].strip()})")
        if problem := find_problem(host, output, _PROBLEMS, "(srun|slurmstepd):"):
            return problem
        if re.search(r"execve\(\): .*No such file", output):
            exit_code = 127
        if re.search(r"^srun: error: (?!\S+: tasks? )", output, re.MULTILINE) and "reigen" not in output:
            return HostProblem(
                host, f"srun failed: {last_line(output)}", f"try it by hand: srun --overlap -w {host} true"
            )
        return explain_agent_exit(host, exit_code, output, self.options.ssh.python)

    def _is_local(self, name: str) -> bool:
        node = self._allocation.node
        return name == node or (is_this_host(name) and (not node or name not in self._nodes))

    @property
    def _nodes(self) -> set[str]:
        return {host.name for host in self._allocation.hosts}

    def _check_hosts(self) -> None:
        """Raise ConfigError where the user names hosts that the allocation does not have."""
        named = [host.name for host in self.options.hosts]
        named += [] if self.options.servers is None else self.options.servers.hosts
        foreign = [name for name in dict.fromkeys(named) if name not in self._nodes and not self._is_local(name)]
        if foreign:
            nodes = ", ".join(host.name for host in self._allocation.hosts)
            raise ConfigError(
                f"{', '.join(foreign)}: not among the nodes of Slurm job {self._allocation.job_id}, {nodes}; "
                "to start by ssh all the same: --launcher ssh"
            )

    def _describe_notice(self, output: str) -> str:
        """Explain a signal that an agent was sent, by what slurmstepd has printed, or by the clock."""
        reason = next((meaning for pattern, meaning in _ENDS if re.search(pattern, output)), "")
        end = self._allocation.end_seconds
        if not reason and end is not None and time.time() > end - _LAST_SECONDS:
            reason = "the job's time is nearly over"
        return f"by Slurm: {reason or 'the job is cancelled or preempted, or its time is nearly over'}"

    def _requeue(self) -> int:
        """Put the job back into the queue; returns the exit code for that.

        A job that Slurm is ending already was cancelled, or its time is over: it shall not come back.
        """
        job_id = self._allocation.job_id
        state = re.search(r"\bJobState=(\S+)", _run_scontrol("show", "job", "-o", job_id) or "")
        if state is None or state[1] != "RUNNING":
            what = "is not known any more" if state is None else f"is {state[1]}"
            complain(f"Slurm job {job_id} is not put back into the queue: it {what}, for it was cancelled, or is over")
            return 128 + signal.SIGTERM
        if _run_scontrol("requeue", job_id) is None:
            complain(
                f"Slurm job {job_id} cannot be put back into the queue by scontrol requeue: only sbatch's jobs can"
            )
            return 128 + signal.SIGTERM
        return 0


def _run_scontrol(*words: str) -> str | None:
    """Run scontrol; returns its output, None where it has failed."""
    try:
        done = subprocess.run(
            ["scontrol", *words], capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _read_max_steps(environ: Mapping[str, str]) -> int:
    text = environ.get(MAX_STEPS_VARIABLE, "")
    if not text:
        return MAX_STEPS
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{MAX_STEPS_VARIABLE} is {text!r}, not a number")
    return int(text)


def check_srun(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where there is no srun."""
    if shutil.which("srun", path=environ.get("PATH")) is None:
        raise ConfigError(
            "this is a job of Slurm's (SLURM_JOB_NODELIST), but there is no srun in PATH here, which starts processes "
            "on its other nodes: add it to PATH (module load slurm), or name the hosts and --launcher ssh"
        )


def check_engine(environ: Mapping[str, str]) -> str:
    """Look whether agents can be started, for `launch.engines`; raises ConfigError where there is no srun."""
    check_srun(environ)
    return ""


def _with_rank_variables(assignments: Sequence[HostAssignment], environ: Mapping[str, str]) -> list[HostAssignment]:
    """Add Slurm's variables of each rank; those of a step's MPI are this process's alone."""
    of_mpi = dict.fromkeys(name for name in environ if name.startswith(("PMI_", "PMIX_")))
    counts = [len(each.ranks) for each in assignments if each.ranks]
    found, node = [], 0
    for each in assignments:
        environs = tuple(
            of_mpi | rank_variables(rank, (node, local_rank), counts) for local_rank, rank in enumerate(each.ranks)
        )
        found.append(replace(each, rank_environs=environs))
        node += bool(each.ranks)
    return found
