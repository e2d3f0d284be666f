"""Machines for tests: ranks in groups that share memory, and know those of other groups through a network only."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from reigen.cluster.mesh import Mesh
from reigen.cluster.neighbours import Neighbours, meet
from reigen.cluster.rendezvous import Rendezvous
from reigen.errors import CollectiveError
from reigen.planes.base import DataPlane
from reigen.planes.hierarchical import CHUNK_BYTES, compose
from reigen.planes.null import NullPlane
from reigen.planes.shm import DIRECT_BYTES, ShmPlane, shm_plane_bytes
from reigen.planes.tcp import TcpNetwork
from reigen.testing import Hub, MemoryNetwork, run_threads

Groups = Sequence[Sequence[int]]
LocalPlane = ShmPlane | NullPlane


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


@contextmanager
def local_plane(
    group: Sequence[int], rank: int, rendezvous: Rendezvous, *, direct: bool = False
) -> Iterator[tuple[LocalPlane, Neighbours | None]]:
    """The ranks of a group, by their numbers in the job; they may read all arrays directly."""
    if len(group) == 1:
        yield NullPlane(), None
        return
    neighbours, [part] = meet(rendezvous, rank, group, 0, 60.0, [shm_plane_bytes()])
    try:
        plane = ShmPlane(neighbours, part, looks=0, direct_bytes=0 if direct else DIRECT_BYTES)
        assert not direct or plane.try_direct(soon())
        yield plane, neighbours
    finally:
        neighbours.close()


@contextmanager
def over_tcp(
    rank: int, size: int, rendezvous: Rendezvous, *, groups: Groups, algorithm: str = "auto", direct: bool = False
) -> Iterator[DataPlane]:
    """A `MakePlane` of ranks that are processes, with real connections between machines."""
    group = next(group for group in groups if rank in group)
    with contextlib.ExitStack() as stack:
        local, neighbours = stack.enter_context(local_plane(group, rank, rendezvous, direct=direct))

        def failure(_: Sequence[int]) -> CollectiveError | None:
            return None if neighbours is None else neighbours.failure(range(neighbours.size))

        mesh = Mesh(rank, size, rendezvous, b"s" * 32, "127.0.0.1", 60.0)
        stack.callback(mesh.close)
        network = TcpNetwork(mesh, failure=failure, algorithm=algorithm)
        stack.callback(network.close)
        plane = compose(groups, rank, local, network, range(size), soon(60.0))
        stack.callback(plane.close)
        yield plane


class Machines:
    """Planes of ranks that are threads.

    Args:
        groups: their numbers, from 0, by machine.
        first: the job's number of rank 0; the others follow.
        prepare: told every rank's number and local plane before that is used, to tamper with it.
        chunk_bytes: see `compose`.
        direct: ranks of a machine read each other's arrays, whatever their size.
    """

    def __init__(
        self,
        groups: Groups,
        first: int = 0,
        *,
        prepare: Callable[[int, LocalPlane], None] = lambda *_: None,
        chunk_bytes: int = CHUNK_BYTES,
        direct: bool = False,
    ) -> None:
        self.groups, self.size = groups, sum(map(len, groups))
        self.hub = Hub()
        #: takes the place of the network's
        self.among: Callable[[Sequence[int], float], DataPlane] | None = None
        self._first, self._prepare, self._chunk_bytes, self._direct = first, prepare, chunk_bytes, direct
        self._hubs: WeakKeyDictionary[Rendezvous, Hub] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextmanager
    def plane(self, rank: int, size: int, rendezvous: Rendezvous) -> Iterator[DataPlane]:
        """A `MakePlane`."""
        with self._local(rank, rendezvous) as (local, network), contextlib.ExitStack() as stack:
            numbers = range(self._first, self._first + size)
            self._prepare(rank, local)
            plane = compose(self.groups, rank, local, network, numbers, soon(60.0), self._chunk_bytes)
            stack.callback(plane.close)
            yield plane

    def run(self, body: Callable[[DataPlane], Any]) -> list[Any]:
        """What ``body(plane)`` returns on every rank."""

        def one(rank: int, rendezvous: Rendezvous) -> Any:
            with self.plane(rank, self.size, rendezvous) as plane:
                return body(plane)

        return run_threads(one, self.size)

    @contextmanager
    def _local(self, rank: int, rendezvous: Rendezvous) -> Iterator[tuple[LocalPlane, MemoryNetwork]]:
        with self._lock:
            self.hub = self._hubs.setdefault(rendezvous, Hub())
        group = [self._first + member for member in next(group for group in self.groups if rank in group)]
        with local_plane(group, self._first + rank, rendezvous, direct=self._direct) as (local, neighbours):

            def failure(_: Sequence[int]) -> CollectiveError | None:
                return None if neighbours is None else neighbours.failure(range(neighbours.size))

            network = MemoryNetwork(self.hub, self._first + rank, failure)
            if self.among is not None:
                network.among = self.among  # type: ignore[method-assign]
            yield local, network
