"""Every data plane passes the public conformance suite."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from reigen.cluster.mesh import Mesh
from reigen.cluster.neighbours import meet
from reigen.cluster.rendezvous import Rendezvous
from reigen.planes.base import DataPlane
from reigen.planes.null import NullPlane
from reigen.planes.shm import ShmPlane, shm_plane_bytes
from reigen.planes.tcp import TcpNetwork
from reigen.testing import RankPool, check_plane


@contextmanager
def null_plane(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[DataPlane]:
    plane = NullPlane()
    yield plane
    plane.close()


@contextmanager
def shm_plane(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[DataPlane]:
    neighbours, [part] = meet(rendezvous, rank, range(size), 0, 60.0, [shm_plane_bytes()])
    plane = ShmPlane(neighbours, part, looks=0)
    try:
        yield plane
    finally:
        plane.close()
        neighbours.close()


@contextmanager
def direct_plane(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[DataPlane]:
    """Everything that is not small is read from the other ranks' memory."""
    neighbours, [part] = meet(rendezvous, rank, range(size), 0, 60.0, [shm_plane_bytes()])
    plane = ShmPlane(neighbours, part, looks=0, direct_bytes=0)
    assert plane.try_direct(time.monotonic() + 60.0), "this kernel lets processes of one user read each other"
    try:
        yield plane
    finally:
        plane.close()
        neighbours.close()


@contextmanager
def tcp_plane(
    rank: int, size: int, rendezvous: Rendezvous, algorithm: str = "auto", num_sockets: int = 1
) -> Iterator[DataPlane]:
    mesh = Mesh(rank, size, rendezvous, b"s" * 32, "127.0.0.1", 20.0)
    network = TcpNetwork(mesh, failure=lambda ranks: None, algorithm=algorithm, num_sockets=num_sockets)
    try:
        plane = network.among(range(size), time.monotonic() + 60.0)
        yield plane
        plane.close()
    finally:
        network.close()
        mesh.close()


def test_null() -> None:
    check_plane(null_plane, 1)


@pytest.mark.parametrize("size", [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 3, 5))])
def test_shm_between_threads(size: int) -> None:
    check_plane(shm_plane, size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 13])
def test_shm_between_many_threads(size: int) -> None:
    check_plane(shm_plane, size, trimmed=True)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_shm_between_processes(size: int, rank_pool: Callable[[int], RankPool]) -> None:
    check_plane(shm_plane, size, pool=rank_pool(size))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_direct_between_processes(size: int, rank_pool: Callable[[int], RankPool]) -> None:
    check_plane(direct_plane, size, pool=rank_pool(size))


@pytest.mark.slow
def test_shm_between_many_processes(rank_pool: Callable[[int], RankPool]) -> None:
    check_plane(shm_plane, 8, pool=rank_pool(8), trimmed=True)


@pytest.mark.parametrize("size", [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 3, 5))])
def test_tcp_between_threads(size: int) -> None:
    check_plane(tcp_plane, size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "algorithm", "num_sockets"),
    [(3, "ring", 1), (2, "direct", 2), (2, "ring", 3), (3, "latency", 2), (5, "direct", 1), (5, "ring", 2)],
)
def test_tcp_algorithms_by_name(size: int, algorithm: str, num_sockets: int) -> None:
    check_plane(partial(tcp_plane, algorithm=algorithm, num_sockets=num_sockets), size, trimmed=size > 3)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "algorithm"), [(8, "auto"), (13, "auto"), (13, "ring")])
def test_tcp_between_many_threads(size: int, algorithm: str) -> None:
    check_plane(partial(tcp_plane, algorithm=algorithm), size, trimmed=True)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_tcp_between_processes(size: int, rank_pool: Callable[[int], RankPool]) -> None:
    check_plane(tcp_plane, size, pool=rank_pool(size))
