"""Made-up jobs and clusters for tests of the planner."""

from __future__ import annotations

import dataclasses
from typing import Any

from reigen.planner.cluster import Cluster, make_cluster
from reigen.planner.costs import Costs
from reigen.planner.profile import TrainingProfile, make_profile

#: Nothing costs anything but bytes on links.
FREE = Costs(**{each.name: 0.0 for each in dataclasses.fields(Costs) if each.name != "source"} | {
    "wire_bytes_per_byte": 1.0, "update_scale": 1.0,
})  # fmt: skip


def profile(elements: tuple[int, ...] = (1 << 20,), **changes: Any) -> TrainingProfile:
    """A job whose computing takes a second: 0.25 forward, 0.5 backward, 0.25 update."""
    content: dict[str, Any] = {
        "version": 1, "name": "made up", "batch": 10, "samples_per_epoch": 1000, "processors": 0,
        "forward_seconds": 0.25, "backward_seconds": 0.5, "update_seconds": 0.25,
        "tensors": [{"name": f"t{index}", "elements": each} for index, each in enumerate(elements)],
    }  # fmt: skip
    return make_profile(content | changes, "train.json")


def cluster(count: int, ranks: int = 1, network: dict[str, Any] | None = None, **host: Any) -> Cluster:
    """Hosts that are alike, with links of 1 MB/s without latency."""
    entry = {"name": "a", "count": count, "ranks": ranks, "processors": 8, "bandwidth": 1e6, "latency": 0} | host
    return make_cluster({"hosts": [entry], "network": network or {}})
