"""Agents of many nodes by one step of Slurm's: one srun, whose tasks dial back (`launch.agent.dial_back`).

An srun for each node costs a process and a few connections of this one; above some number that is too much. Here srun's
stdin goes to every task (``--input=all``): a line for each node, its name and its dial text. A task takes its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from reigen.errors import ConfigError
from reigen.launch.base import AgentCaller, AgentCommand, DialCall, HostProblem
from reigen.launch.slurm.allocation import SlurmAllocation
from reigen.launch.slurm.command import step_command
from reigen.launch.slurm.node_list import expand_node_list
from reigen.launch.supervision.spawn import spawn_client

#: Variable of a task with its node's name, as in lists of nodes.
NODE_VARIABLE = "SLURMD_NODENAME"
_READ_BYTES = 1 << 14
#: Line of srun's --label: the task's number, and its text.
_LABEL = re.compile(r"^ *(\d+): (.*)$")
#: srun's words about nodes of a step that goes on without them.
_ABOUT_NODES = re.compile(r"^srun: error: (?:(\S+): tasks? [\d,-]+: |.*\b(?:on|node) ([^\s:;,\[]+(?:\[[^]]*\])?))")
_CANCELLED = re.compile(r"\*\*\* STEP \S+ ON \S+ CANCELLED")
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
_LAST_SECONDS = 2.0
#: Seconds that a task's last words may come later than srun's about its end.
_WORDS_SECONDS = 0.3
#: Most lines about a node, and bytes of one.
_MAX_LINES, _MAX_LINE_BYTES = 64, 1 << 12


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
        """Start one step with a task on each node; earlier steps say nothing more about these."""
        for step in self._steps:
            step.leave({call.host for call in calls})
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
        """Explain the end of a task by its output and srun's."""
        return next(step for step in reversed(self._steps) if host in step.hosts).explain(host)

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
        #: Lines about each host, and srun's about none in particular.
        self._lines: dict[str, deque[str]] = {host: deque(maxlen=_MAX_LINES) for host in hosts}
        self._common: deque[str] = deque(maxlen=_MAX_LINES)
        #: Exit code of each host's task that has ended, None where a signal ended it; hosts that have failed.
        self._ended: dict[str, int | None] = {}
        self._failed: dict[str, None] = {}
        #: Hosts that are a later step's.
        self._left: set[str] = set()
        assert process.stdin is not None, "it was asked for"
        assert process.stdout is not None, "it was asked for"
        assert process.stderr is not None, "it was asked for"
        self._stdin, self._files = process.stdin, [process.stdout, process.stderr]
        caller.exclude_child(process.pid)
        for file in (self._stdin, *self._files):
            os.set_blocking(file.fileno(), False)
        for file in self._files:
            caller.loop.watch(file, partial(self._read, file.fileno(), bytearray()))
        caller.loop.watch(self._stdin, on_writable=self._write)

    def explain(self, host: str) -> HostProblem:
        """Explain why a host's task has not come, or has ended, by its output and srun's."""
        code = self._process.poll()
        common = [] if host in self._ended or host in self._failed else self._common
        lines = [*common, *self._lines[host]]
        if self._failed and host not in self._failed and (code is not None or any(map(_CANCELLED.search, lines))):
            return HostProblem(host, f"srun has ended the step of all nodes because of {', '.join(self._failed)}")
        return self._explain(host, self._ended.get(host, code), "\n".join(lines))

    def leave(self, hosts: Collection[str]) -> None:
        """Report nothing more about these hosts."""
        self._left.update(hosts)

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

    def _read(self, descriptor: int, partial_line: bytearray) -> None:
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        partial_line += data
        is_whole = not data or len(partial_line) > _MAX_LINE_BYTES
        *lines, rest = (bytes(partial_line) + (b"\n" if is_whole else b"")).split(b"\n")
        partial_line[:] = rest
        for line in lines:
            self._take(line[:_MAX_LINE_BYTES].decode(errors="replace"))
        if not data:
            self._end(descriptor)

    def _take(self, line: str) -> None:
        """Keep a line for the hosts that it is about."""
        if label := _LABEL.match(line):
            if int(label[1]) < len(self.hosts):
                self._keep(self.hosts[int(label[1])], label[2])
            return
        about = _ABOUT_NODES.match(line)
        hosts = [] if about is None else self._expand(about[1] or about[2])
        for host in hosts:
            if about is not None and about[1]:
                code = _EXIT_CODE.search(line)
                self._ended.setdefault(host, None if code is None else int(code[1]))
            else:
                self._failed[host] = None
            self._keep(host, line)
            self._caller.loop.call_at(time.monotonic() + _WORDS_SECONDS, partial(self._report, host))
        if not hosts and line:
            self._common.append(line)
            for host in self.hosts:
                self._caller.agent_printed(host, line)

    def _expand(self, names: str) -> list[str]:
        """Return the hosts of this step in a list of srun's."""
        try:
            return [name for name in expand_node_list(names) if name in self._lines]
        except ConfigError:
            return []

    def _keep(self, host: str, line: str) -> None:
        self._lines[host].append(line)
        self._caller.agent_printed(host, line)

    def _report(self, host: str) -> None:
        if host not in self._left:
            self._caller.agent_ended(host, self.explain(host))

    def _end(self, descriptor: int) -> None:
        self._caller.loop.unwatch(descriptor)
        if any(self._caller.loop.watches(file) for file in self._files):
            return
        try:
            self._process.wait(_LAST_SECONDS)
        except subprocess.TimeoutExpired:
            return  # it goes on without its output: agents are heard of by their connections
        for host in self.hosts:
            self._report(host)
