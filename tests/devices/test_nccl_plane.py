"""The NCCL plane between ranks that are threads, with stand-ins for NCCL and the GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.devices.nccl import Fabric
from tests.devices.through import ThroughDevice, through_device

from reigen.cluster.rendezvous import Rendezvous
from reigen.testing import check_plane


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_conformance(size: int) -> None:
    fabrics: dict[int, Fabric] = {}
    ways: list[tuple[int, int]] = []

    @contextmanager
    def make(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[ThroughDevice]:
        fabric = fabrics.setdefault(id(rendezvous), Fabric())
        with through_device(rank, size, rendezvous, fabric) as plane:
            yield plane
            ways.append((plane.num_on_device, plane.num_on_host))

    check_plane(make, size)
    on_device, on_host = max(ways)
    assert on_device > 100
    assert on_host > 20
