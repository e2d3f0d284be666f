"""The distributed store when servers and workers die, and come back: nothing hangs, nothing is lost silently."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reigen import optim
from reigen.errors import PeerLostError
from reigen.kv.client.dist_store import DistStore
from reigen.kv.client.key_init import KeyInitializer
from reigen.kv.client.sharding import home_server
from reigen.kv.values import key_id
from tests.kv.threaded import SECONDS, Job, job

pytestmark = pytest.mark.slow

CUT = {"kv_bigarray_bound": 1000, "kv_slice_bytes": 1 << 12}
SIZE = 5000


def begin(store: DistStore) -> None:
    store.set_optimizer(optim.create("test"))
    store.init("fc.weight", np.zeros(SIZE, np.float32))


def step(store: DistStore, out: np.ndarray[Any, Any], times: int = 1) -> None:
    for _ in range(times):
        store.pushpull("fc.weight", np.full(SIZE, store.rank + 1, np.float32), out)


@pytest.mark.parametrize("seconds", [0.0, 1e6], ids=["always", "when the key was made"])
def test_a_server_goes_on_from_its_snapshot(tmp_path: Path, seconds: float) -> None:
    """What was not in a snapshot is lost, by the server that was lost."""

    def work(store: DistStore) -> Any:
        out = np.empty(SIZE, np.float32)
        begin(store)
        step(store, out, 3)
        store.barrier()
        if store.rank == 0:
            made.replace_server(1)
        step(store, out, 3)
        return set(out.tolist())

    with job(2, 2, **CUT, kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=seconds) as made:
        results = made.run(work)
    assert results == [{6 * 3.0} if seconds == 0.0 else {6 * 3.0, 3 * 3.0}] * 2


@pytest.mark.parametrize("num_keys_before", [0, 1], ids=["first key", "second key"])
@pytest.mark.parametrize("whose", ["home", "other", "both"])
@pytest.mark.parametrize(
    ("name", "is_over"), [("_elsewhere", False), ("_fill", False), ("_fill", True)], ids=["agreed", "told", "filled"]
)
def test_a_server_dies_while_a_key_comes_into_being(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_over: bool, whose: str, num_keys_before: int
) -> None:
    """What a server has agreed to and has no value of yet is in no snapshot: worker 0 says it once more."""
    at_home = home_server(key_id("fc.weight"), 2)
    victims = {"home": [at_home], "other": [1 - at_home], "both": [0, 1]}[whose]
    original, is_due = getattr(KeyInitializer, name), True

    def kill(self: KeyInitializer, entries: Any, *rest: Any) -> None:
        nonlocal is_due
        dies, is_due = is_due and entries[0].name == "fc.weight", is_due and entries[0].name != "fc.weight"
        if is_over:
            original(self, entries, *rest)
        for number in victims if dies else ():
            made.replace_server(number)
        if not is_over:
            original(self, entries, *rest)

    def work(store: DistStore) -> Any:
        store.set_optimizer(optim.create("test"))
        for number in range(num_keys_before):
            store.init(f"before {number}", np.full(SIZE, 5, np.float32))
        out, before = np.empty(SIZE, np.float32), np.full(SIZE, 5, np.float32)
        store.init("fc.weight", np.arange(SIZE, dtype=np.float32))
        step(store, out, 2)
        for number in range(num_keys_before):
            store.pull(f"before {number}", before)
        return set((out - np.arange(SIZE)).tolist()), set(before.tolist())

    monkeypatch.setattr(KeyInitializer, name, kill)
    with job(2, 2, **CUT, kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=0.0) as made:
        assert made.run(work) == [({2 * 3.0}, {5.0})] * 2
    assert not is_due


def test_a_server_dies_while_its_only_key_is_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pieces are gone, the whole is not there yet: worker 0 has it."""
    original, is_due = KeyInitializer._fill, True

    def kill(self: KeyInitializer, entries: Any, values: Any) -> None:
        nonlocal is_due
        if entries[0].generation and is_due:
            is_due = False
            made.replace_server(0)
        original(self, entries, values)

    def work(store: DistStore) -> Any:
        store.init("fc.weight", np.ones(SIZE, np.float32))
        store.set_optimizer(optim.create("lars", learning_rate=0.1))
        out = np.empty(SIZE, np.float32)
        store.pull("fc.weight", out)
        value = set(out.tolist())
        step(store, out, 2)
        return value, np.isfinite(out).all()

    monkeypatch.setattr(KeyInitializer, "_fill", kill)
    with job(2, 1, **CUT, kv_snapshot_dir=str(tmp_path), kv_snapshot_seconds=0.0) as made:
        assert made.run(work) == [({1.0}, True)] * 2
    assert not is_due


def test_a_server_that_comes_back_empty_is_named() -> None:
    def work(store: DistStore) -> None:
        out = np.empty(SIZE, np.float32)
        begin(store)
        step(store, out)
        store.barrier()
        if store.rank == 0:
            made.replace_server(0)
        step(store, out)

    with job(2, 2, **CUT) as made:
        results = made.run(work)
    for result in results:
        assert isinstance(result, PeerLostError), results
        assert "server 0 on host here was started again and holds nothing" in str(result)
        assert "REIGEN_KV_SNAPSHOT_DIR" in str(result)


def test_a_connection_that_breaks_is_made_again() -> None:
    def work(store: DistStore) -> Any:
        out = np.empty(SIZE, np.float32)
        begin(store)
        for number in range(6):
            pending = store.pushpull("fc.weight", np.full(SIZE, store.rank + 1, np.float32), out, wait=False)
            if number % 2 == store.rank:
                with store._worker._driving:
                    store._worker._servers[number % 2].lose(ConnectionResetError("the test wants it"))
            pending.wait()
        return set(out.tolist())

    with job(2, 2, **CUT) as made:
        assert made.run(work) == [{18.0}] * 2


def lose_one(made: Job) -> list[Any]:
    """Worker 1 dies after a round, the others go on for two."""
    gone = threading.Event()

    def work(store: DistStore) -> Any:
        out = np.empty(SIZE, np.float32)
        begin(store)
        step(store, out)
        store.barrier()
        if store.rank == 1:
            made.lose_worker(store)
            gone.set()
            return None
        assert gone.wait(SECONDS)
        step(store, out, 2)
        return set(out.tolist())

    return made.run(work)


def test_a_lost_worker_is_named_on_all_others() -> None:
    with job(3, 2, **CUT) as made:
        results = lose_one(made)
    for rank in (0, 2):
        assert isinstance(results[rank], PeerLostError), results
        assert results[rank].ranks == (1,)
        assert "worker 1 on host there is lost: its process ended" in str(results[rank])


def test_others_continue_without_a_lost_worker_if_they_are_told_to() -> None:
    with job(3, 2, **CUT, kv_on_worker_loss="continue") as made:
        results = lose_one(made)
    # 1 + 2 + 3, then twice 1 + 3, made up for the one that is missing
    assert results[0] == results[2] == {6.0 + 2 * 4 * 1.5}


def test_a_replacement_goes_on_where_the_lost_worker_was() -> None:
    def work(store: DistStore) -> Any:
        out = np.empty(SIZE, np.float32)
        begin(store)
        step(store, out, 2)
        store.barrier()
        if store.rank != 1:
            step(store, out, 3)
            return set(out.tolist())
        # it has pushed a third time, and dies before it learns what became of that
        store.push("fc.weight", np.full(SIZE, 2, np.float32))
        made.lose_worker(store)
        with made.store(1, is_recovery=True, incarnation=2) as second:
            assert second.is_recovery
            begin(second)
            assert second.rounds("fc.weight") in {2, 3}
            second.pull("fc.weight", out)
            assert out.min() >= 6.0
            step(second, out, 5 - second.rounds("fc.weight"))
            return set(out.tolist())

    with job(2, 2, **CUT, kv_on_worker_loss="wait") as made:
        assert made.run(work) == [{5 * 3.0}] * 2


def test_a_replacement_finds_keys_that_were_declared_anew() -> None:
    def begin(store: DistStore) -> None:
        store.init("fc.weight", np.ones(SIZE, np.float32))
        store.set_optimizer(optim.create("lars", learning_rate=0.1))

    def work(store: DistStore) -> Any:
        out = np.empty(SIZE, np.float32)
        begin(store)
        step(store, out)
        store.barrier()
        if store.rank == 0:
            step(store, out)
            return out.tolist()
        made.lose_worker(store)
        with made.store(1, is_recovery=True, incarnation=2) as second:
            begin(second)
            assert second.rounds("fc.weight") == 1
            step(second, out)
            return out.tolist()

    with job(2, 2, **CUT, kv_on_worker_loss="wait") as made:
        first, second = made.run(work)
    assert first == second


def test_the_end_of_the_job_ends_every_wait() -> None:
    def work(store: DistStore) -> None:
        begin(store)
        out = np.empty(SIZE, np.float32)
        if store.rank == 0:
            made.stop_job("the launcher was told to stop")
            return
        step(store, out)

    with job(2, **CUT) as made:
        results = made.run(work)
    assert isinstance(results[1], PeerLostError), results
    assert "the job is over: the launcher was told to stop" in str(results[1])
