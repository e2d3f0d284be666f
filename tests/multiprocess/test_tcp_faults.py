"""Processes on a TCP backend that die or stop in the middle of a collective: the others name them, in time."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from reigen.backends.base import Backend, ReduceBuffer
from reigen.backends.tcp.backend import TcpNetwork
from reigen.cluster.connection_pool import ConnectionPool
from reigen.cluster.environ import detect_job
from reigen.cluster.membership.rendezvous import RendezvousClient
from reigen.errors import CollectiveError
from reigen.kernels.reduce import Reduction
from reigen.testing import RankError, run_ranks
from reigen.types import DTYPES, ReduceOp
from tests.patience import patiently

pytestmark = pytest.mark.slow  # many real processes

FLOAT = DTYPES["float32"]
#: Elements of an array that takes a while.
LARGE = 8_000_000
#: Far from the deadline. On a machine that is not busy a death is seen, and who might know more asked, within a second.
SEEN_SECONDS = 40.0


@contextmanager
def tcp_backend(algorithm: str) -> Any:
    job = detect_job(os.environ)
    assert job.rendezvous is not None
    assert job.secret is not None
    rank, size = job.rank, job.size
    client = RendezvousClient(job.rendezvous, job.secret, rank, 60.0)
    mesh = ConnectionPool(rank, size, client, job.secret, "127.0.0.1", 20.0)
    network = TcpNetwork(mesh, failure=lambda ranks: None, algorithm=algorithm)
    try:
        yield network.among(range(size), time.monotonic() + 60.0), client
    finally:
        network.close()
        mesh.close()
        client.close()


def allreduce(backend: Backend, count: int, deadline: float) -> None:
    data = np.ones(count, np.float32)
    backend.allreduce([ReduceBuffer(data, data)], Reduction(FLOAT, ReduceOp.SUM, backend.size), deadline)


def reduce_until_it_fails(backend: Backend, deadline: float) -> tuple[str, tuple[int, ...], float, str]:
    try:
        while True:
            allreduce(backend, LARGE, deadline)
    except CollectiveError as error:
        return type(error).__name__, error.ranks, time.monotonic(), str(error)


def end_in_the_middle(victim: int, algorithm: str, how: str, patience: float) -> Any:
    """The victim ends, or stops, as soon as it waits for somebody; it tells when."""
    with tcp_backend(algorithm) as (backend, client):
        if backend.rank == victim:
            count = 0

            def end(*_: Any) -> None:
                nonlocal count
                count += 1
                if count == 30:  # some chunks of the second collective are there
                    client.put("victim", str(os.getpid()).encode())
                    client.put("ended", repr(time.monotonic()).encode())
                    if how == "fork" and os.fork() == 0:  # a child that outlives it and has all that it had
                        select.select([], [], [], 2 * SEEN_SECONDS)
                        os._exit(0)
                    os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)

            count_calls(backend, end)
        deadline = time.monotonic() + patience
        kind, ranks, when, text = reduce_until_it_fails(backend, deadline)
        if how == "stop":
            end_the_stopped(client, backend.rank, [rank for rank in range(backend.size) if rank != victim])
        return kind, ranks, when - float(client.get("ended", 60.0)), text


def end_the_stopped(client: RendezvousClient, rank: int, others: Sequence[int]) -> None:
    """Once all others have seen that it stopped."""
    client.put(f"seen/{rank}", b"")
    for other in others:
        client.get(f"seen/{other}", 100.0)
    if rank == others[0]:
        os.kill(int(client.get("victim", 60.0)), signal.SIGKILL)


def count_calls(backend: Any, call: Callable[..., None]) -> None:
    """Have ``call`` called whenever something has come."""
    loop = backend._loop
    serve = loop._serve

    def calling(events: Sequence[tuple[int, int]]) -> None:
        serve(events)
        call()

    loop._serve = calling


@pytest.mark.parametrize("algorithm", ["direct", "ring", "latency"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_in_the_middle_is_named_in_time(victim: int, algorithm: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(end_in_the_middle, 4, victim, algorithm, "kill", 100.0)
    assert [(f.rank, f.kind) for f in caught.value.failures] == [(victim, "died")], str(caught.value)
    for kind, ranks, seconds, text in caught.value.results.values():
        assert (kind, ranks) == ("PeerLostError", (victim,)), text
        assert seconds < SEEN_SECONDS
    assert len(caught.value.results) == 3


def test_a_child_that_lives_on_does_not_hide_its_parent_s_death() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(end_in_the_middle, 2, 1, "direct", "fork", 100.0)
    [(kind, ranks, seconds, text)] = caught.value.results.values()
    assert (kind, ranks) == ("PeerLostError", (1,)), text
    assert seconds < SEEN_SECONDS


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_a_rank_that_is_stopped_is_named_at_the_deadline(algorithm: str) -> None:
    def attempt(patience: float) -> None:
        with pytest.raises(RankError) as caught:
            run_ranks(end_in_the_middle, 4, 2, algorithm, "stop", patience)
        assert [(f.rank, f.kind) for f in caught.value.failures] == [(2, "died")], str(caught.value)
        for kind, ranks, seconds, text in caught.value.results.values():
            assert (kind, ranks) == ("DeadlineError", (2,)), text
            assert seconds < patience + SEEN_SECONDS
        assert len(caught.value.results) == 3

    patiently(attempt, 2.0)
