"""Command line of ssh to other hosts. Decides, starts nothing."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reigen.errors import ConfigError

_CONNECT_SECONDS = 10
#: Seconds of ServerAliveInterval: ssh notices a dead connection after three of them, where nothing else does.
_ALIVE_SECONDS = 5


def check_identity_file(name: str | None) -> str | None:
    """Raise ConfigError if a private key's file does not exist, which ssh would ignore silently; return its name."""
    if name is not None and "%" not in name and not Path(name).expanduser().is_file():  # %: ssh fills in what it knows
        raise ConfigError(f"--ssh-identity-file {name}: there is no such file")
    return name


@dataclass(frozen=True, slots=True)
class SshOptions:
    """Options of ssh: its command, sshd's port and a private key (None: as ssh is configured), and the Python there.

    ``check_host_keys``: refuse hosts whose key is not known.

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

    def base(self, alive_seconds: int = _ALIVE_SECONDS) -> list[str]:
        """Return the command line up to the host's name; ``alive_seconds`` is ServerAliveInterval.

        BatchMode: never ask for anything, no user could answer. The rest is the user's configuration of ssh, which may
        define anything about a host, its name and its user too.
        """
        line = [*self.command, "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}"]
        line += ["-o", f"ServerAliveInterval={alive_seconds}", "-o", "ServerAliveCountMax=3"]
        if not self.check_host_keys:
            line += ["-o", "StrictHostKeyChecking=no"]
        if self.port is not None:
            line += ["-p", str(self.port)]
        if self.identity_file is not None:
            line += ["-i", self.identity_file]
        return line

    def remote(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs a program on ``host``."""
        # 0: the supervisor knows better which silence is one; where packets are lost, ssh may hear nothing for a minute
        return [*self.base(alive_seconds=0), "--", host, shlex.join(command)]
