"""What the many arguments of `reigen.run` come to on one host. Decides and explains; no I/O but a host file."""

from __future__ import annotations

import operator
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsIndex

from reigen.errors import ConfigError
from reigen.launch.hosts import check_all_here, parse_hostfile, parse_hosts

#: Accepted for the sake of existing calls. There is one transport between processes of a host, and no ssh.
_WITHOUT_EFFECT = (
    "use_gloo",
    "use_mpi",
    "mpi_args",
    "disable_cache",
    "ssh_port",
    "ssh_identity_file",
    "network_interface",
    "network_interfaces",
    "slots",
    "reset_limit",
    "cooldown_range",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of ``run`` but the function's own; their meaning stands there."""

    num_proc: SupportsIndex
    min_num_proc: int | None
    max_num_proc: int | None
    slots: int | None
    reset_limit: int | None
    cooldown_range: object
    hosts: str | None
    hostfile: str | os.PathLike[str] | None
    host_discovery_script: str | None
    start_timeout: float | None
    ssh_port: int | None
    ssh_identity_file: str | None
    disable_cache: bool | None
    output_filename: str | os.PathLike[str] | None
    verbose: int | None
    use_gloo: bool | None
    use_mpi: bool | None
    mpi_args: str | None
    network_interface: str | None
    network_interfaces: object
    executable: str | None


@dataclass(frozen=True, slots=True)
class Settings:
    """What is done."""

    num_ranks: int
    start_timeout_seconds: float | None
    output_directory: str | None
    verbose: bool
    executable: str | None


def settle(arguments: Arguments) -> tuple[Settings, str]:
    """What is done, and a warning about what was asked for and has no effect; empty where there is nothing.

    Raises:
        ConfigError: an argument makes no sense, or asks for what is not possible yet.
    """
    num_ranks = _num_ranks(arguments.num_proc)
    _check_static(arguments, num_ranks)
    _check_hosts(arguments, num_ranks)
    timeout = arguments.start_timeout
    if timeout is not None and not 0 < timeout < 1e9:
        raise ConfigError(f"start_timeout must be a number of seconds greater than 0, not {timeout!r}")
    directory = arguments.output_filename
    settings = Settings(
        num_ranks,
        timeout,
        None if directory is None else os.fspath(directory),
        bool(arguments.verbose),
        arguments.executable,
    )
    idle = [name for name in _WITHOUT_EFFECT if getattr(arguments, name) not in (None, False)]
    return settings, f"no effect on a job of one host: {', '.join(idle)}" if idle else ""


def _num_ranks(num_proc: SupportsIndex) -> int:
    try:
        num_ranks = operator.index(num_proc)
    except TypeError:
        raise ConfigError(f"num_proc must be a number of processes, not {num_proc!r}") from None
    if num_ranks < 1:
        raise ConfigError(f"num_proc must be at least 1, not {num_ranks}")
    return num_ranks


def _check_static(arguments: Arguments, num_ranks: int) -> None:
    """A job whose size may change is not possible yet; bounds that leave it no choice are."""
    bounds = {"min_num_proc": arguments.min_num_proc, "max_num_proc": arguments.max_num_proc}
    asked = [f"{name}={value}" for name, value in bounds.items() if value not in (None, num_ranks)]
    if arguments.host_discovery_script is not None:
        asked.append("host_discovery_script")
    if asked:
        raise ConfigError(
            f"{', '.join(asked)}: elastic jobs, whose number of processes changes, are not possible yet; "
            f"leave it out to run {num_ranks} processes from beginning to end"
        )


def _check_hosts(arguments: Arguments, num_ranks: int) -> None:
    if arguments.hosts is not None and arguments.hostfile is not None:
        raise ConfigError("hosts and hostfile are two ways to say the same thing: give one of them")
    if arguments.hosts is not None:
        hosts = parse_hosts(arguments.hosts)
    elif arguments.hostfile is not None:
        try:
            hosts = parse_hostfile(Path(arguments.hostfile).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"hostfile {os.fspath(arguments.hostfile)!r} cannot be read: {error}") from error
    else:
        return
    name = socket.gethostname()
    check_all_here(hosts, num_ranks, {name, name.partition(".")[0]})
