"""Self-start for tests: the supervisor is node 0, and the made-up engine starts the same command as node 1 here."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from reigen.cluster.bootstrap.job_credentials import SECRET_FILE_VARIABLE
from reigen.launch.base import AgentCaller, AgentCommand, DialCall, JobPlan
from reigen.launch.nodes.kubernetes import LEADER_VARIABLE, NODES_VARIABLE
from reigen.launch.nodes.launcher import NodesLauncher, SelfStart, _Tickets
from reigen.launch.options import LaunchOptions

_NUM_NODES = 2


class StartedNodes(NodesLauncher):
    """Launcher of node 0, which starts the others: an engine would do both."""

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        self._directory = Path(tempfile.mkdtemp())
        file = self._directory / "secret"
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(32))
        self._variables = {
            NODES_VARIABLE: str(_NUM_NODES),
            LEADER_VARIABLE: "127.0.0.1",
            SECRET_FILE_VARIABLE: str(file),
        }
        self._nodes: list[subprocess.Popen[bytes]] = []
        environ = {**environ, **self._variables, "JOB_COMPLETION_INDEX": "0"}
        start = SelfStart(environ, options.num_ranks)
        super().__init__(start, options, _Tickets.of(start.job, environ))

    def allocate(self, wait: Callable[[float], None]) -> JobPlan:
        for index in range(1, _NUM_NODES):
            command = [sys.executable, "-m", "reigen", "run", "--nodes-from-env", "-np", str(self.options.num_ranks)]
            environ = {**os.environ, **self._variables, "JOB_COMPLETION_INDEX": str(index)}
            node = subprocess.Popen(
                [*command, "true"],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._nodes.append(node)
        return super().allocate(wait)

    def start_agents(self, calls: Sequence[DialCall], agent: AgentCommand, caller: AgentCaller) -> None:
        for node in self._nodes:
            caller.exclude_child(node.pid)
        super().start_agents(calls, agent, caller)

    def close(self) -> tuple[str, ...]:
        left = super().close()
        for node in self._nodes:
            node.terminate()
            node.wait()
        self._nodes.clear()
        shutil.rmtree(self._directory, ignore_errors=True)
        return left
