"""A launcher for tests: its engine has made-up hosts, and starts their agents as plain processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from reigen.launch.base import AgentCommand, HostProblem, JobPlan, assign_processes, explain_agent_exit
from reigen.launch.options import LaunchOptions
from reigen.launch.supervision.process_tree import find_descendants
from reigen.launch.supervision.spawn import spawn_client

#: In the environment of a host's agent, by which its processes are found.
HOST_VARIABLE = "PLAIN_HOST"


class PlainLauncher:
    """Both a ``Launcher`` and its ``AgentStarter``: six members."""

    remote_shell = ()

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        self.options = options
        self._assignments = assign_processes(options)
        self._remnants: list[str] = []

    def allocate(self, wait: Callable[[float], None]) -> JobPlan:
        wait(0.0)  # as an engine that has to grant hosts would
        if "PLAIN_LEFT" in os.environ:
            self._remnants.append(f"allocation {os.environ['PLAIN_LEFT']} is left: free {os.environ['PLAIN_LEFT']}")
        while "PLAIN_QUEUE" in os.environ:  # nothing is ever granted
            os.write(2, b"waiting\n")
            wait(0.5)
        # no name server knows the hosts
        addresses = {each.host: "127.0.0.1" for each in self._assignments}
        return JobPlan(self._assignments, self, addresses)

    def start_agent(self, host: str, agent: AgentCommand) -> subprocess.Popen[bytes]:
        return spawn_client(["env", f"{HOST_VARIABLE}={host}", *agent.argv_with_environ])

    def explain_exit(self, host: str, exit_code: int | None, said: str) -> HostProblem:
        return explain_agent_exit(host, exit_code, said, self.options.ssh.python)

    def close(self) -> list[str]:
        remnants, self._remnants = self._remnants, []
        return remnants


def find_agents(host: str = "") -> set[int]:
    """Find the processes of a host's agent, of all hosts by default."""
    found, mark = set(), f"\0{HOST_VARIABLE}={host}".encode()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended
            if entry.name.isdigit() and mark in b"\0" + (entry / "environ").read_bytes():
                found.add(int(entry.name))
    return found


def kill_host(host: str) -> None:
    """End all processes of a made-up host at once."""
    agents = find_agents(host)
    processes = agents.union(*(find_descendants(agent) for agent in agents))
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)


def cancel_job(signum: int = signal.SIGTERM) -> bool:
    """End the agents of all hosts, as an engine does whose user cancels a job."""
    agents = find_agents()
    for pid in agents:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
    return bool(agents)
