"""Other hosts by ssh: command lines, and what a failed one means. Decides, starts nothing."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from reigen.errors import ConfigError

_CONNECT_SECONDS = 10
#: How soon ssh itself notices a dead connection, in case that nobody else does: 3 times 5 seconds.
_ALIVE_SECONDS = 5
#: What ssh exits with when the connection failed; everything else is the remote command's.
SSH_FAILED = 255


def key_file(name: str | None) -> str | None:
    """A private key's file, as the user names it, which ssh would pass over in silence if it were not there.

    Raises:
        ConfigError: there is no such file.
    """
    if name is not None and "%" not in name and not Path(name).expanduser().is_file():  # %: ssh fills in what it knows
        raise ConfigError(f"--ssh-identity-file {name}: there is no such file")
    return name


@dataclass(frozen=True, slots=True)
class Ssh:
    """How other hosts are reached.

    Attributes:
        command: the program, with options of its own.
        port: where sshd listens, None for what ssh's configuration says.
        identity_file: a private key, None for what ssh's configuration says.
        check_host_keys: refuse hosts whose key is not known.
        python: the interpreter there.

    Raises:
        ConfigError: one of them makes no sense.
    """

    command: tuple[str, ...] = ("ssh",)
    port: int | None = None
    identity_file: str | None = None
    check_host_keys: bool = True
    python: str = field(default=sys.executable)

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("the ssh command is empty")
        if self.port is not None and not 0 < self.port < 1 << 16:
            raise ConfigError(f"the ssh port must be from 1 to 65535, not {self.port}")

    def base(self) -> list[str]:
        """The command line up to the host's name.

        BatchMode: never ask for anything, nobody could answer. The rest is the user's configuration of ssh, which may
        say anything about a host, its name and its user too.
        """
        line = [*self.command, "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}"]
        line += ["-o", f"ServerAliveInterval={_ALIVE_SECONDS}", "-o", "ServerAliveCountMax=3"]
        if not self.check_host_keys:
            line += ["-o", "StrictHostKeyChecking=no"]
        if self.port is not None:
            line += ["-p", str(self.port)]
        if self.identity_file is not None:
            line += ["-i", self.identity_file]
        return line

    def agent(self, host: str, environ: Mapping[str, str]) -> list[str]:
        """The command line that runs the agent on ``host``.

        Everybody on both hosts can read it, so nothing is on it but where Python finds its modules: the rest of the
        environment, and the secret, come through its stdin.
        """
        # -P: a module of the working directory, the user's home, is nobody's joke.
        words = [self.python, "-P", "-m", "reigen.launch.agent"]
        path = [str(Path(entry).absolute()) for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        if path:  # absolute: ssh begins in the user's home
            words = ["env", f"PYTHONPATH={os.pathsep.join(path)}", *words]
        return [*self.base(), "--", host, shlex.join(words)]


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a host cannot take part.

    Attributes:
        host: which.
        what: what is wrong.
        advice: what to do about it; or empty.
    """

    host: str
    what: str
    advice: str = ""


#: What ssh says, what that means, and what to do; the first one that is found holds.
_OF_SSH = (
    (r"could not resolve hostname", "no such host: its name cannot be resolved", "check the spelling"),
    (r"connection refused", "it refuses the connection", "is sshd running there, and on that port? --ssh-port"),
    (r"timed out|timeout, server", "it does not answer", "is it up, and does a firewall let ssh through?"),
    (r"no route to host|network is unreachable", "it cannot be reached", "is it up, and is it on this network?"),
    (
        r"host identification has changed",
        "its host key is not the one that is known",
        "if the host was set up anew, remove its old key: ssh-keygen -R HOST; else somebody may be listening in",
    ),
    (
        r"host key verification failed|no .*host key is known",
        "its host key is not known",
        "log in once by hand and compare the key, or say --ssh-no-host-key-check",
    ),
    (r"permission denied", "it refuses the login", "a key must be enough: ssh-copy-id, --ssh-identity-file"),
    (r"identity file .* not accessible", "the identity file cannot be read", "check --ssh-identity-file"),
)
_OF_PYTHON = (
    (r"unknown option:? -P|no such option: -P", "its Python is older than 3.11", "name another: --remote-python"),
    (r"No module named '?reigen\.", "another Reigen is installed there", "install the same version on all hosts"),
    (r"No module named '?reigen'?", "Reigen is not installed there", "install the same version on all hosts"),
    (r"No module named '?(\w+)'?", "a library that Reigen needs is not installed there", "install Reigen with pip"),
)


def explain(host: str, exit_code: int | None, said: str, ssh: Ssh) -> Problem:
    """What it means that an agent ended before it had greeted.

    Args:
        host: where it was to run.
        exit_code: of ssh; None: it had to be ended.
        said: what came on stderr.
        ssh: how it was called.
    """
    last = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "")
    for pattern, what, advice in _OF_SSH if exit_code == SSH_FAILED else _OF_PYTHON:
        if re.search(pattern, said, re.IGNORECASE):
            return Problem(host, f"{what} ({last})" if last else what, advice.replace("HOST", host))
    if exit_code in {126, 127}:
        return Problem(host, f"there is no {ssh.python} ({last})", "name the Python there: --remote-python")
    if exit_code == SSH_FAILED:
        return Problem(host, f"ssh failed: {last or 'it did not say why'}", f"try it by hand: ssh {host} true")
    return Problem(host, f"the agent ended with exit code {exit_code}: {last or 'it did not say why'}")
