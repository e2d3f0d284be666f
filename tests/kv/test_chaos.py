"""Random jobs with real servers and stores in threads, in which servers and workers die and are replaced, messages are
dropped, and workers leave early: the closed form holds to the bit. REIGEN_SIM_SEED=<seed> replays one of them.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reigen import optim
from reigen.kv.client.dist_store import DistStore
from tests.kv.threaded import Job, job

pytestmark = pytest.mark.slow

_REPLAY = os.environ.get("REIGEN_SIM_SEED")
SIZES = {"small": 5, "other": 300, "large": 5000}
CUT = {"kv_bigarray_bound": 1000, "kv_slice_bytes": 1 << 12}


@dataclass(frozen=True)
class Plan:
    """What one seed stands for."""

    #: how often each worker pushes
    rounds: tuple[int, ...]
    servers: int
    staleness: int | None
    dtype: str
    knobs: dict[str, Any]
    #: before which of worker 0's rounds which server dies
    dying_servers: dict[int, int]
    #: after how many rounds the last worker dies, having begun another; 0: never
    dies_after: int

    @property
    def closed_form(self) -> int:
        return sum((rank + 1) * rounds for rank, rounds in enumerate(self.rounds))


def make_plan(seed: int) -> Plan:
    """Draw a job."""
    rng = random.Random(seed)
    workers, servers = rng.choice((1, 2, 2, 3)), rng.choice((1, 2, 3))
    even = rng.randint(3, 7)
    rounds = tuple(even if rng.random() < 0.5 else rng.randint(2, 7) for _ in range(workers))
    drops = {"kv_resend": True, "kv_resend_timeout_ms": 50, "kv_drop_percent": rng.choice((3.0, 10.0))}
    knobs = {"kv_on_worker_loss": "wait", **(drops if rng.random() < 0.5 else {})}
    deaths = {rng.randint(1, rounds[0]): rng.randrange(servers) for _ in range(rng.choice((0, 1, 1, 2)))}
    dies_after = rng.randint(1, rounds[-1] - 1) if workers > 1 and rng.random() < 0.5 else 0
    return Plan(
        rounds, servers, rng.choice((0, 0, 1, None)), rng.choice(("float32", "float16")), knobs, deaths, dies_after
    )


class Life:
    """What a worker does, and whoever takes its place."""

    def __init__(self, plan: Plan, made: Job, seed: int) -> None:
        self.plan, self.made, self.seed = plan, made, seed

    def __call__(self, store: DistStore) -> dict[str, set[float]]:
        self._begin(store)
        dies = self.plan.dies_after and store.rank == len(self.plan.rounds) - 1
        self._push(store, upto=self.plan.dies_after if dies else self.plan.rounds[store.rank])
        if not dies:
            return self._end(store)
        store.wait()
        for key in SIZES:  # what becomes of these it does not learn
            store.push(key, self._gradient(store, key))
        self.made.lose_worker(store)
        with self.made.store(store.rank, is_recovery=True, incarnation=2, staleness=self.plan.staleness) as second:
            self._begin(second)
            self._push(second, upto=self.plan.rounds[store.rank])
            return self._end(second)

    def _begin(self, store: DistStore) -> None:
        store.set_optimizer(optim.create("test"))
        for key, size in SIZES.items():
            store.init(key, np.ones(size, self.plan.dtype))

    def _gradient(self, store: DistStore, key: str) -> np.ndarray[Any, Any]:
        return np.full(SIZES[key], store.rank + 1, self.plan.dtype)

    def _push(self, store: DistStore, upto: int) -> None:
        rng = random.Random(f"{self.seed} {store.rank}")
        outs = {key: np.empty(size, self.plan.dtype) for key, size in SIZES.items()}
        for step in range(min(store.rounds(key) for key in SIZES), upto):
            # One that takes another's place may find keys that are a round ahead. If it went on with those first, it
            # would wait for workers that wait for the others.
            due = [key for key in SIZES if store.rounds(key) <= step]
            for keys in [due] if rng.random() < 0.5 else [[key] for key in due]:
                server = self.plan.dying_servers.get(step + 1) if "large" in keys else None
                if store.rank == 0 and server is not None:
                    self.made.replace_server(server)
                gradients, landing = [self._gradient(store, key) for key in keys], [outs[key] for key in keys]
                how = rng.choice(("together", "apart", "push"))
                if how == "together":
                    store.pushpull(keys, gradients, landing, wait=rng.random() < 0.5)
                else:
                    store.push(keys, gradients)
                if how == "apart":
                    store.pull(keys, landing)

    def _end(self, store: DistStore) -> dict[str, set[float]]:
        store.leave()
        store.barrier()
        outs = {key: np.empty(size, self.plan.dtype) for key, size in SIZES.items()}
        for key, out in outs.items():
            store.pull(key, out)
        store.barrier()
        return {key: set(out.tolist()) for key, out in outs.items()}


@pytest.mark.parametrize("seed", range(8) if _REPLAY is None else [int(_REPLAY)])
def test_the_closed_form_holds_whatever_happens(tmp_path: Path, seed: int) -> None:
    plan = make_plan(seed)
    snapshots = {"kv_snapshot_dir": str(tmp_path), "kv_snapshot_seconds": 0.0}
    with job(len(plan.rounds), plan.servers, **CUT, **plan.knobs, **snapshots) as made:
        results = made.results(Life(plan, made, seed), staleness=plan.staleness)
    expected = {key: {1.0 + plan.closed_form} for key in SIZES}
    assert results == [expected] * len(plan.rounds), plan
