"""Strategies of reducing gradients, and predictions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

#: How gradients become sums: ``allreduce`` is what Reigen does by itself (shared memory, or links between devices,
#: within hosts, the TCP backend's choice between them); ``ring`` is one ring through all ranks (REIGEN_PLANE=tcp,
#: REIGEN_TCP_ALGORITHM=ring); ``servers`` is a parameter server.
StrategyKind = Literal["allreduce", "ring", "servers"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """Way of reducing gradients.

    Attributes:
        kind: see `StrategyKind`.
        num_servers: of a parameter server, else 0.
        algorithm: of the TCP backend between hosts, for ``allreduce`` (REIGEN_TCP_ALGORITHM).
        update_on_servers: servers update the weights (the default of a synchronous store made by name).
        compression: parameters of `reigen.compression.from_params`, such as ``{"type": "fp16"}``; empty: none.
        bucket_bytes: 0: as the job would choose by itself.
        fusion_bytes: None: the default of the knob.
        sums_on_host: of a parameter server: the ranks of a host add up their gradients first and are one worker, as
            MXNet's Trainer does with the devices of a host. False: each rank is a worker.
        slice_bytes: the largest shard of a key on servers; 0: as the job would choose.
        overlaps: gradients are reduced while backward runs (False: after it).
    """

    kind: StrategyKind = "allreduce"
    num_servers: int = 0
    algorithm: str = "auto"
    update_on_servers: bool = True
    compression: dict[str, object] = field(default_factory=dict)
    bucket_bytes: int = 0
    fusion_bytes: int | None = None
    slice_bytes: int = 0
    sums_on_host: bool = False
    overlaps: bool = True

    @property
    def name(self) -> str:
        """Short name, for a table."""
        servers = f"{self.num_servers} server" + ("s" if self.num_servers > 1 else "")
        name = servers if self.kind == "servers" else self.kind
        if self.algorithm != "auto":
            name += f" ({self.algorithm} between hosts)"
        return f"{name} + {self.compression['type']}" if self.compression else name


@dataclass(frozen=True, slots=True)
class Activity:
    """Span of a step, for the picture: on which track, what, from when to when (seconds from the step's start)."""

    track: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prediction of one strategy.

    Attributes:
        strategy: what it is about.
        num_ranks: that train; those of failed hosts do not.
        step_seconds: of a step, in the steady state.
        alone_seconds: a step of one rank alone, without anything to reduce.
        samples_per_second: of all ranks together.
        efficiency: that, divided by the number of ranks and by what a rank alone does in a second.
        bound: what bounds it: a key such as ``compute``, ``straggler``, ``link``, ``server link``, ``processors``,
            ``latency``, ``oversubscribed network``.
        reason: the same in words, with figures.
        shares: parts of the step, which add up to 1: ``compute``, ``communication`` (not hidden behind computing),
            ``waiting`` (for a straggler).
        busy: for each resource (``link of gpu-0, out``...) the part of the step in which it is used.
        wire_bytes: that the busiest host sends in a step, with headers.
        messages: of data that are sent in a step, by all.
        epoch_seconds, epoch_cost: None where the profile or the price list does not say.
        num_hosts: that are paid for.
        activities: of one step.
        notes: what was assumed.
    """

    strategy: Strategy
    num_ranks: int
    step_seconds: float
    alone_seconds: float
    samples_per_second: float
    efficiency: float
    bound: str
    reason: str
    shares: dict[str, float]
    busy: dict[str, float]
    wire_bytes: float
    messages: int
    num_hosts: int
    epoch_seconds: float | None = None
    epoch_cost: float | None = None
    activities: tuple[Activity, ...] = ()
    notes: tuple[str, ...] = ()
