"""Machines for tests: ranks in groups that share memory, and know those of other groups through a network only."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from reigen.backends.base import Backend
from reigen.backends.hierarchical.backend import CHUNK_BYTES, compose_backend
from reigen.backends.null import NullBackend
from reigen.backends.shm.backend import CROSS_MEMORY_BYTES, ShmBackend, shm_backend_bytes
from reigen.backends.tcp.backend import TcpNetwork
from reigen.cluster.connection_pool import ConnectionPool
from reigen.cluster.local_peers import LocalPeers, map_local_peers
from reigen.cluster.membership.rendezvous import Rendezvous
from reigen.errors import CollectiveError
from reigen.testing import Hub, MemoryNetwork, run_threads

Groups = Sequence[Sequence[int]]
LocalBackend = ShmBackend | NullBackend


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


@contextmanager
def local_backend(
    group: Sequence[int], rank: int, rendezvous: Rendezvous, *, direct: bool = False
) -> Iterator[tuple[LocalBackend, LocalPeers | None]]:
    """The ranks of a group, by their numbers in the job; they may read all arrays directly."""
    if len(group) == 1:
        yield NullBackend(), None
        return
    neighbours, [part] = map_local_peers(rendezvous, rank, group, 0, 60.0, [shm_backend_bytes()])
    try:
        backend = ShmBackend(neighbours, part, looks=0, direct_bytes=0 if direct else CROSS_MEMORY_BYTES)
        assert not direct or backend.try_cross_memory(soon())
        yield backend, neighbours
    finally:
        neighbours.close()


@contextmanager
def over_tcp(
    rank: int, size: int, rendezvous: Rendezvous, *, groups: Groups, algorithm: str = "auto", direct: bool = False
) -> Iterator[Backend]:
    """A `MakeBackend` of ranks that are processes, with real connections between machines."""
    group = next(group for group in groups if rank in group)
    with contextlib.ExitStack() as stack:
        local, neighbours = stack.enter_context(local_backend(group, rank, rendezvous, direct=direct))

        def failure(_: Sequence[int]) -> CollectiveError | None:
            return None if neighbours is None else neighbours.failure(range(neighbours.size))

        mesh = ConnectionPool(rank, size, rendezvous, b"s" * 32, "127.0.0.1", 60.0)
        stack.callback(mesh.close)
        network = TcpNetwork(mesh, failure=failure, algorithm=algorithm)
        stack.callback(network.close)
        backend = compose_backend(groups, rank, local, network, range(size), soon(60.0))
        stack.callback(backend.close)
        yield backend


class Machines:
    """Backends of ranks that are threads.

    Args:
        groups: their numbers, from 0, by machine.
        first: the job's number of rank 0; the others follow.
        prepare: told every rank's number and local backend before that is used, to tamper with it.
        chunk_bytes: see `compose_backend`.
        direct: ranks of a machine read each other's arrays, whatever their size.
    """

    def __init__(
        self,
        groups: Groups,
        first: int = 0,
        *,
        prepare: Callable[[int, LocalBackend], None] = lambda *_: None,
        chunk_bytes: int = CHUNK_BYTES,
        direct: bool = False,
    ) -> None:
        self.groups, self.size = groups, sum(map(len, groups))
        self.hub = Hub()
        #: takes the place of the network's
        self.among: Callable[[Sequence[int], float], Backend] | None = None
        self._first, self._prepare, self._chunk_bytes, self._direct = first, prepare, chunk_bytes, direct
        self._hubs: WeakKeyDictionary[Rendezvous, Hub] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextmanager
    def backend(self, rank: int, size: int, rendezvous: Rendezvous) -> Iterator[Backend]:
        """A `MakeBackend`."""
        with self._local(rank, rendezvous) as (local, network), contextlib.ExitStack() as stack:
            numbers = range(self._first, self._first + size)
            self._prepare(rank, local)
            backend = compose_backend(self.groups, rank, local, network, numbers, soon(60.0), self._chunk_bytes)
            stack.callback(backend.close)
            yield backend

    def run(self, body: Callable[[Backend], Any]) -> list[Any]:
        """What ``body(backend)`` returns on every rank."""

        def one(rank: int, rendezvous: Rendezvous) -> Any:
            with self.backend(rank, self.size, rendezvous) as backend:
                return body(backend)

        return run_threads(one, self.size)

    @contextmanager
    def _local(self, rank: int, rendezvous: Rendezvous) -> Iterator[tuple[LocalBackend, MemoryNetwork]]:
        with self._lock:
            self.hub = self._hubs.setdefault(rendezvous, Hub())
        group = [self._first + member for member in next(group for group in self.groups if rank in group)]
        with local_backend(group, self._first + rank, rendezvous, direct=self._direct) as (local, neighbours):

            def failure(_: Sequence[int]) -> CollectiveError | None:
                return None if neighbours is None else neighbours.failure(range(neighbours.size))

            network = MemoryNetwork(self.hub, self._first + rank, failure)
            if self.among is not None:
                network.among = self.among  # type: ignore[method-assign]
            yield local, network
