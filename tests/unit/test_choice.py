"""Which data plane is chosen, and why."""

from __future__ import annotations

import pytest

from reigen.cluster.topology import Topology
from reigen.errors import ConfigError
from reigen.planes.choice import choose


@pytest.mark.parametrize(
    ("size", "requested", "plane", "reason"),
    [
        (1, None, "null", "one rank"),
        (1, "null", "null", "one rank"),
        (2, None, "shm", "all 2 ranks run on this host"),
        (64, "shm", "shm", "all 64 ranks run on this host"),
    ],
)
def test_choices(size: int, requested: str | None, plane: str, reason: str) -> None:
    chosen, why = choose(Topology.on_one_host(0, size), requested)
    assert chosen == plane
    assert reason in why


@pytest.mark.parametrize(
    ("topology", "requested", "reason"),
    [
        (Topology.on_one_host(0, 2), "nccl", "REIGEN_PLANE=nccl: there is no such plane; there are null, shm"),
        (Topology.on_one_host(0, 1), "", "REIGEN_PLANE=: there is no such plane"),
        (Topology.on_one_host(0, 2), "null", "jobs of one rank, this one has 2"),
        (Topology(0, 4, 0, 2, 0, 2), None, "4 ranks, 2 of them on this host"),
        (Topology(0, 4, 0, 2, 0, 2), "shm", "4 ranks, 2 of them on this host"),
    ],
)
def test_impossible_wishes_are_refused(topology: Topology, requested: str | None, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(topology, requested)
    assert reason in str(caught.value)
