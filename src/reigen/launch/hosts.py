"""Hosts of a job, their slots, and the placement of ranks on them.

Lists of hosts come as on a command line (``h1:2,h2:4``) and in a file (``h1 slots=2``).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from reigen.cluster.topology import Topology
from reigen.errors import ConfigError
from reigen.launch.ps_processes import PsProcess, PsRole, ServerOptions, list_ps_processes
from reigen.net.interfaces import choose_address

#: Names that mean this host everywhere.
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_FIRST_UNPRIVILEGED_PORT = 1024
_SSH_PORT = 22
#: An address of IPv6 stands in brackets, for its colons; that of this host may also stand without.
_NAME = r"(?P<name>[^\s:,=\[\]]+|\[[\w:.%]+\]|::1)"
_ENTRY = re.compile(rf"{_NAME}(?::(?P<slots>[1-9]\d*))?")
_LINE = re.compile(rf"{_NAME}(?:\s+slots\s*=\s*(?P<slots>[1-9]\d*)|:(?P<colon>[1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class HostInfo:
    """Host with its number of slots for ranks."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[HostInfo]:
    """Parse ``h1:2,h2``; without a number, one slot.

    Raises:
        ConfigError: an entry has another form.
    """
    hosts = []
    for entry in text.split(","):
        match = _ENTRY.fullmatch(entry.strip())
        if match is None:
            raise ConfigError(f"hosts {text!r}: {entry.strip()!r} is not of the form name, name:slots or [IPv6]:slots")
        hosts.append(HostInfo(match["name"].strip("[]"), int(match["slots"] or 1)))
    return hosts


def parse_hostfile(text: str, num_ranks: int = 1) -> list[HostInfo]:
    """Parse a host file: a line each, ``name slots=n`` or ``name:n``; ``#`` begins a comment.

    A plain list of names, as MXNet's launcher has it, gives each host the same number of the ``num_ranks``, the first
    ones one more where that does not come out even. Its ``name:port`` is an error: numbers behind a colon are slots, as
    everywhere else; the port is a matter of `--ssh-port` or of ssh's configuration.

    Raises:
        ConfigError: a line has another form, or looks like ``name:port``, or there is none.
    """
    hosts, has_numbers = [], False
    for number, line, match in _match_lines(text):
        if _is_port(match):
            raise ConfigError(
                f"line {number} of the host file is {line!r}: behind the colon is a number of ranks, no port; "
                f"say {match['name']} slots=n, and the port with --ssh-port"
            )
        slots = match["slots"] or match["colon"]
        has_numbers = has_numbers or slots is not None
        hosts.append(HostInfo(match["name"].strip("[]"), int(slots or 1)))
    if not has_numbers:
        share, rest = divmod(num_ranks, len(hosts))
        hosts = [HostInfo(host.name, max(1, share + (index < rest))) for index, host in enumerate(hosts)]
    return hosts


def _match_lines(text: str) -> Iterator[tuple[int, str, re.Match[str]]]:
    """Yield the lines of a host file that name hosts: number, text and match; raises ConfigError."""
    match = None
    for number, line in enumerate(text.splitlines(), 1):
        if entry := line.partition("#")[0].strip():
            match = _LINE.fullmatch(entry)
            if match is None:
                form = "not of the form 'name slots=n' ([IPv6] slots=n)"
                raise ConfigError(f"line {number} of the host file is {line.strip()!r}, {form}")
            yield number, line.strip(), match
    if match is None:
        raise ConfigError("the host file names no host")


def _is_port(match: re.Match[str]) -> bool:
    number = int(match["colon"] or 0)
    return number == _SSH_PORT or number >= _FIRST_UNPRIVILEGED_PORT


def resolve_hosts(listed: str | None, file: str | os.PathLike[str] | None, num_ranks: int) -> list[HostInfo]:
    """Return the hosts of a list, or of a file, or this one alone.

    Raises:
        ConfigError: they have another form, or the file cannot be read.
    """
    if listed is not None:
        return parse_hosts(listed)
    if file is None:
        return [HostInfo("localhost", num_ranks)]
    return parse_hostfile(read_hostfile(file), num_ranks)


def read_hostfile(file: str | os.PathLike[str]) -> str:
    """Return a host file's text; raises ConfigError where it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"hostfile {os.fspath(file)!r} cannot be read: {error}") from error


def parse_mxnet_hostfile(text: str) -> tuple[list[HostInfo], int | None]:
    r"""Parse a host file of MXNet's launcher into hosts and the port of their sshd, if it has one.

    A line each, ``name``, ``name:port`` or ``name slots=n``. Processes are dealt out in turn, so that slots count for
    nothing: a number that is no port is taken for slots.

    Raises:
        ConfigError: a line has another form, there is none, or the hosts have different ports.

    Example:
        >>> [host.name for host in parse_mxnet_hostfile("h1:22\nh2 slots=4")[0]]
        ['h1', 'h2']
    """
    matches = [match for _, _, match in _match_lines(text)]
    ports = sorted({int(match["colon"]) for match in matches if _is_port(match)})
    if len(ports) > 1:
        raise ConfigError(
            f"the hosts of the host file have different ports, {', '.join(map(str, ports))}: say them in "
            "ssh's configuration (Host, Port), and names alone in the file"
        )
    return [HostInfo(match["name"].strip("[]"), 1) for match in matches], next(iter(ports), None)


def check_slots(hosts: Sequence[HostInfo], num_ranks: int) -> None:
    """Raise ConfigError unless the hosts have a slot for each rank."""
    num_slots = sum(host.slots for host in hosts)
    if num_slots < num_ranks:
        raise ConfigError(f"the hosts have {num_slots} slots, and {num_ranks} processes were asked for")


@dataclass(frozen=True, slots=True)
class HostAssignment:
    """Processes of one host: its ranks' topologies, ascending; its servers, and the scheduler if it runs there.

    ``is_local``: it is this host, which is reached without an agent. ``rank_environs``: an engine's variables for each
    rank, in their order, None where it is not to have one; empty: there are none.
    """

    host: str
    is_local: bool
    topologies: tuple[Topology, ...]
    ps_processes: tuple[PsProcess, ...] = ()
    rank_environs: tuple[dict[str, str | None], ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the host."""
        return tuple(topology.rank for topology in self.topologies)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of all its processes, in the order in which they are started."""
        return self.ranks + tuple(process.number for process in self.ps_processes)


def assign_ranks(hosts: Sequence[HostInfo], num_ranks: int, is_local: Callable[[str], bool]) -> list[HostAssignment]:
    """Fill the slots of each host before the next host's, in the order of the list.

    A host that is named twice has the slots of both places. Hosts for which no rank is left are not used.
    ``is_local`` says whether a name is this host's.

    Raises:
        ConfigError: too few slots.
    """
    slots: dict[str, int] = {}
    local_name = _find_local_name([host.name for host in hosts], is_local)
    for host in hosts:
        name = local_name if is_local(host.name) else host.name
        slots[name] = slots.get(name, 0) + host.slots
    check_slots(hosts, num_ranks)
    host_by_rank = [name for name, num in slots.items() for _ in range(min(num, num_ranks))]
    return _host_assignments(host_by_rank[:num_ranks], local_name)


def assign_ranks_and_servers(
    hosts: Sequence[HostInfo], num_ranks: int, servers: ServerOptions, is_local: Callable[[str], bool]
) -> list[HostAssignment]:
    """Place ranks and servers on hosts; the scheduler runs on this one, whether it has ranks or not.

    Server i runs on host i of those that it may run on, and again from the first one when they are through. So do
    ranks, behind the last server's host, if they are to be dealt out; otherwise they are placed as by `assign_ranks`.

    Raises:
        ConfigError: too few slots.
    """
    names = [host.name for host in hosts]
    listed = {*names, *servers.hosts}
    # an engine's host may be called localhost, and be another one
    local_name = _find_local_name([*names, *servers.hosts], is_local) or ("localhost" + "#" * ("localhost" in listed))

    def choose(listed: Sequence[str], index: int) -> str:
        name = listed[index % len(listed)]
        return local_name if is_local(name) else name

    if servers.round_robin_workers:
        assignments = _host_assignments([choose(names, servers.num + rank) for rank in range(num_ranks)], local_name)
    else:
        assignments = assign_ranks(hosts, num_ranks, is_local)
    allowed = servers.hosts or names
    found = {each.host: each for each in assignments}
    for process in list_ps_processes(num_ranks, servers):
        name = local_name if process.role is PsRole.SCHEDULER else choose(allowed, process.index)
        before = found.get(name, HostAssignment(name, name == local_name, ()))
        found[name] = replace(before, ps_processes=(*before.ps_processes, process))
    return list(found.values())


def _find_local_name(names: Sequence[str], is_local: Callable[[str], bool]) -> str:
    """Return the name in the list by which this host is called; empty if it is not."""
    return next((name for name in names if is_local(name)), "")


def _host_assignments(host_by_rank: Sequence[str], local_name: str) -> list[HostAssignment]:
    """Return the hosts, in the order of their first rank, where rank r runs on ``host_by_rank[r]``."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(host_by_rank):
        ranks.setdefault(name, []).append(rank)
    counts = [len(each) for each in ranks.values()]
    return [
        HostAssignment(name, bool(local_name) and name == local_name, tuple(_topologies(index, each, counts)))
        for index, (name, each) in enumerate(ranks.items())
    ]


def _topologies(index: int, ranks: Sequence[int], counts: Sequence[int]) -> Iterator[Topology]:
    """Yield the topologies of the host at ``index``, where the hosts have ``counts`` ranks."""
    for local, rank in enumerate(ranks):
        having = [other for other, count in enumerate(counts) if count > local]
        yield Topology(rank, sum(counts), local, len(ranks), having.index(index), len(having))


def is_this_host(name: str) -> bool:
    """Return whether ``name`` is this host's; one that cannot be resolved is another's: ssh may know it."""
    own = socket.gethostname()
    if name in _LOCAL_NAMES or name in {own, own.partition(".")[0]}:
        return True
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return False
    return any(is_own_address(str(address[0])) for *_, address in found)


def is_own_address(address: str) -> bool:
    """Return whether an interface of this host has this address: no other address can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def choose_own_address(interfaces: Sequence[str], towards: str, clients: Sequence[str]) -> tuple[str, str]:
    """Choose the address at which other hosts reach this one, with the reason.

    Args:
        interfaces: names of those that may be used; empty: all.
        towards: another host.
        clients: addresses from which the other hosts see ssh's connections come; empty texts: unknown.

    Raises:
        ConfigError: none can be found.
    """
    if not interfaces:
        for client in clients:
            if client and is_own_address(client):
                return client, f"ssh has reached {towards} from there"
    return choose_address(interfaces, towards)
