"""Leases of samples from servers in threads: each key has each sample once, and the loop ends when all have."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reigen.kv
from reigen import optim
from reigen.cluster.membership.messages import MemberLost, MemberReturned, WorkerRoster
from reigen.errors import ArgumentError, DeadlineError, UnsupportedError
from reigen.kv.client.dist_store import DistStore
from reigen.kv.values import RowSparse
from tests.kv.threaded import Job, job

SAMPLES, BATCH, EPOCHS = 30, 4, 3
#: The second key is cut in two, and has each sample in both parts.
KEYS = {"small": 1, "cut": 100}
CUT: dict[str, Any] = {"kv_bigarray_bound": 1000, "kv_slice_bytes": 1 << 12}
ELASTIC: dict[str, Any] = {"kv_on_worker_loss": "elastic", **CUT}


@pytest.fixture
def made() -> Iterator[Job]:
    with job(3, 2, **ELASTIC) as one:
        yield one


@pytest.fixture(params=["a disk", "memory"])
def saving(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    on_disk: dict[str, Any] = {"kv_snapshot_dir": str(tmp_path), "kv_snapshot_seconds": 1000.0}
    with job(3, 2, **ELASTIC, **(on_disk if request.param == "a disk" else {"kv_replicas": 2})) as one:
        yield one


def gradients(indices: Any) -> list[np.ndarray]:
    """One for each of these samples, at its place."""
    ones = np.zeros(SAMPLES)
    ones[indices] = 1.0
    return [np.tile(ones, times) for times in KEYS.values()]


def begin(store: DistStore) -> DistStore:
    store.set_optimizer(optim.create("test"))
    store.init(list(KEYS), [np.zeros(SAMPLES * times) for times in KEYS.values()])
    return store


def leases(store: DistStore, epochs: int = EPOCHS, **facts: Any) -> Iterator[Any]:
    return store.sample_leases(SAMPLES, BATCH, epochs=epochs, seed=1, **facts)


def train(store: DistStore, **facts: Any) -> list[int]:
    numbers = []
    for lease in leases(store, **facts):
        store.push(list(KEYS), gradients(lease.indices))
        numbers.append(lease.number)
    return numbers


def counts(store: DistStore) -> set[float]:
    """How often each sample is in each key."""
    outs = [np.empty(SAMPLES * times) for times in KEYS.values()]
    store.pull(list(KEYS), out=outs)
    return {float(count) for out in outs for count in out}


def elastic(made: Job, staleness: int | None, *workers: int) -> list[DistStore]:
    """Workers that begin a job, each of the process with ten more than its number."""
    stores = [made.store(worker, staleness=staleness, is_elastic=True, incarnation=10 + worker) for worker in workers]
    made.tell(WorkerRoster(workers, is_open=True, incarnations=tuple(10 + worker for worker in workers)))
    together(*((begin, store) for store in stores))
    return stores


def together(*calls: Any) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def call(number: int, function: Any, *arguments: Any) -> None:
        try:
            results[number] = function(*arguments)
        except BaseException as error:  # noqa: BLE001  looked at below
            results[number] = error

    threads = [threading.Thread(target=call, args=(number, *each)) for number, each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return results


def lose(made: Job, worker: int, incarnation: int) -> None:
    made.tell(MemberLost("worker", worker, "here", "its process ended", incarnation=incarnation))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_each_sample_counts_once_an_epoch_for_any_number_of_workers(num_workers: int) -> None:
    with job(num_workers, 2, **CUT) as one:

        def work(store: DistStore) -> tuple[list[int], set[float]]:
            numbers = train(begin(store))
            return numbers, counts(store)  # nothing has to be waited for: all batches are in the values

        results = one.results(work, staleness=None)
    assert sorted(number for numbers, _ in results for number in numbers) == list(range(EPOCHS * 8))
    assert all(counted == {EPOCHS} for _, counted in results)


def test_epochs_that_are_looped_over_one_by_one_end_together(made: Job) -> None:
    stores = elastic(made, None, 0, 1)

    def work(store: DistStore) -> list[set[float]]:
        found = []
        for epoch in range(EPOCHS):
            assert {number // 8 for number in train(store, epochs=epoch + 1)} <= {epoch}
            found.append(counts(store))
            store.barrier()
        return found

    made.barrier = threading.Barrier(2)
    assert together(*((work, store) for store in stores)) == [[{1}, {2}, {3}]] * 2
    for store in stores:
        store.close()


def test_a_job_may_begin_with_a_later_epoch_and_leave_out_a_short_batch(made: Job) -> None:
    (store,) = elastic(made, None, 0)
    assert train(store, first_epoch=1, drop_last=True) == list(range(7, 21))
    assert train(store, first_epoch=0, drop_last=True) == []
    store.close()


@pytest.mark.parametrize("staleness", [None, 0, 2])
def test_what_a_dead_worker_had_goes_to_another_which_repeats_no_shard(made: Job, staleness: int | None) -> None:
    """It dies when one key has its push, and the other has not: the batch is in each of them once all the same."""
    dead, other = elastic(made, staleness, 0, 1)
    of_dead, held = leases(dead), leases(other)
    first, second = next(of_dead), next(held)
    small, cut = gradients(second.indices)
    pending = dead.push("small", gradients(first.indices)[0])
    other.push("small", small).wait()
    pending.wait()
    dead.abandon()
    lose(made, 0, 10)
    other.push("cut", cut)
    assert [lease.number for lease in pushed(other, held)] == [0, *range(2, EPOCHS * 8)]
    assert counts(other) == {EPOCHS}
    other.close()


def test_a_newcomer_takes_what_is_left(made: Job) -> None:
    first, second = elastic(made, None, 0, 1)
    held = leases(second)
    lease = next(held)
    numbers = [lease.number]
    second.abandon()
    lose(made, 1, 11)
    newcomer = made.store(1, staleness=None, is_elastic=True, incarnation=12)
    made.tell(MemberReturned("worker", 1, "here", 12, is_new=True))
    begin(newcomer)
    found = together((train, first), (train, newcomer))
    assert sorted([*found[0], *found[1]]) == list(range(EPOCHS * 8))
    assert numbers == [0]
    assert counts(newcomer) == {EPOCHS}
    newcomer.close()
    first.close()


def test_who_breaks_out_of_the_loop_gives_its_batch_back(made: Job) -> None:
    first, second = elastic(made, None, 0, 1)
    for lease in leases(first):
        first.push(list(KEYS), gradients(lease.indices)).wait()
        break
    assert sorted(train(second)) == list(range(EPOCHS * 8))
    assert counts(second) == {EPOCHS}, "its pushes count, and those of the other one of the same batch do not"
    assert train(first) == []
    first.close()
    second.close()


@pytest.mark.parametrize("staleness", [0, 1])
def test_who_waits_for_samples_is_not_waited_for_in_rounds(made: Job, staleness: int) -> None:
    """One batch more than workers can share: the other one goes on alone, in round after round of another key."""
    first, second = elastic(made, staleness, 0, 1)
    threads = []
    for lease in first.sample_leases(SAMPLES, 10, epochs=1):
        if not threads:
            threads.append(threading.Thread(target=consume, args=(second,)))
            threads[0].start()
        first.pushpull("small", gradients(lease.indices)[0], out=np.empty(SAMPLES))
    threads[0].join(60)
    assert not threads[0].is_alive()
    out = np.empty(SAMPLES)
    first.pull("small", out=out)
    assert set(out.tolist()) == {1.0}
    # both take part in rounds again
    together(*((store.pushpull, "small", np.ones(SAMPLES), np.empty(SAMPLES)) for store in (first, second)))
    first.pull("small", out=out)
    assert set(out.tolist()) == {3.0}
    first.close()
    second.close()


def consume(store: DistStore) -> None:
    for lease in store.sample_leases(SAMPLES, 10, epochs=1):
        store.pushpull("small", gradients(lease.indices)[0], out=np.empty(SAMPLES))


@pytest.mark.parametrize("staleness", [None, 0])
def test_servers_that_are_killed_forget_no_lease_and_no_batch(saving: Job, staleness: int | None) -> None:
    first, second = elastic(saving, staleness, 0, 1)
    held = leases(first)
    for number in range(6):
        lease = next(held)
        assert lease.number == number
        pending = first.push(list(KEYS), gradients(lease.indices))
        if staleness == 0:
            second.push(list(KEYS), gradients([]))
        pending.wait()
        second.wait()
        saving.replace_server(number % 2)
    found = together((lambda: [one.number for one in pushed(first, held)],), (train, second))
    assert sorted([*found[0], *found[1]]) == list(range(6, EPOCHS * 8))
    assert counts(first) == {EPOCHS}
    first.close()
    second.close()


def pushed(store: DistStore, held: Iterator[Any]) -> Iterator[Any]:
    for lease in held:
        store.push(list(KEYS), gradients(lease.indices))
        yield lease


def test_a_server_that_was_away_when_a_worker_died_frees_its_batch(saving: Job) -> None:
    first, second = elastic(saving, None, 0, 1)
    held = leases(first)
    lease = next(held)
    first.push("cut", gradients(lease.indices)[1]).wait()
    first.abandon()
    saving.members = [member for member in saving.members if member.number != 0]
    saving.replace_server(0)
    saving.tell(WorkerRoster((1,), is_open=True, incarnations=(11,)))
    assert sorted(train(second)) == list(range(EPOCHS * 8))
    assert counts(second) == {EPOCHS}
    second.close()


def test_rows_and_many_small_keys_count_once_as_well(made: Job) -> None:
    (store,) = elastic(made, None, 0)
    store.init("rows", RowSparse(np.arange(SAMPLES), np.zeros((SAMPLES, 2)), (SAMPLES, 2)))
    store.init([f"key {number}" for number in range(20)], [np.zeros(SAMPLES)] * 20)

    def push(indices: Any) -> None:
        store.push("rows", RowSparse(np.sort(indices), np.ones((len(indices), 2)), (SAMPLES, 2)))
        store.push([f"key {number}" for number in range(20)], [gradients(indices)[0]] * 20)

    for lease in leases(store, epochs=1):  # and gives its pushes up
        push(lease.indices)
        break
    for lease in leases(store, epochs=1):
        push(lease.indices)
    rows = RowSparse(np.empty(0, np.int64), np.empty((0, 2)), (SAMPLES, 2))
    store.row_sparse_pull("rows", out=rows, row_ids=np.arange(SAMPLES))
    outs = [np.empty(SAMPLES) for _ in range(20)]
    store.pull([f"key {number}" for number in range(20)], out=outs)
    assert set(np.concatenate([rows.values.reshape(-1), *outs]).tolist()) == {1.0}
    store.close()


def test_a_key_is_pushed_once_a_lease_and_a_loop_is_not_in_another(made: Job) -> None:
    (store,) = elastic(made, None, 0)
    for lease in leases(store):
        store.push("small", gradients(lease.indices)[0])
        with pytest.raises(ArgumentError, match="'small' was pushed before in this lease"):
            store.push("small", gradients(lease.indices)[0])
        with pytest.raises(ArgumentError, match="leases samples already"):
            next(leases(store))
        break
    store.push("small", gradients([0])[0])
    store.push("small", gradients([0])[0])
    store.close()


def test_keys_that_few_batches_push_are_remembered_by_some_ranges(made: Job) -> None:
    (store,) = elastic(made, None, 0)
    num_batches = 1000
    for lease in store.sample_leases(num_batches, 1, epochs=1):
        if lease.number % 2:
            store.push("small", gradients([0])[0])
    out = np.empty(SAMPLES)
    store.pull("small", out=out)
    assert out[0] == num_batches // 2
    shards = [shard for server in made.servers.values() for shard in server._stores[0].shards.values()]
    assert max(shard.batches.num_ranges for shard in shards) <= 256 + 64
    store.close()


def test_who_has_the_last_batch_is_named() -> None:
    with job(2, 1, deadline_seconds=3.0, **ELASTIC) as one:
        first, second = elastic(one, None, 0, 1)
        held = first.sample_leases(SAMPLES, SAMPLES)
        next(held)
        with pytest.raises(DeadlineError, match=r"leases of samples: none is free; those of worker 0"):
            next(second.sample_leases(SAMPLES, SAMPLES))
        held.close()
        assert [lease.number for lease in second.sample_leases(SAMPLES, SAMPLES)] == [0]
        first.close()
        second.close()


def test_workers_that_mean_other_batches_hear_of_it(made: Job) -> None:
    first, second = elastic(made, None, 0, 1)
    held = first.sample_leases(SAMPLES, 5)
    next(held)
    with pytest.raises(ArgumentError, match=r"batch_size=6.*worker 0 lease.*batch_size=5"):
        next(second.sample_leases(SAMPLES, 6))
    held.close()
    first.close()
    second.close()


def test_stores_that_cannot_lease_say_why() -> None:
    with job(1, 1) as one, one.store(0) as store:
        store.set_optimizer(optim.create("test"))
        with pytest.raises(UnsupportedError, match="in elastic jobs only"):
            store.sample_leases(10, 2)
    with job(1, 1) as one, one.store(0, staleness=None) as store:
        store.init("w", np.zeros(2))
        held = store.sample_leases(10, 2)
        next(held)
        with pytest.raises(UnsupportedError, match="needs an optimizer"):
            store.push("w", np.ones(2))
        held.close()
    with job(1, 1, kv_on_worker_loss="wait") as one, one.store(0, staleness=None) as store:
        store.set_optimizer(optim.create("test"))
        with pytest.raises(UnsupportedError, match="ON_WORKER_LOSS=wait"):
            store.sample_leases(10, 2)


def test_a_local_store_has_all_batches_itself() -> None:
    with reigen.kv.create("local") as store:
        assert [lease.indices.tolist() for lease in store.sample_leases(5, 2, shuffle=False)] == [[0, 1], [2, 3], [4]]
        assert [lease.epoch for lease in store.sample_leases(5, 2, epochs=2, shuffle=False)] == [1, 1, 1]
        assert not list(store.sample_leases(5, 2, epochs=2, shuffle=False))
