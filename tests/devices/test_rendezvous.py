"""The store that ranks share while they connect their devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from torch._C import _distributed_c10d as c10d

from reigen.backends.device.store import ReplicatedStore, StoreWrite
from reigen.errors import CollectiveError
from reigen.torch.process_group import SharedStore


def in_a_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except CollectiveError as error:
            results.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def one_round(*stores: ReplicatedStore) -> list[list[StoreWrite]]:
    """What the ranks have written reaches all of them, in rank order."""
    written = [store.collect(0.0) for store in stores]
    for rank, store in enumerate(stores):
        for other, writes in enumerate(written):
            store.apply(writes, own=other == rank)
    return written


def test_what_one_rank_writes_all_of_them_read_after_a_round() -> None:
    first, second = ReplicatedStore(), ReplicatedStore()
    first.set("id", b"of rank 0")
    assert not first.check(["id"])
    thread, results = in_a_thread(lambda: second.get("id"))
    assert one_round(first, second) == [[StoreWrite("id", b"of rank 0")], []]
    thread.join()
    assert results == [b"of rank 0"]
    assert first.check(["id"])
    assert not first.check(["id", "another"])


def test_the_last_rank_that_writes_a_key_has_the_last_word_on_all() -> None:
    first, second = ReplicatedStore(), ReplicatedStore()
    second.set("key", b"1")
    first.set("key", b"0")
    one_round(first, second)
    assert (first.get("key"), second.get("key")) == (b"1", b"1")


def test_every_addition_has_a_sum_of_its_own() -> None:
    stores = [ReplicatedStore() for _ in range(3)]
    waiting = [
        in_a_thread(lambda store=store, rank=rank: store.add("n", rank + 1)) for rank, store in enumerate(stores)
    ]
    written = [store.collect(30.0) for store in stores]
    for rank, store in enumerate(stores):
        for other, writes in enumerate(written):
            store.apply(writes, own=other == rank)
    for thread, _ in waiting:
        thread.join()
    assert [results for _, results in waiting] == [[1], [3], [6]]
    assert [store.get("n") for store in stores] == [b"6"] * 3


def test_who_waits_when_the_attempt_is_given_up_is_told_why() -> None:
    store = ReplicatedStore()
    store.apply([StoreWrite("there", b"x")], own=False)
    thread, results = in_a_thread(lambda: store.get("id"))
    store.cancel("rank 1 has no route")
    thread.join()
    assert results == ["rank 1 has no route"]
    with pytest.raises(CollectiveError, match="rank 1 has no route"):
        store.add("n", 1)
    assert store.get("there") == b"x"


def test_torchs_process_groups_can_use_it() -> None:
    """What c10d calls of a store in Python, also through torch's own prefixes."""
    store = ReplicatedStore()
    shared = SharedStore(store)
    named = c10d.PrefixStore("group", shared)
    named.set("key", "value")
    store.apply(store.collect(0.0), own=True)
    assert named.get("key") == b"value"
    assert named.check(["key"])
    assert not named.check(["other"])
    named.wait(["key"], timedelta(seconds=1))
    assert named.clone().get("key") == b"value"
    thread, results = in_a_thread(lambda: shared.add("n", 2))
    store.apply(store.collect(30.0), own=True)
    thread.join()
    assert results == [2]
