"""Stores of an elastic job on servers in threads: what the test, as the scheduler, says, and what stores then do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reigen import optim
from reigen.cluster.membership.messages import HeldKeys, MemberLeft, MemberLost, MemberReturned, WorkerRoster
from reigen.errors import PeerLostError
from reigen.kv.client.dist_store import DistStore
from reigen.kv.membership.scheduler import Scheduler
from reigen.kv.server.replicas import HeldCopy
from tests.kv.threaded import Job, job, wait_until

SIZE = 3000
COPIED: dict[str, Any] = {"kv_replicas": 2}
CUT: dict[str, Any] = {"kv_bigarray_bound": 1000, "kv_slice_bytes": 1 << 12}


@pytest.fixture
def made() -> Iterator[Job]:
    with job(3, 2, kv_on_worker_loss="elastic", **CUT) as one:
        yield one


@pytest.fixture(params=["a disk", "memory"])
def saving(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    """Servers that can be started again; that they save seldom makes no difference."""
    on_disk: dict[str, Any] = {"kv_snapshot_dir": str(tmp_path), "kv_snapshot_seconds": 1000.0}
    with job(3, 2, kv_on_worker_loss="elastic", **CUT, **(on_disk if request.param == "a disk" else COPIED)) as one:
        yield one


def store_of(made: Job, worker: int, incarnation: int) -> DistStore:
    return made.store(worker, is_elastic=True, incarnation=incarnation)


def begin(store: DistStore) -> float:
    """The value that a worker finds."""
    store.set_optimizer(optim.create("test"))
    store.init("w", np.full(SIZE, 5.0))
    return pull(store)


def pull(store: DistStore) -> float:
    out = np.empty(SIZE)
    store.pull("w", out=out)
    assert set(out.tolist()) == {out[0]}
    return float(out[0])


def push(store: DistStore, value: float) -> None:
    store.push("w", np.full(SIZE, value))


def together(*calls: Any) -> list[Any]:
    """What calls return that wait for each other."""
    results: list[Any] = [None] * len(calls)

    def call(number: int, function: Any, *arguments: Any) -> None:
        results[number] = function(*arguments)

    threads = [threading.Thread(target=call, args=(number, *each)) for number, each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def two(made: Job) -> tuple[DistStore, DistStore]:
    """Workers 0 and 1, which have begun the job."""
    stores = store_of(made, 0, 10), store_of(made, 1, 11)
    made.tell(WorkerRoster((0, 1), is_open=True, incarnations=(10, 11)))
    assert together((begin, stores[0]), (begin, stores[1])) == [5.0, 5.0]
    return stores


def test_a_worker_dies_and_another_one_has_its_place(made: Job) -> None:
    first, second = two(made)
    push(first, 1.0)
    push(second, 2.0)
    assert pull(first) == 8.0
    second.abandon()
    push(first, 1.0)
    made.tell(MemberLost("worker", 1, "here", "its process ended", incarnation=11))
    assert pull(first) == 9.0
    newcomer = store_of(made, 1, 12)
    made.tell(MemberReturned("worker", 1, "here", 12, is_new=True))
    assert begin(newcomer) == 9.0
    assert newcomer.rounds("w") == 2
    push(first, 1.0)
    push(newcomer, 4.0)
    assert pull(newcomer) == 14.0
    newcomer.close()
    first.close()


@pytest.mark.parametrize(
    "late", [MemberLost("worker", 1, "here", "its process ended", incarnation=11), MemberLeft("worker", 1, "here", 11)]
)
def test_news_of_the_process_before_are_not_about_the_one_that_is_there(made: Job, late: Any) -> None:
    first, second = two(made)
    second.abandon()
    newcomer = store_of(made, 1, 12)  # servers hear of it before they hear of the other one's end
    assert begin(newcomer) == 5.0
    made.tell(late)
    push(first, 1.0)
    push(newcomer, 2.0)
    assert pull(newcomer) == 8.0
    push(first, 1.0)
    push(newcomer, 2.0)
    assert pull(first) == 11.0
    newcomer.close()
    first.close()


def test_a_lost_process_that_lives_is_not_let_in(made: Job) -> None:
    first, second = two(made)
    made.tell(MemberLost("worker", 1, "here", "nothing was heard of it", incarnation=11))
    push(first, 1.0)
    assert pull(first) == 6.0
    with pytest.raises(PeerLostError, match=r"worker 1 on host .* was given up by the others"):
        pull(second)
    second.abandon()
    first.close()


def test_one_that_leaves_in_good_order_counts_and_is_not_waited_for(made: Job) -> None:
    first, second = two(made)
    push(first, 1.0)
    push(second, 2.0)
    second.close()
    made.tell(MemberLeft("worker", 1, "here", 11))
    push(first, 1.0)
    assert pull(first) == 9.0
    first.close()


def test_the_value_survives_all_workers(made: Job) -> None:
    for store, incarnation in zip(two(made), (10, 11), strict=True):
        store.abandon()
        made.tell(MemberLost("worker", incarnation - 10, "here", "its process ended", incarnation=incarnation))
    newcomer = store_of(made, 2, 13)
    assert begin(newcomer) == 5.0
    push(newcomer, 2.0)
    assert pull(newcomer) == 7.0
    newcomer.close()


def replace_server(made: Job, server: int) -> None:
    made.replace_server(server)
    if made.config.kv_replicas == 2:  # the others copy what they have to the next process
        wait_until(lambda: copy_held_by(made, server).is_complete)


def copy_held_by(made: Job, server: int) -> HeldCopy:
    """What a server has of the other one."""
    return made.servers[server]._holder.held.get(1 - server, HeldCopy())


def replace_servers(made: Job, *present: int) -> None:
    """All servers die, one after the other, and are told who of the workers, with these incarnations, is there."""
    for server in range(made.num_servers):
        replace_server(made, server)
    made.tell(WorkerRoster(tuple(one - 10 for one in present), is_open=True, incarnations=present))


def test_servers_go_on_from_their_snapshots(saving: Job) -> None:
    first, second = two(saving)
    push(first, 1.0)
    push(second, 2.0)
    assert pull(first) == 8.0
    push(first, 1.0)
    replace_servers(saving, 10, 11)
    push(second, 2.0)
    assert (pull(first), pull(second)) == (11.0, 11.0)
    newcomer = store_of(saving, 2, 12)
    saving.tell(MemberReturned("worker", 2, "here", 12, is_new=True))
    assert begin(newcomer) == 11.0
    assert newcomer.rounds("w") == 2
    for store, value in ((first, 1.0), (second, 2.0), (newcomer, 3.0)):
        push(store, value)
    assert pull(second) == 17.0
    for store in (first, second, newcomer):
        store.close()


def test_a_worker_that_dies_while_servers_are_away_is_not_waited_for(saving: Job) -> None:
    first, second = two(saving)
    push(first, 1.0)
    second.abandon()
    replace_servers(saving, 10)
    assert pull(first) == 6.0
    first.close()


def test_a_newcomer_takes_the_place_of_one_that_died_while_servers_are_away(saving: Job) -> None:
    first, second = two(saving)
    push(first, 1.0)
    second.abandon()
    for server in range(saving.num_servers):
        replace_server(saving, server)
    saving.tell(WorkerRoster((0, 1), is_open=True, incarnations=(10, 12)))
    assert pull(first) == 6.0  # what may be of the one before is not waited for
    newcomer = store_of(saving, 1, 12)
    assert begin(newcomer) == 6.0
    push(first, 1.0)
    push(newcomer, 4.0)
    assert pull(newcomer) == 11.0
    newcomer.close()
    first.close()


def test_a_lost_process_is_not_let_in_by_a_server_that_was_started_again(saving: Job) -> None:
    first, second = two(saving)
    saving.tell(MemberLost("worker", 1, "here", "nothing was heard of it", incarnation=11))
    newcomer = store_of(saving, 1, 12)
    saving.tell(MemberReturned("worker", 1, "here", 12, is_new=True))
    assert begin(newcomer) == 5.0
    replace_servers(saving, 10)  # which have not heard of the newcomer
    with pytest.raises(PeerLostError, match=r"worker 1 on host .* was given up by the others"):
        pull(second)
    second.abandon()
    newcomer.abandon()
    first.close()


def test_keys_that_come_after_the_restart_of_a_server(saving: Job) -> None:
    first, second = two(saving)
    replace_servers(saving, 10, 11)
    together((first.init, "v", np.zeros(SIZE)), (second.init, "v", np.zeros(SIZE)))
    first.push("v", np.full(SIZE, 1.0))
    second.push("v", np.full(SIZE, 2.0))
    out = np.empty(SIZE)
    first.pull("v", out=out)
    assert set(out.tolist()) == {3.0}
    first.close()
    second.close()


def test_servers_tell_the_scheduler_which_keys_they_hold(made: Job) -> None:
    first, second = two(made)
    members = [made._places[server][0] for server in range(made.num_servers)]
    wait_until(lambda: [member.keys for member in members] == ["1 key: 'w'"] * 2)
    together((first.init, "v", np.zeros(SIZE)), (second.init, "v", np.zeros(SIZE)))
    wait_until(lambda: [member.keys for member in members] == ["2 keys: 'v', 'w'"] * 2)
    first.close()
    second.close()


def test_the_launcher_hears_of_them_in_one_line() -> None:
    lines: list[bytes] = []
    scheduler: Any = SimpleNamespace(_report=lines.append, _settings=SimpleNamespace(num_servers=4))
    Scheduler.on_held_keys(scheduler, HeldKeys(3, " \n"))
    Scheduler.on_held_keys(scheduler, HeldKeys(4, "of a server that is not there"))
    Scheduler.on_held_keys(scheduler, HeldKeys(3, "2 keys: 'a\nb', " + 1000 * "c"))
    (line,) = lines
    assert line.startswith(b"holds 3 2 keys: 'a b', ccc")
    assert line.endswith(b"c\n")
    assert len(line) < 512
