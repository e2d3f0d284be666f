"""A rank of one of several machines dies or stops in the middle of a collective: all others are told who, in time.

Nobody has anything but shared memory and connections here: what the control service knows of deaths comes on top.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from reigen.backends.base import Backend, ReduceBuffer
from reigen.cluster.environ import detect_job
from reigen.cluster.membership.rendezvous import RendezvousClient
from reigen.errors import CollectiveError
from reigen.kernels.reduce import Reduction
from reigen.testing import RankError, RankPool, run_ranks
from reigen.types import DTYPES, ReduceOp
from tests.machines import Groups, over_tcp, soon
from tests.patience import patiently

pytestmark = pytest.mark.slow  # many real processes

FLOAT32 = DTYPES["float32"]
GROUPS = [[0, 1], [2, 3, 4]]
#: Far from the deadline. On a machine that is not busy a death is seen within a second, and known to all after another.
TOLD_SECONDS = 40.0
PATIENT_SECONDS = 100.0


def work(backend: Backend, kind: str, deadline: float) -> None:
    reduction = Reduction(FLOAT32, ReduceOp.SUM, backend.size)
    region = backend.allocate(8 << 20, deadline)
    array, offset = region.array.view(np.float32), region.offset
    match kind:
        case "registered":
            backend.barrier(deadline)
            backend.allreduce([ReduceBuffer(array, array, offset)], reduction, deadline)
        case "ordinary":
            backend.allreduce([ReduceBuffer(array, array)], reduction, deadline)
        case "small":
            backend.allreduce([ReduceBuffer(array[:10], array[:10])], reduction, deadline)
        case _:
            backend.alltoall(
                array, [[array.size // backend.size] * backend.size] * backend.size, array.copy(), deadline
            )
    backend.free(offset)


def suffer(
    groups: Groups, victim: int, kind: str, patience: float
) -> tuple[str, tuple[int, ...], float, float, str] | None:
    """Works until another rank has failed; what this one was told, and when it began its last operation.

    The victim is killed, or, where the others have little patience, does nothing any more.
    """
    job = detect_job(os.environ)
    assert job.rendezvous is not None
    assert job.secret is not None
    rank, size = job.rank, job.size
    client = RendezvousClient(job.rendezvous, job.secret, rank, 60.0)
    try:
        with over_tcp(rank, size, client, groups=groups) as backend:
            work(backend, kind, soon())
            others = [f"told/{other}" for other in range(size) if other != victim]
            if rank == victim and patience < PATIENT_SECONDS:
                for key in others:
                    client.get(key, 100.0)
                return None
            if rank == victim:
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
            began = time.monotonic()
            try:
                while True:
                    began = time.monotonic()
                    work(backend, kind, soon(patience))
            except CollectiveError as error:
                said = type(error).__name__, error.ranks, began, time.monotonic(), str(error)
            client.put(f"told/{rank}", b"")
            for key in others:
                client.get(key, 100.0)
            return said
    finally:
        client.close()


@pytest.mark.parametrize(
    ("victim", "kind"),
    [
        *((victim, kind) for victim in (0, 4) for kind in ("registered", "ordinary", "small", "alltoall")),
        (1, "registered"),
        (1, "small"),
        (2, "ordinary"),
        (2, "alltoall"),
    ],
)
def test_a_killed_rank_is_named_on_all_machines(victim: int, kind: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(suffer, 5, GROUPS, victim, kind, PATIENT_SECONDS)
    failed = caught.value
    assert [(f.rank, f.kind) for f in failed.failures] == [(victim, "died")], str(failed)
    assert sorted(failed.results) == [rank for rank in range(5) if rank != victim]
    first = min(began for _, _, began, _, _ in failed.results.values())
    for name, ranks, _, told, text in failed.results.values():
        assert (name, ranks) == ("PeerLostError", (victim,)), text
        assert told - first < TOLD_SECONDS, text


@pytest.mark.parametrize(
    ("victim", "kind"),
    [
        (0, "registered"),
        (0, "alltoall"),
        (1, "ordinary"),
        (1, "small"),
        (2, "small"),
        (2, "alltoall"),
        (4, "registered"),
        (4, "ordinary"),
    ],
)
def test_a_rank_that_does_not_come_is_named_on_all_machines(
    victim: int, kind: str, rank_pool: Callable[[int], RankPool]
) -> None:
    def attempt(seconds: float) -> None:
        told = rank_pool(5).run(suffer, GROUPS, victim, kind, seconds)
        for name, ranks, _, _, text in (said for said in told if said is not None):
            assert (name, ranks) == ("DeadlineError", (victim,)), text

    patiently(attempt, 1.0)
