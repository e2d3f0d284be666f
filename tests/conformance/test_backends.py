"""Every backend passes the public conformance suite."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from reigen.backends.base import Backend
from reigen.backends.null import NullBackend
from reigen.backends.shm.backend import ShmBackend, shm_backend_bytes
from reigen.backends.tcp.backend import TcpNetwork
from reigen.cluster.connection_pool import ConnectionPool
from reigen.cluster.local_peers import map_local_peers
from reigen.cluster.membership.rendezvous import Rendezvous
from reigen.testing import RankPool, check_backend


@contextmanager
def null_backend(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[Backend]:
    backend = NullBackend()
    yield backend
    backend.close()


@contextmanager
def shm_backend(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[Backend]:
    neighbours, [part] = map_local_peers(rendezvous, rank, range(size), 0, 60.0, [shm_backend_bytes()])
    backend = ShmBackend(neighbours, part, looks=0)
    try:
        yield backend
    finally:
        backend.close()
        neighbours.close()


@contextmanager
def direct_backend(rank: int, size: int, rendezvous: Rendezvous) -> Iterator[Backend]:
    """Everything that is not small is read from the other ranks' memory."""
    neighbours, [part] = map_local_peers(rendezvous, rank, range(size), 0, 60.0, [shm_backend_bytes()])
    backend = ShmBackend(neighbours, part, looks=0, direct_bytes=0)
    assert backend.try_cross_memory(time.monotonic() + 60.0), "this kernel lets processes of one user read each other"
    try:
        yield backend
    finally:
        backend.close()
        neighbours.close()


@contextmanager
def tcp_backend(
    rank: int, size: int, rendezvous: Rendezvous, algorithm: str = "auto", num_sockets: int = 1
) -> Iterator[Backend]:
    mesh = ConnectionPool(rank, size, rendezvous, b"s" * 32, "127.0.0.1", 20.0)
    network = TcpNetwork(mesh, failure=lambda ranks: None, algorithm=algorithm, num_sockets=num_sockets)
    try:
        backend = network.among(range(size), time.monotonic() + 60.0)
        yield backend
        backend.close()
    finally:
        network.close()
        mesh.close()


def test_null() -> None:
    check_backend(null_backend, 1)


@pytest.mark.parametrize("size", [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 3, 5))])
def test_shm_between_threads(size: int) -> None:
    check_backend(shm_backend, size)


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 13])
def test_shm_between_many_threads(size: int) -> None:
    check_backend(shm_backend, size, trimmed=True)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_shm_between_processes(size: int, rank_pool: Callable[[int], RankPool]) -> None:
    check_backend(shm_backend, size, pool=rank_pool(size))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_direct_between_processes(size: int, rank_pool: Callable[[int], RankPool]) -> None:
    check_backend(direct_backend, size, pool=rank_pool(size))


@pytest.mark.slow
def test_shm_between_many_processes(rank_pool: Callable[[int], RankPool]) -> None:
    check_backend(shm_backend, 8, pool=rank_pool(8), trimmed=True)


@pytest.mark.parametrize("size", [1, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 3, 5))])
def test_tcp_between_threads(size: int) -> None:
    check_backend(tcp_backend, size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "algorithm", "num_sockets"),
    [(3, "ring", 1), (2, "direct", 2), (2, "ring", 3), (3, "latency", 2), (5, "direct", 1), (5, "ring", 2)],
)
def test_tcp_algorithms_by_name(size: int, algorithm: str, num_sockets: int) -> None:
    check_backend(partial(tcp_backend, algorithm=algorithm, num_sockets=num_sockets), size, trimmed=size > 3)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "algorithm"), [(8, "auto"), (13, "auto"), (13, "ring")])
def test_tcp_between_many_threads(size: int, algorithm: str) -> None:
    check_backend(partial(tcp_backend, algorithm=algorithm), size, trimmed=True)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_tcp_between_processes(size: int, rank_pool: Callable[[int], RankPool]) -> None:
    check_backend(tcp_backend, size, pool=rank_pool(size))
