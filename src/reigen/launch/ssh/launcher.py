"""Launcher that reaches other hosts by ssh."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from reigen.launch.base import AgentCommand, HostProblem, explain_agent_exit, last_line
from reigen.launch.local import FixedLauncher
from reigen.launch.options import LaunchOptions
from reigen.launch.ssh.command import SshOptions
from reigen.launch.supervision.spawn import spawn_client

#: Exit code of ssh when the connection failed; all others are the remote command's.
SSH_FAILED_EXIT_CODE = 255
#: Pattern of ssh's message, meaning and advice; the first that matches holds.
_SSH_PROBLEMS = (
    (r"could not resolve hostname", "no such host: its name cannot be resolved", "check the spelling"),
    (r"connection refused", "it refuses the connection", "is sshd running there, and on that port? --ssh-port"),
    (r"timed out|timeout, server", "it does not answer", "is it up, and does a firewall let ssh through?"),
    (r"no route to host|network is unreachable", "it cannot be reached", "is it up, and is it on this network?"),
    (
        r"host identification has changed",
        "its host key is not the one that is known",
        "if the host was reinstalled, remove its old key: ssh-keygen -R HOST; else the connection may be intercepted",
    ),
    (
        r"host key verification failed|no .*host key is known",
        "its host key is not known",
        "log in once yourself and compare the key, or use --ssh-no-host-key-check",
    ),
    (r"permission denied", "it refuses the login", "a key must be enough: ssh-copy-id, --ssh-identity-file"),
    (r"identity file .* not accessible", "the identity file cannot be read", "check --ssh-identity-file"),
)


class SshAgentStarter:
    """Agents by ssh: their messages go through its stdin and stdout."""

    def __init__(self, ssh: SshOptions) -> None:
        self._ssh = ssh

    @property
    def remote_shell(self) -> Sequence[str]:
        """Return ssh's command line before the host."""
        return self._ssh.base()

    def start_agent(self, host: str, agent: AgentCommand) -> subprocess.Popen[bytes]:
        """Start the agent by ssh."""
        return spawn_client(self._ssh.remote(host, agent.argv_with_environ))

    def explain_exit(self, host: str, exit_code: int | None, output: str) -> HostProblem:
        """Explain the end of ssh, or of the agent."""
        if exit_code != SSH_FAILED_EXIT_CODE:
            return explain_agent_exit(host, exit_code, output, self._ssh.python)
        last = last_line(output)
        for pattern, what, advice in _SSH_PROBLEMS:
            if re.search(pattern, output, re.IGNORECASE):
                return HostProblem(host, f"{what} ({last})", advice.replace("HOST", host))
        return HostProblem(host, f"ssh failed: {last or 'it did not say why'}", f"try it by hand: ssh {host} true")


def ssh_launcher(options: LaunchOptions, environ: Mapping[str, str]) -> FixedLauncher:
    """Make the launcher; this host, where it is among those that the user names, is used without ssh."""
    return FixedLauncher(options, SshAgentStarter(options.ssh))
