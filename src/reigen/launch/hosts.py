"""Where a job was asked to run, on how many processes, and whether that can be done: so far, on this host alone.

Lists of hosts come as on a command line (``h1:2,h2:4``) and in a file (``h1 slots=2``).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reigen.errors import ConfigError

#: Names that mean this host everywhere.
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_ENTRY = re.compile(r"(?P<name>[^\s:,=]+|\[?::1\]?)(?::(?P<slots>[1-9]\d*))?")
_LINE = re.compile(r"(?P<name>[^\s:,=]+|\[?::1\]?)(?:\s+slots\s*=\s*(?P<slots>[1-9]\d*)|:(?P<colon>[1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class Host:
    """A host and how many ranks may run there."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[Host]:
    """The hosts of ``h1:2,h2``; without a number, one slot.

    Raises:
        ConfigError: an entry has another form.

    Example:
        >>> parse_hosts("localhost:4")
        [Host(name='localhost', slots=4)]
    """
    hosts = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise ConfigError(f"hosts {text!r}: {entry.strip()!r} is not of the form name or name:slots")
        hosts.append(Host(match["name"].strip("[]"), int(match["slots"] or 1)))
    return hosts


def parse_hostfile(text: str) -> list[Host]:
    """The hosts of a host file: a line each, ``name slots=n`` or ``name:n``; ``#`` begins a comment.

    Raises:
        ConfigError: a line has another form, or there is none.
    """
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            raise ConfigError(f"line {number} of the host file is {line.strip()!r}, not of the form 'name slots=n'")
        hosts.append(Host(match["name"].strip("[]"), int(match["slots"] or match["colon"] or 1)))
    if not hosts:
        raise ConfigError("the host file names no host")
    return hosts


def check_all_here(hosts: Sequence[Host], num_ranks: int, names_here: Collection[str]) -> None:
    """Make sure that ``hosts`` are this host alone, and have a slot for each rank.

    Args:
        hosts: what was asked for.
        num_ranks: how many processes.
        names_here: the names and addresses of this host, besides localhost.

    Raises:
        ConfigError: another host, which is not possible yet, or too few slots.
    """
    strangers = [host.name for host in hosts if host.name not in _LOCAL_NAMES and host.name not in names_here]
    if strangers:
        raise ConfigError(
            f"hosts: {', '.join(dict.fromkeys(strangers))}: a job runs on the host that starts it, so far; "
            f"leave the hosts out, or say localhost:{num_ranks}"
        )
    num_slots = sum(host.slots for host in hosts)
    if num_slots < num_ranks:
        raise ConfigError(f"the hosts have {num_slots} slots, and {num_ranks} processes were asked for")


def check_hosts(num_ranks: int, listed: str | None, file: str | os.PathLike[str] | None) -> None:
    """Make sure that the hosts of a list, or of a file, are this one, and have a slot for each rank.

    Raises:
        ConfigError: they are not, or the file cannot be read.
    """
    if listed is not None:
        hosts = parse_hosts(listed)
    elif file is not None:
        try:
            hosts = parse_hostfile(Path(file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"hostfile {os.fspath(file)!r} cannot be read: {error}") from error
    else:
        return
    name = socket.gethostname()
    check_all_here(hosts, num_ranks, {name, name.partition(".")[0]})


def check_fixed_size(num_ranks: int, bounds: Mapping[str, int | None], discovery: str | None) -> None:
    """Make sure that a job of ``num_ranks`` processes, no more and no fewer, is what was asked for.

    Args:
        num_ranks: how many processes.
        bounds: how few and how many they may be, by the name under which the user said it; None where he did not.
        discovery: how he asked for hosts to be discovered; None: he did not.

    Raises:
        ConfigError: an elastic job was asked for.
    """
    asked = [f"{name}={value}" for name, value in bounds.items() if value not in {None, num_ranks}]
    asked += [] if discovery is None else [discovery]
    if asked:
        raise ConfigError(
            f"{', '.join(asked)}: elastic jobs, whose number of processes changes, are not possible yet; "
            f"leave it out to run {num_ranks} processes from beginning to end"
        )
