"""Settings of `reigen.run` from its many arguments. Decides and explains; no I/O but a host file."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import msgspec

from reigen.errors import ConfigError
from reigen.launch.base import find_launcher
from reigen.launch.engines import choose_launcher_in_engine
from reigen.launch.hosts import HostInfo, check_fixed_size, check_slots, resolve_hosts
from reigen.launch.ssh.command import SshOptions

#: Accepted for the sake of existing calls.
_WITHOUT_EFFECT = ("use_gloo", "use_mpi", "mpi_args", "disable_cache", "slots", "reset_limit", "cooldown_range")


class RunSettings(msgspec.Struct, frozen=True):
    """Settings of a job, with all defaults filled in, as the launcher's process gets them. Nothing in it is secret.

    Attributes:
        executable: the Python of the ranks, or None for this one.
        network_interfaces: those that may be used, with commas between them; None: as in the environment.
    """

    num_ranks: int
    start_timeout_seconds: float | None
    output_directory: str | None
    verbose: bool
    executable: str | None
    hosts: tuple[HostInfo, ...]
    ssh_port: int | None
    ssh_identity_file: str | None
    network_interfaces: str | None
    launcher: str
    prefix: bool = True
    timestamps: bool = False
    grace_seconds: float = 5.0


def resolve_arguments(arguments: Mapping[str, Any]) -> tuple[RunSettings, str]:
    """Resolve the arguments of ``run`` but the function's own; returns a warning, too, about those without effect.

    Raises:
        ConfigError: an argument makes no sense, or asks for what is not possible yet.
    """
    directory = arguments["output_filename"]
    num_ranks = _num_ranks(arguments["num_proc"])
    bounds = {"min_num_proc": arguments["min_num_proc"], "max_num_proc": arguments["max_num_proc"]}
    check_fixed_size(num_ranks, bounds, "host_discovery_script" if arguments["host_discovery_script"] else None)
    if arguments["hosts"] is not None and arguments["hostfile"] is not None:
        raise ConfigError("hosts and hostfile are two ways to say the same thing: give one of them")
    has_hosts = arguments["hosts"] is not None or arguments["hostfile"] is not None
    choice = choose_launcher_in_engine(arguments["launcher"], os.environ, has_hosts=has_hosts)
    launcher, hosts = choice.launcher, []
    if not choice.uses_hosts_of_engine:
        hosts = resolve_hosts(arguments["hosts"], arguments["hostfile"], num_ranks)
        check_slots(hosts, num_ranks)
    SshOptions(port=arguments["ssh_port"])  # raises
    find_launcher(launcher)  # raises
    timeout = arguments["start_timeout"]
    if timeout is not None and not 0 < timeout < 1e9:
        raise ConfigError(f"start_timeout must be a number of seconds greater than 0, not {timeout!r}")
    settings = RunSettings(
        num_ranks,
        timeout,
        None if directory is None else os.fspath(directory),
        bool(arguments["verbose"]),
        arguments["executable"],
        tuple(hosts),
        arguments["ssh_port"],
        arguments["ssh_identity_file"],
        _join_interfaces(arguments["network_interface"], arguments["network_interfaces"]),
        launcher,
    )
    without_effect = [name for name in _WITHOUT_EFFECT if arguments[name] not in (None, False)]
    return settings, f"no effect: {', '.join(without_effect)}" if without_effect else ""


def _join_interfaces(*spellings: object) -> str | None:
    names: list[str] = []
    for value in spellings:
        if isinstance(value, str):
            names += value.split(",")
        elif isinstance(value, Sequence):
            names += map(str, value)
    return ",".join(names) or None


def _num_ranks(num_proc: SupportsIndex) -> int:
    try:
        num_ranks = operator.index(num_proc)
    except TypeError:
        raise ConfigError(f"num_proc must be a number of processes, not {num_proc!r}") from None
    if num_ranks < 1:
        raise ConfigError(f"num_proc must be at least 1, not {num_ranks}")
    return num_ranks
