"""Description of a cluster: hosts, ranks, links, servers, stragglers, failures and prices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reigen.errors import ArgumentError
from reigen.planner.units import parse_count, parse_number, parse_rate, parse_time

_HOST_KEYS = {"name", "count", "ranks", "servers", "processors", "bandwidth", "latency", "device_bandwidth"}
_HOST_KEYS |= {"price_per_hour"}
_KEYS = {"currency", "prices_of", "hosts", "network", "shared_processors", "stragglers", "failures"}
_NETWORK_KEYS = {"oversubscription", "hosts_per_rack", "loss"}
#: Ranks of a job, and hosts of an entry.
_MAX_RANKS = 1 << 16


@dataclass(frozen=True, slots=True)
class ClusterHost:
    """Host of a cluster.

    Attributes:
        name: unique.
        num_ranks: that train there.
        num_servers: parameter servers that may be placed there.
        processors: of the host.
        bandwidth: of its link to the network, each direction, bytes a second.
        latency: of a message from there to another host, half of a round trip, seconds.
        device_bandwidth: ranks are GPUs that exchange at this rate with each other; None: they share memory.
        price_per_hour: None: not known.
        kind: hosts of one entry of the file have the same.
    """

    name: str
    num_ranks: int = 1
    num_servers: int = 0
    processors: float = 1.0
    bandwidth: float = 1.25e9
    latency: float = 50e-6
    device_bandwidth: float | None = None
    price_per_hour: float | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Cluster of hosts. `reigen.planner` describes the file.

    Attributes:
        hosts: in the order of ranks.
        oversubscription: all links of a rack's hosts together, divided by the rack's link to the others.
        hosts_per_rack: 0: all hosts are in one rack.
        loss: part of packets that is lost.
        shared_processors: all hosts are stand-ins on one machine with so many processors; None: each has its own.
        slowdowns: rank -> its computing takes so many times as long.
        failed: names of hosts that are lost; the job goes on without them.
        currency, prices_of: of the prices, and where they come from.
    """

    hosts: tuple[ClusterHost, ...]
    oversubscription: float = 1.0
    hosts_per_rack: int = 0
    loss: float = 0.0
    shared_processors: float | None = None
    slowdowns: tuple[tuple[int, float], ...] = ()
    failed: tuple[str, ...] = ()
    currency: str = "USD"
    prices_of: str = ""

    @property
    def num_ranks(self) -> int:
        """Ranks of all hosts, failed ones included."""
        return sum(host.num_ranks for host in self.hosts)

    @property
    def num_server_places(self) -> int:
        """Servers that hosts of their own have room for; 0: servers share the hosts of the ranks."""
        return sum(host.num_servers for host in self.hosts)

    def without_failed(self) -> Cluster:
        """Return the cluster that the job goes on with: ranks are numbered anew, as an elastic job does.

        Raises:
            ArgumentError: no rank is left.
        """
        if not self.failed:
            return self
        lost, first, renumbered = set(self.failed), 0, {}
        kept = 0
        for host in self.hosts:
            if host.name not in lost:
                renumbered.update({first + index: kept + index for index in range(host.num_ranks)})
                kept += host.num_ranks
            first += host.num_ranks
        if not kept:
            raise ArgumentError("every host with ranks has failed: the job cannot go on; a host must be left")
        slow = tuple((renumbered[rank], factor) for rank, factor in self.slowdowns if rank in renumbered)
        hosts = tuple(host for host in self.hosts if host.name not in lost)
        return replace(self, hosts=hosts, slowdowns=slow, failed=())

    def resized(self, num_ranks: int) -> Cluster:
        """Return the first hosts, with this many ranks in all (hosts of servers are kept): to see how a job scales.

        Raises:
            ArgumentError: the cluster has fewer ranks.
        """
        if not 0 < num_ranks <= self.num_ranks:
            raise ArgumentError(f"the cluster cannot hold a job of {num_ranks} ranks: it has room for {self.num_ranks}")
        hosts, left = [], num_ranks
        for host in self.hosts:
            if not host.num_ranks:
                hosts.append(host)
            elif left:
                hosts.append(replace(host, num_ranks=min(left, host.num_ranks)))
                left -= hosts[-1].num_ranks
        slow = tuple((rank, factor) for rank, factor in self.slowdowns if rank < num_ranks)
        names = {host.name for host in hosts}
        return replace(self, hosts=tuple(hosts), slowdowns=slow, failed=tuple(n for n in self.failed if n in names))


def read_cluster(path: str | Path) -> Cluster:
    """Read ``cluster.yaml``.

    Raises:
        ArgumentError: it describes no cluster; the message says where, and what would be right.
        OSError: it cannot be read.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} is no YAML: {error}") from None
    return make_cluster(content, str(path))


def make_cluster(content: Any, path: str = "cluster") -> Cluster:
    """Return the cluster that a file's content describes; ``path`` names it in errors.

    Raises:
        ArgumentError: something in it is missing or wrong.
    """
    table = _table(content, path, _KEYS)
    entries = table.get("hosts")
    if not isinstance(entries, list) or not entries:
        raise ArgumentError(f"{path}: 'hosts' must be a list of hosts, such as - {{name: a, ranks: 8, ...}}")
    hosts = tuple(host for index, entry in enumerate(entries) for host in _read_hosts(entry, f"{path}: hosts[{index}]"))
    twice = [name for name, count in Counter(host.name for host in hosts).items() if count > 1]
    if twice:
        raise ArgumentError(f"{path}: there are two hosts named {twice[0]}; give each entry of 'hosts' its own name")
    num_ranks = sum(host.num_ranks for host in hosts)
    if not 0 < num_ranks <= _MAX_RANKS:
        raise ArgumentError(f"{path}: {num_ranks} ranks in all; there must be 1 to {_MAX_RANKS}: see 'ranks', 'count'")
    network = _table(table.get("network") or {}, f"{path}: network", _NETWORK_KEYS)
    shared = table.get("shared_processors")
    cluster = Cluster(
        hosts,
        oversubscription=parse_number(network.get("oversubscription", 1), f"{path}: oversubscription"),
        hosts_per_rack=parse_count(network.get("hosts_per_rack", 0), f"{path}: hosts_per_rack"),
        loss=parse_number(network.get("loss", 0), f"{path}: loss"),
        shared_processors=None if shared is None else _positive(shared, f"{path}: shared_processors"),
        currency=str(table.get("currency", "USD")),
        prices_of=str(table.get("prices_of", "")),
    )
    if cluster.oversubscription < 1:
        raise ArgumentError(f"{path}: oversubscription {cluster.oversubscription:g} is below 1; 1 means none")
    if cluster.loss >= 1:
        raise ArgumentError(f"{path}: loss {cluster.loss:g} is a part of all packets, and must be below 1")
    failed = tuple(_host_name(entry, hosts, f"{path}: failures") for entry in _entries(table, "failures", path))
    slow = _read_slowdowns(_entries(table, "stragglers", path), hosts, f"{path}: stragglers")
    return replace(cluster, failed=failed, slowdowns=tuple(sorted(slow.items())))


def _read_hosts(entry: Any, where: str) -> list[ClusterHost]:
    table = _table(entry, where, _HOST_KEYS)
    name, count = str(table.get("name", "")), parse_count(table.get("count", 1), f"{where}: count")
    if not name or not count:
        raise ArgumentError(f"{where}: a host needs a name, and 'count' must be at least 1")
    if count > _MAX_RANKS:
        raise ArgumentError(f"{where}: count {count}: there can be {_MAX_RANKS} hosts at most")
    price, device = table.get("price_per_hour"), table.get("device_bandwidth")
    if price is not None:
        price = parse_number(price, f"{where}: price_per_hour")
        if not price:
            raise ArgumentError(
                f"{where}: price_per_hour is 0: nothing would cost anything; leave it out if it is not known"
            )
    host = ClusterHost(
        name,
        num_ranks=parse_count(table.get("ranks", 1), f"{where}: ranks"),
        num_servers=parse_count(table.get("servers", 0), f"{where}: servers"),
        processors=_positive(table.get("processors", 1), f"{where}: processors"),
        bandwidth=_positive_rate(table.get("bandwidth", "10 Gbit/s"), f"{where}: bandwidth"),
        latency=parse_time(table.get("latency", "50 us"), f"{where}: latency"),
        device_bandwidth=None if device is None else _positive_rate(device, f"{where}: device_bandwidth"),
        price_per_hour=price,
        kind=name,
    )
    if not host.num_ranks and not host.num_servers:
        raise ArgumentError(f"{where}: host {name} has neither ranks nor servers: leave it out")
    return [host] if count == 1 else [replace(host, name=f"{name}-{index}") for index in range(count)]


def _read_slowdowns(entries: Sequence[Any], hosts: Sequence[ClusterHost], where: str) -> dict[int, float]:
    slow: dict[int, float] = {}
    num_ranks = sum(host.num_ranks for host in hosts)
    for entry in entries:
        table = _table(entry, where, {"rank", "host", "slowdown"})
        factor = parse_number(table.get("slowdown", 0), f"{where}: slowdown")
        if factor < 1:
            raise ArgumentError(f"{where}: slowdown {factor:g}: a straggler takes more than 1 times as long")
        if "rank" in table:
            rank = parse_count(table["rank"], f"{where}: rank")
            if rank >= num_ranks:
                raise ArgumentError(f"{where}: there is no rank {rank}; there are 0 to {num_ranks - 1}")
            slow[rank] = factor
            continue
        name, first = _host_name(table, hosts, where), 0
        for host in hosts:
            if host.name == name:
                slow.update(dict.fromkeys(range(first, first + host.num_ranks), factor))
            first += host.num_ranks
    return slow


def _host_name(entry: Any, hosts: Sequence[ClusterHost], where: str) -> str:
    name = str(entry.get("host", "")) if isinstance(entry, Mapping) else str(entry)
    names = [host.name for host in hosts]
    if name not in names:
        shown = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
        raise ArgumentError(f"{where}: there is no host {name!r}; there are {shown}")
    return name


def _entries(table: Mapping[str, Any], key: str, path: str) -> list[Any]:
    entries = table.get(key) or []
    if not isinstance(entries, list):
        raise ArgumentError(f"{path}: '{key}' must be a list")
    return entries


def _table(value: Any, where: str, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{where}: expected a table of {', '.join(sorted(known))}")
    unknown = [str(key) for key in value if key not in known]
    if unknown:
        raise ArgumentError(f"{where}: there is no {unknown[0]!r} here; there are {', '.join(sorted(known))}")
    return value


def _positive(value: object, what: str) -> float:
    number = parse_number(value, what)
    if not number:
        raise ArgumentError(f"{what} must be above 0")
    return number


def _positive_rate(value: object, what: str) -> float:
    rate = parse_rate(value, what)
    if not rate:
        raise ArgumentError(f"{what} is 0: nothing could be sent; give the link's rate, such as '10 Gbit/s'")
    return rate
