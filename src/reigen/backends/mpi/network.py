"""Network that a site reaches by its MPI (InfiniBand, Slingshot, EFA): backends among any ranks of the job.

Limits of MPI: making a communicator (`MpiNetwork.among`, `MpiBackend.split`) has no deadline of its own. All its
ranks are waited for before, so that only a rank that stops in that very moment is waited for without end. And an MPI
launcher ends the whole job when a process dies, unless it is Open MPI started with `--with-ft ulfm`
(`reigen.cluster.bootstrap.mpi_library.can_survive_failures`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reigen.backends.base import FailureCheck
from reigen.backends.mpi.backend import CHUNK_BYTES, MpiBackend
from reigen.backends.mpi.progress import MpiProgress, MpiSharedState
from reigen.backends.null import NullBackend
from reigen.cluster.bootstrap.mpi_library import can_survive_failures, mpi_exit_handler
from reigen.cluster.membership.rendezvous import Rendezvous
from reigen.errors import DeadlineError, format_ranks

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_log = logging.getLogger(__name__)

_NAME_BYTES = 16
_SLICE_SECONDS = 0.2


class MpiNetwork:
    """Network over MPI: `reigen.backends.base.HostNetwork`.

    Args:
        world: a communicator that holds all ranks of the job.
        world_ranks: their numbers in it, by rank of the job.
        rank: this one's, of the job.
        rendezvous: of ranks before they make a backend; keys begin with ``mpi/``.
        failure: see `FailureCheck`.
        looks: how often to look for the end of an operation before giving way to others; 0 with more ranks than cores.
        native: whether MPI's own reductions are used where there are any; None: see `sums_in_rank_order`.
        chunk_bytes: limit of a chunk.

    Attributes:
        survives: the other ranks can go on after a death, as far as MPI is concerned.
    """

    name = "mpi"

    def __init__(
        self,
        world: Intracomm,
        world_ranks: Sequence[int],
        rank: int,
        rendezvous: Rendezvous,
        *,
        failure: FailureCheck,
        looks: int = 0,
        native: bool | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        from mpi4py.MPI import Get_library_version

        self._world, self._world_ranks, self._rank = world, tuple(world_ranks), rank
        self._rendezvous = rendezvous
        self._shared_state = MpiSharedState(failure, mpi_exit_handler(), looks)
        self._native, self._chunk_bytes = native, chunk_bytes
        version = Get_library_version().rstrip("\0").splitlines()[0]
        self.survives, reason = can_survive_failures(os.environ, version)
        if rank == 0:
            _log.info("%s: %s", version, reason)
        #: number of backends of these ranks so far
        self._made: dict[tuple[int, ...], int] = {}

    def among(self, ranks: Sequence[int], deadline: float) -> MpiBackend | NullBackend:
        if len(ranks) == 1:
            return NullBackend()
        key = tuple(ranks)
        self._made[key] = self._made.get(key, 0) + 1
        digest = hashlib.sha256(str(key).encode()).hexdigest()[:16]
        prefix = f"mpi/{digest}/{self._made[key]}"
        name = wait_for_ranks(self._rendezvous, key, self._rank, prefix, self._shared_state.failure, deadline)
        with self._shared_state.lock:
            group = self._world.Get_group().Incl([self._world_ranks[r] for r in key])
            communicator = self._world.Create_group(group)
        return MpiBackend(MpiProgress(communicator, name, key, self._shared_state), self._native, self._chunk_bytes)

    def close(self) -> None:
        """Do nothing: the backends have been closed."""


def wait_for_ranks(
    rendezvous: Rendezvous, ranks: Sequence[int], rank: int, prefix: str, failure: FailureCheck, deadline: float
) -> bytes:
    """Wait until all of some ranks have come, in the lowest one; the others wait for it.

    ``ranks`` of the job, ascending, are at least two, ``rank`` is this one, and keys with the ``prefix`` are used for
    nothing else. Returns a name that the lowest rank has made for these ranks.

    Raises:
        DeadlineError: ranks did not come; names them, to the lowest rank.
        CollectiveError: the result of ``failure``.
    """
    lowest, *higher = ranks
    if rank != lowest:
        rendezvous.put(f"{prefix}/{rank}", b"")
        return _get_all(rendezvous, {lowest: f"{prefix}/go"}, failure, deadline)[0]
    _get_all(rendezvous, {peer: f"{prefix}/{peer}" for peer in higher}, failure, deadline)
    name = os.urandom(_NAME_BYTES)
    rendezvous.put(f"{prefix}/go", name)
    return name


def _get_all(rendezvous: Rendezvous, keys: Mapping[int, str], failure: FailureCheck, deadline: float) -> list[bytes]:
    """Get the value that each rank has put under its key."""
    found: dict[int, bytes] = {}
    while True:
        missing = [rank for rank in keys if rank not in found]
        for rank in missing:
            wait = max(0.0, min(_SLICE_SECONDS, deadline - time.monotonic())) if rank == missing[0] else 0.0
            with contextlib.suppress(TimeoutError):
                found[rank] = rendezvous.get(keys[rank], wait)
        missing = [rank for rank in keys if rank not in found]
        if not missing:
            return [found[rank] for rank in keys]
        if (error := failure(missing)) is not None:
            raise error
        if time.monotonic() >= deadline:
            raise DeadlineError(
                f"rank(s) {format_ranks(missing)} did not come to make a backend over MPI", ranks=missing
            )
