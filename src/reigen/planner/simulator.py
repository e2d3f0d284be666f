"""Prediction of a job's speed: one step in the steady state, simulated with the job's own plans."""

from __future__ import annotations

from reigen.api.compression import CastCompression, parse_compression
from reigen.api.gradients.bucket_plan import ParameterSpec, arrival_order, plan_buckets
from reigen.config import TCP_ALGORITHMS, Config, default_bucket_bytes
from reigen.errors import ArgumentError
from reigen.kv.client.sharding import choose_slice_bytes
from reigen.planner.cluster import Cluster
from reigen.planner.collectives import CollectiveModel
from reigen.planner.costs import Costs
from reigen.planner.layout import JobLayout
from reigen.planner.prediction import Prediction, Strategy
from reigen.planner.profile import TrainingProfile
from reigen.planner.server_plan import ServerPlan, plan_requests
from reigen.planner.server_step import ServerJob
from reigen.planner.training_step import COORDINATOR, AllreduceJob, BucketOptions
from reigen.planner.units import format_number
from reigen.types import DTYPES

#: Below these shares of a step, waiting and communication do not bound it.
_STRAGGLER_SHARE, _COMMUNICATION_SHARE = 0.05, 0.1
#: A resource that is used for less of the communication than this does not bound it: latency does.
_BUSY_SHARE = 0.5
_SECONDS_PER_HOUR = 3600.0
#: No job has more servers.
MAX_SERVERS = 1 << 14


def simulate(profile: TrainingProfile, cluster: Cluster, strategy: Strategy, costs: Costs | None = None) -> Prediction:
    """Predict a job: a step of the steady state, when the response cache knows all names.

    Args:
        profile: what a rank computes.
        cluster: what it runs on; hosts that have failed are left out.
        strategy: how gradients are reduced.
        costs: of messages and bytes; None for the defaults.

    Raises:
        ArgumentError: the cluster cannot hold the job, or the strategy makes no sense.
    """
    costs = costs or Costs()
    if strategy.algorithm not in TCP_ALGORITHMS:
        raise ArgumentError(f"there is no algorithm {strategy.algorithm!r}; there are {', '.join(TCP_ALGORITHMS)}")
    if (strategy.kind == "servers") != (strategy.num_servers > 0):
        raise ArgumentError(f"strategy {strategy.kind} with {strategy.num_servers} servers: only 'servers' has some")
    if strategy.num_servers > MAX_SERVERS:
        raise ArgumentError(f"{strategy.num_servers} servers: there can be {MAX_SERVERS} at most")
    alive = cluster.without_failed()
    run = _run_servers if strategy.kind == "servers" else _run_allreduce
    job, layout, notes = run(profile, alive, strategy, costs)
    return _conclude(profile, layout, strategy, job, notes + _cluster_notes(cluster))


def _cluster_notes(cluster: Cluster) -> list[str]:
    """Return assumptions about a cluster."""
    notes = []
    if cluster.failed:
        notes.append(f"{', '.join(cluster.failed)} failed: the job goes on without, as an elastic job does")
    if cluster.loss:
        notes.append("loss of packets is not in the model: step times are those of a network without loss")
    return notes


# -- collectives ------------------------------------------------------------------------------------------------------


def _run_allreduce(
    profile: TrainingProfile, cluster: Cluster, strategy: Strategy, costs: Costs
) -> tuple[AllreduceJob, JobLayout, list[str]]:
    layout, config = JobLayout.of(cluster), Config()
    compression = parse_compression(strategy.compression or None or CastCompression(), "a type of compression")
    has_network = layout.num_hosts > 1 or strategy.kind == "ring"
    on_devices = all(kind.host.device_bandwidth for kind in layout.training)
    can_overlap = has_network or on_devices or min(kind.host.processors for kind in layout.training) > 1
    overlaps = strategy.overlaps and can_overlap
    specs = []
    for tensor in profile.tensors:
        wire = compression.wire_dtype(DTYPES[tensor.dtype])
        specs.append(ParameterSpec(tensor.elements, wire.itemsize, wire.name))
    order = sorted(range(len(specs)), key=lambda each: profile.tensors[each].ready_seconds)
    bucket_bytes = strategy.bucket_bytes or default_bucket_bytes(has_network, overlaps)
    plan = plan_buckets(specs, arrival_order(order, len(specs)), bucket_bytes)
    threshold = config.fusion_threshold_bytes if strategy.fusion_bytes is None else strategy.fusion_bytes
    options = BucketOptions(plan, compression, overlaps, config.cache_capacity, threshold)
    algorithm = "ring" if strategy.kind == "ring" else strategy.algorithm
    model = CollectiveModel(layout, costs, algorithm, shares_memory=strategy.kind != "ring")
    job = AllreduceJob(layout, profile, model, costs, options)
    notes = [f"{len(plan.buckets)} buckets of at most {bucket_bytes >> 10} KiB"]
    if not overlaps:
        notes.append("gradients are reduced when backward is over")
    if layout.num_ranks > 1:
        job.run_step()  # the first step fills the response cache
    if model.largest_plan is not None:
        notes.append(f"between hosts: {model.largest_plan.algorithm} ({model.largest_plan.reason})")
    return job, layout, notes


# -- parameter servers ------------------------------------------------------------------------------------------------


def _run_servers(
    profile: TrainingProfile, cluster: Cluster, strategy: Strategy, costs: Costs
) -> tuple[ServerJob, JobLayout, list[str]]:
    plan = _plan_servers(profile, cluster, strategy)
    layout = JobLayout.of(cluster, plan.classes)
    notes = [plan.reason]
    if len(plan.pieces) < strategy.num_servers:
        notes.append(f"servers with loads within 2 % of each other are one kind: {len(plan.pieces)} kinds")
    return ServerJob(layout, profile, plan, strategy, costs), layout, notes


def _plan_servers(profile: TrainingProfile, cluster: Cluster, strategy: Strategy) -> ServerPlan:
    config = Config()
    num_training = sum(1 for host in cluster.hosts if host.num_ranks)
    num_workers = num_training if strategy.sums_on_host else cluster.num_ranks
    # any address that is not of this host: only that counts
    is_local = len(cluster.hosts) == 1
    address = "127.0.0.1" if is_local else "192.0.2.1"
    slice_bytes, _ = choose_slice_bytes(
        strategy.slice_bytes or None, [address], num_workers + strategy.num_servers, int(cluster.hosts[0].processors)
    )
    return plan_requests(profile, strategy, config.kv_bigarray_bound, slice_bytes, num_workers)


# -- the result -------------------------------------------------------------------------------------------------------


def _conclude(
    profile: TrainingProfile, layout: JobLayout, strategy: Strategy, job: AllreduceJob | ServerJob, notes: list[str]
) -> Prediction:
    simulator = job.run_step()
    step, alone = simulator.now, profile.step_seconds
    rate = layout.num_ranks * profile.batch / step
    fastest = min(job.computed_at) if job.computed_at else step
    waiting = max(job.computed_at, default=step) - fastest
    compute = min(alone, step - waiting)
    shares = {"compute": compute / step, "waiting": waiting / step}
    shares["communication"] = max(0.0, 1.0 - sum(shares.values()))
    busy = {resource: seconds / step for resource, seconds in sorted(simulator.busy.items(), key=lambda each: -each[1])}
    bound, reason = explain_bound(shares, busy, step, layout)
    epoch = profile.samples_per_epoch / rate if profile.samples_per_epoch else None
    return Prediction(
        strategy, layout.num_ranks, step, alone, rate, rate * alone / profile.batch / layout.num_ranks,
        bound, reason, shares, busy, job.sent, job.messages, layout.num_all_hosts,
        epoch_seconds=epoch, epoch_cost=_cost(layout, epoch), activities=tuple(simulator.spans), notes=tuple(notes),
    )  # fmt: skip


def _cost(layout: JobLayout, seconds: float | None) -> float | None:
    """Return what hosts cost for so long; None if a price is not known."""
    if seconds is None or any(kind.host.price_per_hour is None for kind in layout.kinds):
        return None
    per_hour = sum(kind.count * (kind.host.price_per_hour or 0.0) for kind in layout.kinds)
    return per_hour * seconds / _SECONDS_PER_HOUR


def explain_bound(shares: dict[str, float], busy: dict[str, float], step: float, layout: JobLayout) -> tuple[str, str]:
    """Return what bounds a step, as a key and in words.

    Args:
        shares: of the step, as in `Prediction`.
        busy: resource -> part of the step in which it is used.
        step: seconds.
        layout: of the job.
    """
    communication, waiting = shares["communication"], shares["waiting"]
    if waiting > max(_STRAGGLER_SHARE, communication):
        slow = max(layout.cluster.slowdowns, key=lambda each: each[1], default=(0, 1.0))
        return "straggler", (
            f"{waiting:.0%} of a step is waiting for rank {slow[0]}, which computes {slow[1]:g} times as long: "
            "replace its host, or leave it out"
        )
    if communication < _COMMUNICATION_SHARE:
        return "compute", f"{shares['compute']:.0%} of a step is computing: a faster network would gain little"
    links = {resource: part for resource, part in busy.items() if not resource.startswith("processors")}
    resource, part = max(links.items(), key=lambda each: each[1], default=("", 0.0))
    processors, used = max(
        ((name, each) for name, each in busy.items() if name.startswith("processors")),
        key=lambda each: each[1], default=("", 0.0),
    )  # fmt: skip
    lost = f"{communication:.0%} of a step is communication that nothing hides"
    if used > max(part, 0.8):
        return "processors", f"{lost}; {processors} are busy for {used:.0%} of it: more of them, or fewer ranks"
    if part < _BUSY_SHARE * communication or not resource:
        return "latency", (
            f"{lost}, and no link is busy for more than {part:.0%} of the step: messages wait for each other; larger "
            "buckets, or a network of less latency"
        )
    return _kind_of(
        resource
    ), f"{lost}; {resource} is busy for {part:.0%} of the step ({format_number(part * step * 1e3)} ms)"


def _kind_of(resource: str) -> str:
    """Return the key of a resource that bounds a step."""
    if resource == COORDINATOR:
        return "coordinator"
    if resource.startswith("thread of a worker"):
        return "worker thread"
    if "of a server" in resource:
        return "server thread"
    if resource.startswith(("uplink", "network")):
        return "oversubscribed network"
    return "device links" if resource.startswith("links between devices") else "link"
