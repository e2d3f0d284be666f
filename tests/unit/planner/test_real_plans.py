"""The plans that are simulated beside what jobs do: bytes and messages of the TCP backend, requests of a store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from reigen.kv.client.dist_store import DistStore
from reigen.kv.client.requests import BatchRequest, ClientRequest
from reigen.kv.client.worker import KVWorker
from reigen.kv.protocol import PUSH_KINDS
from reigen.net.bulk_connection import BulkConnection
from reigen.planner.collectives import TcpPlan, plan_tcp
from reigen.planner.prediction import Strategy
from reigen.planner.server_plan import make_requests
from tests.kv.threaded import job
from tests.unit.backends.test_tcp_backend import allreduce, run_backends
from tests.unit.planner.jobs import profile


@pytest.mark.parametrize("algorithm", ["direct", "ring", "latency"])
@pytest.mark.parametrize(("size", "count"), [(2, 600_000), (3, 480_000), (4, 2000)])
def test_an_allreduce_sends_the_planned_bytes_and_messages(
    size: int, count: int, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: dict[str, Counter[str]] = {}
    post_send = BulkConnection.post_send

    def counting(link: BulkConnection, data: memoryview) -> None:
        count = sent.setdefault(threading.current_thread().name, Counter())
        count["bytes"] += data.nbytes
        count["messages"] += 1
        post_send(link, data)

    monkeypatch.setattr(BulkConnection, "post_send", counting)
    run_backends(size, lambda backend: allreduce(backend, np.ones(count, np.float32)), algorithm=algorithm)

    plan = plan_tcp(count, 4, size, algorithm)
    # slices are of whole cache lines, so that the last rank's may be a little shorter, and have a chunk less
    assert sum(each["bytes"] for each in sent.values()) == pytest.approx(size * plan.sent, rel=0.02)
    assert sum(each["messages"] for each in sent.values()) == pytest.approx(size * plan.messages, rel=0.1)


def send_around(steps: int, num_chunks: int, chunk_seconds: float, hop_seconds: float) -> float:
    """Send chunk by chunk around a ring: each leaves when the one before it has, and when it has come."""
    free, here = 0.0, [0.0] * num_chunks
    for _ in range(steps):
        for chunk in range(num_chunks):
            free = max(free, here[chunk]) + chunk_seconds
            here[chunk] = free + hop_seconds
    return here[-1]


@pytest.mark.parametrize(
    ("steps", "num_chunks", "chunk_seconds", "hop_seconds"),
    [(4, 1, 5.0, 10.0), (4, 4, 1.0, 10.0), (4, 8, 1.0, 3.0), (6, 4, 2.0, 8.0), (6, 5, 1.0, 4.5), (2, 4, 1.0, 20.0)],
)
def test_hops_of_a_ring_are_hidden_behind_the_bytes_that_leave_meanwhile(
    steps: int, num_chunks: int, chunk_seconds: float, hop_seconds: float
) -> None:
    plan = TcpPlan("ring", "", steps * num_chunks * 1000.0, steps * num_chunks, 0, 1, steps)
    bandwidth = 1000.0 / chunk_seconds
    seconds = hop_seconds + max(plan.sent / bandwidth, plan.waiting_seconds(hop_seconds, bandwidth))
    assert seconds == pytest.approx(send_around(steps, num_chunks, chunk_seconds, hop_seconds))


@pytest.mark.parametrize("compression", [{}, {"type": "2bit"}, {"type": "fp16"}])
def test_a_store_makes_the_planned_requests(compression: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (5, 300, 100_007, 40_000, 7, 260_000)
    requests: list[ClientRequest] = []
    submit = KVWorker.submit

    def noting(worker: KVWorker, batch: Sequence[ClientRequest], *orders: object) -> None:
        requests.extend(each for each in batch if each.header.kind in PUSH_KINDS)
        submit(worker, batch, *orders)  # type: ignore[arg-type]

    monkeypatch.setattr(KVWorker, "submit", noting)

    def push_all(store: DistStore) -> None:
        store.set_gradient_compression(compression or {"type": "none"})
        keys = [f"t{index}" for index in range(len(sizes))]
        values = [np.ones(size, np.float32) for size in sizes]
        store.init(keys, values)
        store.pushpull(keys, values, [np.empty_like(each) for each in values])

    with job(1, 3, kv_bigarray_bound=50_000, kv_slice_bytes=1 << 16) as made:
        made.results(push_all)
    strategy = Strategy("servers", 3, compression=compression, update_on_servers=False)
    planned = make_requests(profile(sizes), strategy, 50_000, 1 << 16, 1)

    assert Counter(map(facts, planned)) == Counter(map(facts, requests))


def facts(request: ClientRequest) -> tuple[int, int, bool]:
    """Where a request goes, how long it is, and whether it has several keys."""
    return request.server, len(request.body), isinstance(request, BatchRequest)
