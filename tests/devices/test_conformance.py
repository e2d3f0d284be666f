"""The device backend between ranks that are threads, over process groups of torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from reigen.cluster.membership.rendezvous import Rendezvous
from reigen.testing import check_backend
from tests.devices.gloo import Network
from tests.devices.through_device import ThroughDevice, through_device


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_conformance(size: int) -> None:
    networks: dict[int, Network] = {}
    ways: list[tuple[int, int]] = []

    @contextmanager
    def make(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[ThroughDevice]:
        network = networks.setdefault(id(rendezvous), Network())
        with through_device(rank, size, rendezvous, network) as backend:
            yield backend
            ways.append((backend.num_on_device, backend.num_on_host))

    check_backend(make, size)
    on_device, on_host = max(ways)
    assert on_device > 100
    assert on_host > 20
