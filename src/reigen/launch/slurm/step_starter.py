"""Agents of many nodes by one step of Slurm's: one srun, whose tasks dial back (`launch.agent.dial_back`).

An srun for each node costs a process and a few connections of this one; above some number that is too much. Here srun's
stdin goes to every task (``--input=all``): a line for each node, its name and its dial text. A task takes its own.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from reigen.launch.base import AgentCaller, AgentCommand, DialCall, HostProblem
from reigen.launch.slurm.allocation import SlurmAllocation
from reigen.launch.slurm.command import step_command
from reigen.launch.supervision.spawn import spawn_client

#: Variable of a task with its node's name, as in lists of nodes.
NODE_VARIABLE = "SLURMD_NODENAME"
_READ_BYTES = 1 << 14
#: Line of srun's --label: the task's number, and its text.
_LABEL = re.compile(r"^ *(\d+): (.*)$")
_LAST_SECONDS = 2.0


class SlurmStepStarter:
    """A ``DialBackStarter`` by one srun, or one for each component of a heterogeneous job.

    Args:
        allocation: the job's.
        environ: this process's.
        remote_shell: srun in the form of ssh, for rsync.
        explain: as ``AgentStarter.explain_exit``, from the words of srun and the agent.
    """

    def __init__(
        self,
        allocation: SlurmAllocation,
        environ: Mapping[str, str],
        remote_shell: Sequence[str],
        explain: Callable[[str, int | None, str], HostProblem],
    ) -> None:
        self._allocation, self._environ, self._explain = allocation, environ, explain
        self.remote_shell = remote_shell
        self._steps: list[_Step] = []

    def start_agents(self, calls: Sequence[DialCall], agent: AgentCommand, caller: AgentCaller) -> None:
        """Start one step with a task on each node."""
        order = {host.name: index for index, host in enumerate(self._allocation.hosts)}
        groups: dict[int | None, list[DialCall]] = {}
        for call in sorted(calls, key=lambda call: order[call.host]):
            groups.setdefault(self._allocation.groups.get(call.host), []).append(call)
        variables = [f"{name}={text}" for name, text in agent.environ.items()]
        for group, members in groups.items():
            words = [*agent.argv, "--dial-by", NODE_VARIABLE]
            hosts = [call.host for call in members]
            command = [*step_command(self._environ, hosts, group), *(["env", *variables] if variables else []), *words]
            text = "".join(f"{call.host} {call.text}\n" for call in members)
            self._steps.append(_Step(spawn_client(command), hosts, text.encode(), caller, self._explain))

    def explain_exit(self, host: str, exit_code: int | None, output: str) -> HostProblem:
        """Explain the end of a task by what it and srun have said."""
        step = next(step for step in self._steps if host in step.hosts)
        return self._explain(host, step.exit_code, step.output_of(host))

    def close_agents(self) -> None:
        """End the steps: the tasks' stdin ends, and so do agents that are still there."""
        for step in self._steps:
            step.close()


class _Step:
    """One srun and its output."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        hosts: Sequence[str],
        text: bytes,
        caller: AgentCaller,
        explain: Callable[[str, int | None, str], HostProblem],
    ) -> None:
        self.hosts = hosts
        self._process, self._caller, self._explain = process, caller, explain
        self._pending = bytearray(text)
        self._output: deque[bytes] = deque(maxlen=256)
        assert process.stdin is not None, "it was asked for"
        assert process.stdout is not None, "it was asked for"
        assert process.stderr is not None, "it was asked for"
        self._stdin, self._files = process.stdin, [process.stdout, process.stderr]
        caller.exclude_child(process.pid)
        for file in (self._stdin, *self._files):
            os.set_blocking(file.fileno(), False)
        for file in self._files:
            caller.loop.watch(file, partial(self._read, file.fileno()))
        caller.loop.watch(self._stdin, on_writable=self._write)

    @property
    def exit_code(self) -> int | None:
        """Exit code of srun; None: it runs."""
        return self._process.poll()

    def output_of(self, host: str) -> str:
        """Return srun's own lines, and those of a host's task."""
        number = self.hosts.index(host)
        lines = []
        for line in b"".join(self._output).decode(errors="replace").splitlines():
            match = _LABEL.match(line)
            if match is None:
                lines.append(line)
            elif int(match[1]) == number:
                lines.append(match[2])
        return "\n".join(lines)

    def close(self) -> None:
        """Close its stdin, and wait for its end, or kill it. May be called twice."""
        for file in (self._stdin, *self._files):
            if not file.closed:
                self._caller.loop.unwatch(file)
        if not self._stdin.closed:
            self._stdin.close()
        try:
            self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for file in self._files:
            file.close()

    def _write(self) -> None:
        try:
            while self._pending:
                del self._pending[: os.write(self._stdin.fileno(), self._pending)]
        except BlockingIOError:
            return
        except OSError:  # its end is seen by reading
            self._pending.clear()
        self._caller.loop.unwatch(self._stdin)  # and left open: its end would end the agents

    def _read(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._output.append(data)
            return
        self._caller.loop.unwatch(descriptor)
        if any(self._caller.loop.watches(file) for file in self._files):
            return
        try:
            self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            return  # it goes on without its output: agents are heard of by their connections
        for host in self.hosts:
            self._caller.agent_ended(host, self._explain(host, self._process.returncode, self.output_of(host)))
