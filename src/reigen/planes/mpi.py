"""The network that a site reaches by its MPI (InfiniBand, Slingshot, EFA): data planes among any ranks of the job.

What MPI cannot do: making a communicator (`MpiNetwork.among`, `MpiPlane.split`) has no deadline of its own. All its
ranks are waited for before, so that only a rank that stops in that very moment is waited for without end. And an MPI
launcher ends the whole job when a process dies, unless it is Open MPI started with `--with-ft ulfm`
(`reigen.cluster.mpi_world.survival`).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from reigen.cluster.mpi_world import farewell
from reigen.cluster.rendezvous import Rendezvous
from reigen.errors import DeadlineError
from reigen.planes.mpi_line import Commons, Failure, Line
from reigen.planes.mpi_plane import MpiPlane
from reigen.planes.null import NullPlane

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_NAME_BYTES = 16
_SLICE_SECONDS = 0.2


class MpiNetwork:
    """Makes data planes over MPI: `reigen.planes.base.Network`.

    Args:
        world: a communicator that holds all ranks of the job.
        world_ranks: their numbers in it, by rank of the job.
        rank: this one's, of the job.
        rendezvous: where ranks meet before they make a plane; keys begin with ``mpi/``.
        failure: why waiting for ranks of the job is in vain, or None.
        looks: how often to look for the end of an operation before giving way to others; 0 with more ranks than cores.
        native: whether MPI's own reductions are used where there are any; None leaves it to `mpi_choice`.
    """

    name = "mpi"

    def __init__(
        self,
        world: Intracomm,
        world_ranks: Sequence[int],
        rank: int,
        rendezvous: Rendezvous,
        *,
        failure: Failure,
        looks: int = 0,
        native: bool | None = None,
    ) -> None:
        self._world, self._world_ranks, self._rank = world, tuple(world_ranks), rank
        self._rendezvous = rendezvous
        self._commons = Commons(failure, farewell(), looks)
        self._native = native
        #: how often a plane of these ranks was made
        self._made: dict[tuple[int, ...], int] = {}

    def among(self, ranks: Sequence[int], deadline: float) -> MpiPlane | NullPlane:
        """A plane for some ranks of the job, ascending, which number themselves anew. Collective among them.

        Raises:
            DeadlineError: ranks did not come; names them.
            CollectiveError: as ``failure`` tells.
        """
        if len(ranks) == 1:
            return NullPlane()
        key = tuple(ranks)
        self._made[key] = self._made.get(key, 0) + 1
        digest = hashlib.sha256(str(key).encode()).hexdigest()[:16]
        name = self._meet(key, f"mpi/{digest}/{self._made[key]}", deadline)
        with self._commons.lock:
            group = self._world.Get_group().Incl([self._world_ranks[r] for r in key])
            communicator = self._world.Create_group(group)
        return MpiPlane(Line(communicator, name, key, self._commons), self._native)

    def _meet(self, ranks: Sequence[int], prefix: str, deadline: float) -> bytes:
        """Wait until all ranks are here, in the lowest one; the others wait for it. Returns a name for the plane."""
        if self._rank != ranks[0]:
            self._rendezvous.put(f"{prefix}/{self._rank}", b"")
            found = self._get([f"{prefix}/go"], [ranks[0]], deadline)
            return found[0]
        keys = [f"{prefix}/{rank}" for rank in ranks[1:]]
        self._get(keys, ranks[1:], deadline)
        name = os.urandom(_NAME_BYTES)
        self._rendezvous.put(f"{prefix}/go", name)
        return name

    def _get(self, keys: Sequence[str], ranks: Sequence[int], deadline: float) -> list[bytes]:
        """The values that ``ranks`` put, each under its key."""
        found: dict[int, bytes] = {}
        while len(found) < len(ranks):
            missing = [rank for rank in ranks if rank not in found]
            for rank in missing:
                rest = 0.0 if rank != missing[0] else min(_SLICE_SECONDS, max(0.0, deadline - time.monotonic()))
                try:
                    found[rank] = self._rendezvous.get(keys[ranks.index(rank)], rest)
                except TimeoutError:
                    continue
            missing = [rank for rank in ranks if rank not in found]
            if missing and (error := self._commons.failure(missing)) is not None:
                raise error
            if missing and time.monotonic() >= deadline:
                names = ", ".join(map(str, missing))
                raise DeadlineError(f"rank(s) {names} did not come to make a data plane over MPI", ranks=missing)
        return [found[rank] for rank in ranks]

    def close(self) -> None:
        """Nothing is left when the planes have been closed."""
