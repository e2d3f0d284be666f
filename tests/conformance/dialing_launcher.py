"""A launcher for tests whose agents dial back: its engine has made-up hosts, and starts their agents here."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from reigen.launch.base import (
    AgentCaller,
    AgentCommand,
    DialCall,
    HostProblem,
    JobPlan,
    assign_processes,
    explain_agent_exit,
)
from reigen.launch.options import LaunchOptions
from reigen.launch.supervision.spawn import spawn_client
from tests.conformance.plain_launcher import HOST_VARIABLE


class DialingLauncher:
    """Both a ``Launcher`` and its ``DialBackStarter``."""

    remote_shell = ()

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        self.options = options
        self._assignments = assign_processes(options)
        self._clients: dict[str, subprocess.Popen[bytes]] = {}
        self._stderr: dict[str, bytearray] = {}

    def allocate(self, wait: Callable[[float], None]) -> JobPlan:
        addresses = {each.host: "127.0.0.1" for each in self._assignments}
        return JobPlan(self._assignments, self, addresses)

    def start_agents(self, calls: Sequence[DialCall], agent: AgentCommand, caller: AgentCaller) -> None:
        for call in calls:
            self.start_one(call, agent, caller)

    def start_one(self, call: DialCall, agent: AgentCommand, caller: AgentCaller) -> None:
        environ = [f"{name}={text}" for name, text in [*agent.environ.items(), (HOST_VARIABLE, call.host)]]
        client = self._clients[call.host] = spawn_client(["env", *environ, *agent.argv_dialing()])
        caller.exclude_child(client.pid)
        self._stderr[call.host] = bytearray()
        assert client.stdin is not None
        assert client.stderr is not None
        with suppress(BrokenPipeError):  # it has ended already, and its stderr says why
            client.stdin.write(call.text.encode() + b"\n")
        caller.loop.watch(client.stderr, partial(self._read, call.host, caller))

    def _read(self, host: str, caller: AgentCaller) -> None:
        client = self._clients[host]
        assert client.stderr is not None
        if data := client.stderr.read(1 << 12):
            self._stderr[host] += data
            return
        caller.loop.unwatch(client.stderr)
        caller.agent_ended(host, self.explain_exit(host, client.wait(), self._stderr[host].decode()))

    def explain_exit(self, host: str, exit_code: int | None, output: str) -> HostProblem:
        output = output or self._stderr[host].decode()
        return explain_agent_exit(host, exit_code, output, self.options.ssh.python)

    def close_agents(self) -> None:
        clients, self._clients = self._clients, {}
        for client in clients.values():
            for file in (client.stdin, client.stdout, client.stderr):
                assert file is not None
                file.close()
            client.wait()

    def close(self) -> tuple[str, ...]:
        return ()
