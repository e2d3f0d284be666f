"""Settings of jobs on Ray, and requests to Ray for their resources. Decides and explains; Ray is not imported."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby
from typing import Any

from reigen.cluster.environ import RANK_VARIABLES
from reigen.cluster.topology import Topology
from reigen.errors import ConfigError
from reigen.launch.elastic.options import ElasticOptions, ElasticRequest, resolve_elastic
from reigen.launch.hosts import HostInfo, assign_ranks

Bundle = Mapping[str, float]


@dataclass(slots=True)
class RaySettings:
    """Settings of `RayExecutor.create_settings`; they can be pickled.

    Attributes:
        timeout_seconds: how long the ranks' agents may take to come, and ``init()`` waits for all ranks.
        placement_group_timeout_seconds: how long Ray may take to give the resources.
        nics: network interfaces through which hosts may talk to each other; None: those that lead there.
        verbose: report which processes are started, where, and why there.
        discovery: of an elastic job with ``override_discovery=False``: an object whose
            ``find_available_hosts_and_slots()`` returns the slots to use by the names or addresses of hosts.
    """

    timeout_seconds: float = 30.0
    placement_group_timeout_seconds: float = 100.0
    nics: tuple[str, ...] | None = None
    verbose: bool = False
    discovery: Any = None

    def __post_init__(self) -> None:
        for name, seconds in (
            ("timeout_s", self.timeout_seconds),
            ("placement_group_timeout_s", self.placement_group_timeout_seconds),
        ):
            if not 0 < seconds < math.inf:
                raise ConfigError(f"{name} must be a number of seconds greater than 0, not {seconds!r}")


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """Workers that are asked of Ray.

    Attributes:
        num_workers: of the whole job.
        workers_per_bundle: 1: each worker has a bundle of its own, and Ray packs them; more, or ``spread``: a bundle is
            a host's.
        cpus_per_worker: Ray's CPUs.
        gpus_per_worker: Ray's GPUs; 0: none.
        spread: each bundle is on another host.
    """

    num_workers: int
    workers_per_bundle: int = 1
    cpus_per_worker: float = 1
    gpus_per_worker: int = 0
    spread: bool = False

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one bundle."""
        gpus = self.gpus_per_worker * self.workers_per_bundle
        return {"CPU": self.cpus_per_worker * self.workers_per_bundle, **({"GPU": gpus} if gpus else {})}

    @property
    def num_bundles(self) -> int:
        """Number of bundles."""
        return self.num_workers // self.workers_per_bundle

    @property
    def strategy(self) -> str:
        """Ray's name of the placement."""
        return "STRICT_SPREAD" if self.spread else "PACK"

    def __str__(self) -> str:
        """Describe it for a message: ``4 bundles of {'CPU': 1}, PACK``."""
        return f"{self.num_bundles} bundle{'s' * (self.num_bundles > 1)} of {self.bundle}, {self.strategy}"


def request_workers(
    *,
    num_workers: object = None,
    num_hosts: object = None,
    num_workers_per_host: object = 1,
    cpus_per_worker: float = 1,
    use_gpu: bool = False,
    gpus_per_worker: object = None,
    min_workers: object = None,
    max_workers: object = None,
) -> PlacementRequest:
    """Check the arguments of `RayExecutor`, and make the request.

    Raises:
        ConfigError: (a ValueError) they contradict each other, or say nothing.
    """
    if max_workers is not None and (min_workers is None or _count("min_workers", min_workers, least=0) < 1):
        raise ConfigError("max_workers is given without min_workers, which must be at least 1")
    if min_workers is not None and num_workers is not None:
        raise ConfigError("min_workers and num_workers are two ways to say how many: give one of them")
    if gpus_per_worker is not None and not use_gpu:
        raise ConfigError("gpus_per_worker is given, but use_gpu is not: use_gpu=True")
    gpus = 0 if not use_gpu else 1 if gpus_per_worker is None else _count("gpus_per_worker", gpus_per_worker)
    if not (isinstance(cpus_per_worker, int | float) and 0 <= cpus_per_worker < math.inf):
        raise ConfigError(f"cpus_per_worker must be a number, at least 0, not {cpus_per_worker!r}")
    if not cpus_per_worker and not gpus:
        raise ConfigError("cpus_per_worker is 0, and there are no GPUs: Ray cannot place what needs nothing")
    if min_workers is not None:
        num_workers = _count("min_workers", min_workers)
    if num_workers is not None and num_hosts is not None:
        raise ConfigError("num_workers and num_hosts are two ways to say how many: give one of them")
    if num_workers is not None:
        return PlacementRequest(_count("num_workers", num_workers), 1, cpus_per_worker, gpus)
    if num_hosts is None:
        raise ConfigError("how many? Give num_workers, or num_hosts and num_workers_per_host")
    per_host = _count("num_workers_per_host", num_workers_per_host)
    hosts = _count("num_hosts", num_hosts)
    return PlacementRequest(hosts * per_host, per_host, cpus_per_worker, gpus, spread=True)


def request_elastic(
    *,
    min_workers: object,
    max_workers: object = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    elastic_timeout: float = 600,
) -> ElasticOptions | None:
    """Check the arguments of an elastic `RayExecutor`, and make the options; None: it is not elastic.

    Raises:
        ConfigError: (a ValueError) they make no sense.
    """
    if min_workers is None:
        return None
    least = _count("min_workers", min_workers)
    return resolve_elastic(
        ElasticRequest(
            min_ranks=least,
            max_ranks=None if max_workers is None else _count("max_workers", max_workers),
            timeout_seconds=elastic_timeout,
            reset_limit=reset_limit,
            cooldown_range=cooldown_range,
            names=("num_workers", "min_workers", "max_workers", "cooldown_range"),
        )
    )


def _count(name: str, value: object, *, least: int = 1) -> int:
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        raise ConfigError(f"{name} must be a number, not {value!r}") from None
    if number < least:
        raise ConfigError(f"{name} must be at least {least}, not {number}")
    return number


def check_gpus(request: PlacementRequest, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError where no node of ``ray.nodes()`` has the GPUs of one bundle: waiting would not help."""
    wanted = request.bundle.get("GPU", 0)
    most = max((float(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"]), default=0.0)
    if wanted > most:
        what = "hosts" if request.spread else "workers"
        raise ConfigError(
            f"{what} with {wanted:g} GPUs were asked for, and no node of the cluster has more than {most:g}"
        )


def explain_timeout(
    request: PlacementRequest, seconds: float, available: Mapping[str, float], total: Mapping[str, float]
) -> str:
    """Explain that Ray has not given the resources in time, with the resources of the cluster."""
    return (
        f"Ray has not given within {seconds:g} s what was asked for: {request}. Available: {_resources(available)}; "
        f"the whole cluster has {_resources(total)} (ray.available_resources(), ray.cluster_resources())"
    )


def _resources(found: Mapping[str, float]) -> str:
    shown = {name: found[name] for name in sorted(found) if not name.startswith(("node:", "object_store", "memory"))}
    return ", ".join(f"{name} {number:g}" for name, number in shown.items()) or "nothing"


def count_slots(
    nodes: Sequence[Mapping[str, Any]], *, use_gpu: bool, cpus_per_worker: float, gpus_per_worker: float
) -> dict[str, int]:
    """Count the workers that each node of ``ray.nodes()`` could have, by its address; without those that have none."""
    slots = {}
    for node in nodes:
        resources = node["Resources"]
        counts = [resources.get("CPU", 0) // cpus_per_worker] if cpus_per_worker else []
        counts += [resources.get("GPU", 0) // gpus_per_worker] if use_gpu else []
        if node["Alive"] and counts and min(counts) > 0:
            slots[str(node["NodeManagerAddress"])] = int(min(counts))
    return slots


@dataclass(frozen=True, slots=True)
class Place:
    """Place that an actor of the job's has found: a part of a node.

    Attributes:
        node: Ray's id of the node.
        address: the node's.
        hostname: its own name.
        slots: workers that the actor stands for.
        gpus: ids of the GPUs that Ray has given to the actor, as CUDA_VISIBLE_DEVICES has them.
    """

    node: str
    address: str
    hostname: str
    slots: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeSeats:
    """Seats of one node, which gets one agent.

    Attributes:
        name: unique in the job, for messages.
        address: of the node.
        slots: of the node.
        actors: indices of the places, the agent's first.
        gpus: of all its places: each rank sees them all.
    """

    name: str
    address: str
    slots: int
    actors: tuple[int, ...]
    gpus: tuple[str, ...]


def group_by_node(places: Sequence[Place]) -> list[NodeSeats]:
    """Group places by node, in the order of the nodes' first places, which is that of ranks."""
    nodes: dict[str, list[int]] = {}
    for index, place in enumerate(places):
        nodes.setdefault(place.node, []).append(index)
    firsts = {node: places[indices[0]] for node, indices in nodes.items()}
    names = _unique_names(firsts)
    return [
        NodeSeats(
            names[node],
            firsts[node].address,
            sum(places[index].slots for index in indices),
            tuple(indices),
            tuple(order_gpus(gpu for index in indices for gpu in places[index].gpus)),
        )
        for node, indices in nodes.items()
    ]


def _unique_names(firsts: Mapping[str, Place]) -> dict[str, str]:
    """Name each node by its host name; by its address where two have the same; by Ray's id where even that is one."""
    hostnames = [place.hostname for place in firsts.values()]
    addresses = [place.address for place in firsts.values()]

    def name(node: str, place: Place) -> str:
        if hostnames.count(place.hostname) == 1:
            return place.hostname
        return place.address if addresses.count(place.address) == 1 else f"{place.hostname}-{_short(node, firsts)}"

    return {node: name(node, place) for node, place in firsts.items()}


def _short(node: str, nodes: Collection[str]) -> str:
    lengths = (n for n in range(6, len(node) + 1) if len({each[:n] for each in nodes}) == len(nodes))
    return node[: next(lengths, len(node))]


def order_gpus(gpus: Iterable[str]) -> list[str]:
    """Return each GPU once, numbers in their order."""
    return sorted(set(gpus), key=_gpu_order)


def _gpu_order(gpu: str) -> tuple[int, str]:
    return (int(gpu), "") if gpu.isdigit() else (1 << 30, gpu)


def explain_death(error: str) -> str:
    """Take Ray's cause of death out of the message of an ActorDiedError, in one line."""
    lines = [line.strip() for line in error.splitlines()]
    fields = ("class_name:", "actor_id:", "pid:", "namespace:", "ip:", "name:", "class_method:")
    words = " ".join(line for line in lines if line and not line.startswith(fields))
    for beginning in (
        "The actor died unexpectedly before finishing this task.",
        "The actor died because of an error raised in its creation task,",
    ):
        words = words.removeprefix(beginning).strip()
    return words or "Ray does not say why its actor has died"


def place_ranks(nodes: Sequence[str]) -> list[Topology]:
    """Return the place of each rank, whose node is given.

    Raises:
        ConfigError: ranks of one node do not follow each other, as Ray numbers them.
    """
    hosts = [HostInfo(node, len(list(ranks))) for node, ranks in groupby(nodes)]
    if len({host.name for host in hosts}) < len(hosts):
        raise ConfigError(f"the ranks of a node have no numbers that follow each other: {', '.join(nodes)}")
    assignments = assign_ranks(hosts, len(nodes), lambda name: False)
    return [topology for each in assignments for topology in each.topologies]


def rank_variables(topology: Topology) -> dict[str, str]:
    """Return the variables of a rank's place, also by Horovod's names."""
    variables = dict(zip(RANK_VARIABLES, map(str, astuple(topology)), strict=True))
    return variables | {name.replace("REIGEN_", "HOROVOD_"): text for name, text in variables.items()}
