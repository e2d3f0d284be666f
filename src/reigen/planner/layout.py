"""Layout of a job on a cluster: kinds of hosts that behave alike, their ranks and servers, and their resources.

Hosts that are alike in everything (ranks, servers, links, processors, stragglers) do the same at the same time, as all
of them take part in every collective in the same way. So one host stands for all of its kind: that is exact, and a job
on 512 hosts is simulated as fast as one on two.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from reigen.errors import ArgumentError
from reigen.planner.cluster import Cluster, ClusterHost


@dataclass(frozen=True, slots=True)
class HostKind:
    """Hosts that are alike.

    Attributes:
        host: one of them.
        count: how many there are.
        servers: class of servers (`reigen.planner.server_plan`) -> servers of it on each.
        slowdowns: slowdown -> ranks of each host that compute so many times as long.
        has_rank_0: it is the host of rank 0 alone.
    """

    host: ClusterHost
    count: int
    servers: tuple[tuple[int, int], ...]
    slowdowns: tuple[tuple[float, int], ...]
    has_rank_0: bool

    @property
    def name(self) -> str:
        """Name for resources: of the first host; unique in a layout."""
        return self.host.name if self.count == 1 else f"{self.host.name} (and {self.count - 1} like it)"


@dataclass(frozen=True, slots=True)
class JobLayout:
    """Job on a cluster.

    Attributes:
        cluster: without failed hosts.
        kinds: of hosts that have ranks or servers of this job.
    """

    cluster: Cluster
    kinds: tuple[HostKind, ...]

    @classmethod
    def of(cls, cluster: Cluster, server_classes: Sequence[int] = ()) -> JobLayout:
        """Place a job on a cluster without its failed hosts; ``server_classes``: the class of each server.

        Raises:
            ArgumentError: there is no place for so many servers.
        """
        slow = dict(cluster.slowdowns)
        kinds: dict[object, HostKind] = {}
        first = 0
        for host, classes in zip(cluster.hosts, _place_servers(cluster, server_classes), strict=True):
            ranks = range(first, first + host.num_ranks)
            first += host.num_ranks
            if not host.num_ranks and not classes:
                continue
            servers = tuple(sorted(Counter(classes).items()))
            factors = tuple(sorted(Counter(slow.get(rank, 1.0) for rank in ranks).items()))
            is_first = 0 in ranks
            key = (replace(host, name=""), servers, factors, is_first)
            known = kinds.get(key)
            kinds[key] = (
                HostKind(host, 1, servers, factors, is_first)
                if known is None
                else replace(known, count=known.count + 1)
            )
        return cls(cluster, tuple(kinds.values()))

    @property
    def num_ranks(self) -> int:
        """Ranks that train."""
        return sum(kind.count * kind.host.num_ranks for kind in self.kinds)

    @property
    def training(self) -> tuple[HostKind, ...]:
        """Kinds of hosts with ranks."""
        return tuple(kind for kind in self.kinds if kind.host.num_ranks)

    @property
    def num_hosts(self) -> int:
        """Hosts with ranks."""
        return sum(kind.count for kind in self.training)

    @property
    def num_all_hosts(self) -> int:
        """Hosts with ranks or servers."""
        return sum(kind.count for kind in self.kinds)

    @property
    def latency(self) -> float:
        """Largest latency between two hosts of the job."""
        return max(kind.host.latency for kind in self.kinds) if self.num_all_hosts > 1 else 0.0

    @property
    def capacities(self) -> dict[str, float]:
        """Capacity of every resource: bytes a second of links, processors of hosts."""
        found = {}
        for kind in self.kinds:
            found[send_link(kind)] = found[receive_link(kind)] = kind.host.bandwidth
            if kind.host.device_bandwidth:
                found[device_link(kind)] = kind.host.device_bandwidth
            if self.cluster.shared_processors is None:
                found[processors(kind)] = kind.host.processors
        if self.cluster.shared_processors is not None:
            found[SHARED_PROCESSORS] = self.cluster.shared_processors
        links = sum(kind.count * kind.host.bandwidth for kind in self.kinds)
        if self.cluster.hosts_per_rack and self.num_racks > 1:
            found[UPLINK] = links / self.num_all_hosts * self.cluster.hosts_per_rack / self.cluster.oversubscription
        elif self.cluster.oversubscription > 1:
            found[CORE] = links / self.cluster.oversubscription
        return found

    @property
    def num_racks(self) -> int:
        """Racks that the hosts fill."""
        return -(-self.num_all_hosts // self.cluster.hosts_per_rack) if self.cluster.hosts_per_rack else 1

    def computing(self, kind: HostKind, seconds: float) -> dict[str, float]:
        """Return the load of ``seconds`` of processors on each host of a kind."""
        if self.cluster.shared_processors is None:
            return {processors(kind): seconds}
        return {SHARED_PROCESSORS: seconds * kind.count}

    def add_network(self, load: defaultdict[str, float], num_bytes: Mapping[HostKind, float], *, is_ring: bool) -> None:
        """Add the load of the network between links: ``num_bytes`` leave each host of a kind.

        Args:
            load: is added to.
            num_bytes: with headers.
            is_ring: each host sends to its neighbour alone, so that one link of a rack leads out of it; else to all.
        """
        if self.cluster.hosts_per_rack and self.num_racks > 1:
            per_host = max(num_bytes.values(), default=0.0)
            in_rack, hosts = self.cluster.hosts_per_rack, self.num_all_hosts
            outside = 1.0 if is_ring else in_rack * (hosts - in_rack) / max(1, hosts - 1)
            load[UPLINK] += per_host * outside
        elif self.cluster.oversubscription > 1:
            load[CORE] += sum(kind.count * each for kind, each in num_bytes.items())


SHARED_PROCESSORS, UPLINK, CORE = "processors of the machine", "uplink of a rack", "network between hosts"


def send_link(kind: HostKind) -> str:
    """Name the link of a host, outwards."""
    return f"link of {kind.name}, sending"


def receive_link(kind: HostKind) -> str:
    """Name the link of a host, inwards."""
    return f"link of {kind.name}, receiving"


def device_link(kind: HostKind) -> str:
    """Name the link between a rank's device and the others of its host."""
    return f"links between devices of {kind.name}"


def processors(kind: HostKind) -> str:
    """Name the processors of a host."""
    return f"processors of {kind.name}"


def _place_servers(cluster: Cluster, server_classes: Sequence[int]) -> list[list[int]]:
    """Return the classes of each host's servers: on hosts of their own, if there are any; else in turn, as `launch`.

    Raises:
        ArgumentError: there is no place for so many.
    """
    placed: list[list[int]] = [[] for _ in cluster.hosts]
    places = cluster.num_server_places
    if places and len(server_classes) > places:
        raise ArgumentError(
            f"{len(server_classes)} servers, but the hosts have room for {places}: raise 'servers' or 'count' of a "
            "host, or leave 'servers' out everywhere, for servers on the hosts of the ranks"
        )
    left = deque(server_classes)
    while left:
        for host, classes in zip(cluster.hosts, placed, strict=True):
            is_free = len(classes) < host.num_servers if places else host.num_ranks > 0
            if left and is_free:
                classes.append(left.popleft())
    return placed
