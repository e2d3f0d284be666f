"""Launcher in jobs of PBS: hosts and slots are the job's, and agents are started by pbs_tmrsh, or by ssh.

What a task of pbs_tmrsh prints goes to files of the job's, and it reads nothing: so its agent dials back, by a text in
a file of this user's alone, in the job's directory. Where there is no pbs_tmrsh (Torque has none), ssh is used.
"""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO

from reigen.errors import ConfigError, LaunchError
from reigen.files import write_atomically
from reigen.launch.base import (
    AgentCaller,
    AgentCommand,
    AgentStarter,
    DialBackStarter,
    DialCall,
    HostProblem,
    JobPlan,
    explain_agent_exit,
    last_line,
)
from reigen.launch.batch import BatchJob, BatchLauncher, parse_host_lines, read_host_file
from reigen.launch.engines import EngineJob
from reigen.launch.options import LaunchOptions
from reigen.launch.ssh.launcher import SshAgentStarter
from reigen.launch.supervision.event_loop import LauncherLoop
from reigen.launch.supervision.spawn import CLIENT_END_SECONDS, spawn_client

_SHELL = "pbs_tmrsh"
_READ_BYTES = 1 << 14


class PbsLauncher(BatchLauncher):
    """Launcher in the job that the environment describes.

    Raises:
        ConfigError: this is no job of PBS's, or not enough of one, or there is neither pbs_tmrsh nor ssh.
    """

    #: A task's own numbers; a rank is no task.
    removed_variables = ("PBS_TASKNUM", "PBS_NODENUM", "PBS_VNODENUM")

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        job = find_allocation(environ)
        if job is None:
            raise ConfigError(
                "--launcher pbs: this process is in no job of PBS's (PBS_JOBID and PBS_NODEFILE are not set): run it "
                "in a script for qsub -l select=..."
            )
        has_shell = shutil.which(_SHELL, path=environ.get("PATH")) is not None
        self._agents: TaskStarter | SshAgentStarter = (
            TaskStarter(options.ssh.python) if has_shell else SshAgentStarter(options.ssh)
        )
        super().__init__(options, environ, job)

    def check_tools(self) -> None:
        """Raise ConfigError where there is neither pbs_tmrsh nor ssh."""
        check_engine(self.environ)

    @property
    def agents(self) -> AgentStarter | DialBackStarter:
        """Return the starter by pbs_tmrsh, or by ssh."""
        return self._agents

    def allocate(self, wait: Callable[[float], None]) -> JobPlan:
        """Return the plan: PBS has granted the hosts before."""
        return replace(super().allocate(wait), describe_notice=_describe_notice)


class TaskStarter:
    """Starter of agents by pbs_tmrsh, which dial back."""

    remote_shell: Sequence[str] = ()

    def __init__(self, python: str) -> None:
        self._python = python
        self._loop: LauncherLoop | None = None
        self._directory: Path | None = None
        self._num_calls = 0
        self._clients: dict[str, subprocess.Popen[bytes]] = {}
        #: Descriptors of the clients' processes, which can be waited for.
        self._handles: dict[str, int] = {}
        self._outputs: dict[str, bytes] = {}

    def start_agents(self, calls: Sequence[DialCall], agent: AgentCommand, caller: AgentCaller) -> None:
        """Start an agent in a task of the job for each call; raises LaunchError."""
        self._loop, self._directory = caller.loop, self._directory or _make_private_directory()
        for call in calls:
            self._end_client(call.host)  # of an agent that has gone
            file = self._directory / str(self._num_calls)
            self._num_calls += 1
            write_atomically(file, [f"{call.text}\n".encode()], mode=0o600)
            self._start(
                call.host, [*agent.argv_with_environ, *agent.argv_dialing(str(file))[len(agent.argv) :]], caller
            )

    def explain_exit(self, host: str, exit_code: int | None, output: str) -> HostProblem:
        """Explain the end of a task by the words of pbs_tmrsh; those of the agent are in the job's files."""
        output = output or self._outputs.get(host, b"").decode(errors="replace")
        if "--dial" in output:
            return HostProblem(
                host, f"the job's directory is not there ({last_line(output)})", "share it, or --launcher ssh"
            )
        if _SHELL in output:
            advice = f"try it by hand: {_SHELL} {host} hostname"
            return HostProblem(host, f"{_SHELL} failed: {last_line(output)}", advice)
        return explain_agent_exit(host, exit_code, output or "see the job's files of output", self._python)

    def close_agents(self) -> None:
        """End the tasks' clients, and remove the dial texts."""
        clients, self._clients = self._clients, {}
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            self._unwatch(handle)
            os.close(handle)
        for client in clients.values():
            for stream in (client.stdin, client.stdout, client.stderr):
                if stream is not None:
                    self._unwatch(stream)
                    stream.close()
        until = time.monotonic() + CLIENT_END_SECONDS
        for client in clients.values():
            try:
                client.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                client.kill()
                client.wait()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _end_client(self, host: str) -> None:
        """End the client of an earlier call of a host, if there was one."""
        client = self._clients.pop(host, None)
        if client is None:
            return
        if (handle := self._handles.pop(host, None)) is not None:
            self._unwatch(handle)
            os.close(handle)
        for stream in (client.stdin, client.stdout, client.stderr):
            if stream is not None:
                self._unwatch(stream)
                stream.close()
        client.kill()
        client.wait()

    def _start(self, host: str, words: Sequence[str], caller: AgentCaller) -> None:
        client = self._clients[host] = spawn_client([_SHELL, host, *map(shlex.quote, words)])
        caller.exclude_child(client.pid)
        self._outputs[host] = b""
        for stream in (client.stdout, client.stderr):
            assert stream is not None, "it was asked for"
            caller.loop.watch(stream, partial(self._read, host, stream))
        handle = self._handles[host] = os.pidfd_open(client.pid)
        caller.loop.watch(handle, partial(self._end, host, caller))

    def _read(self, host: str, stream: IO[bytes]) -> None:
        """Keep the last words of a client."""
        if data := os.read(stream.fileno(), _READ_BYTES):
            self._outputs[host] = (self._outputs[host] + data)[-_READ_BYTES:]
        else:
            self._unwatch(stream)

    def _unwatch(self, source: IO[bytes] | int) -> None:
        if self._loop is not None:
            self._loop.unwatch(source)

    def _end(self, host: str, caller: AgentCaller) -> None:
        handle = self._handles.pop(host)
        self._unwatch(handle)
        os.close(handle)
        caller.agent_ended(host, self.explain_exit(host, self._clients[host].wait(), ""))


def _make_private_directory() -> Path:
    """Make a directory of this user's alone, which the job's hosts share if they share the working directory."""
    name = f".reigen-{secrets.token_hex(8)}"
    reasons = []
    for parent in (Path.cwd(), Path.home()):
        try:
            (parent / name).mkdir(mode=0o700)
        except OSError as error:
            reasons.append(f"{parent}: {error.strerror}")
        else:
            return parent / name
    raise LaunchError(f"no file for the agents can be written: {', '.join(reasons)}; --launcher ssh needs none")


def find_allocation(environ: Mapping[str, str]) -> BatchJob | None:
    """Read the job that this process is in; None: it is in none. Raises ConfigError: the list cannot be read."""
    job_id, file = environ.get("PBS_JOBID"), environ.get("PBS_NODEFILE")
    if not job_id or not file:
        return None
    hosts = parse_host_lines(read_host_file(file, f"PBS_NODEFILE of PBS job {job_id}"), file)
    index = environ.get("PBS_ARRAY_INDEX") or environ.get("PBS_ARRAYID")
    remark = f"element {index} of an array, each of which is a job of its own" if index else ""
    return BatchJob("pbs", "PBS", job_id, "PBS_JOBID", hosts, "qsub -l select=HOSTS:ncpus=C:mpiprocs=C", remark)


def find_engine_job(environ: Mapping[str, str]) -> EngineJob | None:
    """Find PBS's job for `launch.engines`."""
    job = find_allocation(environ)
    return None if job is None else job.engine_job


def check_engine(environ: Mapping[str, str]) -> str:
    """Look whether agents can be started, for `launch.engines`; raises ConfigError where nothing can start them."""
    path = environ.get("PATH")
    if shutil.which(_SHELL, path=path) is not None:
        return ""
    if shutil.which("ssh", path=path) is None:
        raise ConfigError(
            f"this is a job of PBS's, but there is neither {_SHELL} nor ssh in PATH here, which start processes on its "
            "other hosts: add PBS_EXEC/bin to PATH"
        )
    return f"there is no {_SHELL} in PATH: ssh is used"


def _describe_notice(output: str) -> str:
    return "by PBS: the job is deleted (qdel) or preempted, or its walltime is over"
