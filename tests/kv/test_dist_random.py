"""Random jobs: operations, sizes, priorities, servers, lost messages, broken connections; the closed forms hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from reigen import optim
from reigen.kv.client.dist_store import DistStore
from reigen.kv.store import Pending
from tests.kv.threaded import job

pytestmark = pytest.mark.slow


class Plan:
    """What all workers of a job do, in the same order; how each one does it is its own affair."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.seed = seed
        self.num_workers, self.num_servers = chance.randint(1, 3), chance.randint(1, 3)
        self.staleness = chance.choice([0, 0, 1, 3, None])
        self.sizes = [chance.choice([0, 1, 33, 33, 500, 5000, 12_000]) for _ in range(chance.randint(1, 6))]
        #: which keys in one call
        self.pushes = [
            chance.sample(range(len(self.sizes)), chance.choice([1, 1, len(self.sizes)]))
            for _ in range(chance.randint(1, 25))
        ]
        self.breaks = chance.choice([0.0, 0.1])
        self.knobs: dict[str, Any] = {
            "kv_bigarray_bound": chance.choice([100, 1000, 1 << 30]),
            "kv_slice_bytes": chance.choice([1 << 10, 1 << 12, 1 << 16]),
            "kv_shared_memory": chance.random() < 0.5,
        }
        if chance.random() < 0.5:
            self.knobs |= {"kv_resend": True, "kv_resend_timeout_ms": 30, "kv_drop_percent": chance.choice([5.0, 20.0])}

    def expected(self, key: int, rounds: int) -> float:
        return rounds * self.num_workers * (self.num_workers + 1) / 2


class Run:
    """One worker's part in a plan."""

    def __init__(self, plan: Plan, store: DistStore) -> None:
        self.plan, self.store = plan, store
        self.chance = random.Random(plan.seed * 31 + store.rank)
        self.rounds = [0] * len(plan.sizes)
        self.results: list[tuple[Pending, int, float, np.ndarray[Any, Any]]] = []

    def work(self) -> None:
        plan, store = self.plan, self.store
        store.set_optimizer(optim.create("test"))
        keys = list(range(len(plan.sizes)))
        store.init(keys, [np.zeros(size, np.float32) for size in plan.sizes])
        for keys_of_call in plan.pushes:
            if self.chance.random() < 0.8:
                self.push(keys_of_call)
            else:  # nobody need make the same calls
                for key in keys_of_call:
                    self.push([key])
            if self.chance.random() < plan.breaks:
                self.lose_a_connection()
        for pending, key, value, out in self.results:
            pending.wait()
            if plan.staleness == 0:
                assert (out == value).all(), f"seed {plan.seed}, key {key}: {set(out.tolist())} and not {value}"
        store.wait()
        store.barrier()
        for key in keys:
            out = np.empty(plan.sizes[key], np.float32)
            store.pull(key, out)
            assert (out == plan.expected(key, sum(key in keys for keys in plan.pushes))).all(), (
                f"seed {plan.seed}, key {key}"
            )
        store.barrier()

    def push(self, keys: list[int]) -> None:
        for key in keys:
            self.rounds[key] += 1
        values = [np.full(self.plan.sizes[key], self.store.rank + 1, np.float32) for key in keys]
        outs, priority = [np.empty_like(value) for value in values], self.chance.randint(-3, 3)
        if self.chance.random() < 0.4:
            self.store.push(keys, values, priority)
            for value in values:
                value[:] = np.nan
        else:
            pending = self.store.pushpull(keys, values, outs, priority, wait=self.chance.random() < 0.3)
            self.expect(pending, keys, outs)
        if self.chance.random() < 0.2:
            outs = [np.empty_like(value) for value in values]
            pending = self.store.pull(keys, outs, self.chance.randint(-3, 3), wait=False)
            self.expect(pending, keys, outs)

    def expect(self, pending: Pending, keys: list[int], outs: list[np.ndarray[Any, Any]]) -> None:
        for key, out in zip(keys, outs, strict=True):
            self.results.append((pending, key, self.plan.expected(key, self.rounds[key]), out))

    def lose_a_connection(self) -> None:
        worker = self.store._worker
        with worker._driving:
            worker._servers[self.chance.randrange(worker.num_servers)].lose(ConnectionResetError("the test wants it"))


@pytest.mark.parametrize("seed", range(11))
def test_nothing_is_lost_counted_twice_or_out_of_order(seed: int) -> None:
    plan = Plan(seed)
    with job(plan.num_workers, plan.num_servers, **plan.knobs) as made:
        made.results(lambda store: Run(plan, store).work(), staleness=plan.staleness)
