"""Calls of a distributed store that cannot end well: they end by the deadline, and name who is missing."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reigen.config import Config
from reigen.errors import CollectiveError, DeadlineError
from reigen.kv.client.dist_store import DistStore
from reigen.kv.server.request_handler import RequestHandler
from reigen.net.shm_segment import ShmSegment
from tests.kv.jobs import Job, Process
from tests.kv.serving import Serving
from tests.kv.threaded import SECONDS, job
from tests.patience import patiently


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("how", ["together", "one by one", "push, then wait"])
def test_who_has_given_up_a_moment_earlier_is_not_named_beside_the_one_that_is_missing(
    how: str, num_servers: int
) -> None:
    keys = [f"w{number}" for number in range(12)]

    def attempt(seconds: float) -> None:
        has_given_up = [threading.Event() for _ in range(3)]

        def work(store: DistStore) -> Any:
            store.init(keys, [np.zeros(3, np.float32)] * len(keys))
            store.barrier()
            if store.rank == 1:  # it is there, and does nothing
                assert has_given_up[0].wait(SECONDS)
                assert has_given_up[2].wait(SECONDS)
                return None
            if store.rank == 2:  # a good deal later, but before the first has given up
                threading.Event().wait(seconds / 2)
            values = [np.ones(3, np.float32) for _ in keys]
            try:
                if how == "together":
                    store.pushpull(keys, values)
                elif how == "one by one":
                    pending = [store.pushpull(*each, wait=False) for each in zip(keys, values, strict=True)]
                    for each in reversed(pending):
                        each.wait()
                else:
                    store.push(keys, values)
                    store.wait()
            finally:
                has_given_up[store.rank].set()
            return None

        with job(3, num_servers, deadline_seconds=seconds) as made:
            results = made.run(work)
        for rank in (0, 2):
            assert isinstance(results[rank], DeadlineError), results
            assert results[rank].ranks == (1,), str(results[rank])

    patiently(attempt, 1.0)


def test_who_has_said_what_a_key_is_and_given_up_is_not_named_to_those_that_come_later() -> None:
    serving = Serving(3, Config(deadline_seconds=0.3))
    workers = [serving.worker(number) for number in range(3)]
    try:
        for worker, missing in ((workers[1], (0, 2)), (workers[2], (0,)), (workers[1], (0,)), (workers[0], (1, 2))):
            with pytest.raises(DeadlineError, match="what the key 'x' is") as caught:
                worker.declare("x", (1,))
            assert caught.value.ranks == missing
    finally:
        for worker in workers:
            worker.close()
        serving.stop()


CALLS = Path(__file__).with_name("timed_calls.py")
#: The calls of a store that may have to wait for servers, or for other workers.
WAITING = [
    *("init", "push, wait", "push, wait for all", "pull", "pull of all rows", "pushpull", "broadcast"),
    *("row_sparse_pull", "set_optimizer", "set_gradient_compression", "save_optimizer_states"),
    *("load_optimizer_states", "barrier", "num_dead_nodes", "another store", "leave", "close"),
]
#: How long a call may take beyond its deadline, on a machine that is not too busy.
TOLERANCE_SECONDS = 2.0
#: Those that end well. (It is too late for compression.)
FINE = {
    "a stopped server": {"barrier", "num_dead_nodes"},
    "a dead server": {"num_dead_nodes", "close"},
    "a silent server": {"num_dead_nodes", "close"},
    "a stopped scheduler": set(WAITING) - {"barrier", "set_gradient_compression"},
    "no partner": set(WAITING)
    - {"init", "push, wait", "push, wait for all", "pushpull", "broadcast", "barrier", "set_gradient_compression"},
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FINE)
def test_each_call_ends_by_its_deadline(what: str, tmp_path: Path) -> None:
    """A call may consist of several steps, be begun again, or have to connect again: one deadline ends it."""
    is_partner = what == "no partner"

    def attempt(seconds: float) -> None:
        num_workers = 2 if is_partner else 1
        variables = {"REIGEN_DEADLINE": str(seconds), "STATES": str(tmp_path / "states"), "PS_HEARTBEAT_INTERVAL": "0"}
        if what in {"a dead server", "a silent server"}:  # somebody is to start it again, and does not
            variables["REIGEN_KV_SNAPSHOT_DIR"] = str(tmp_path)
        with Job(num_workers, 1, **variables) as job, contextlib.ExitStack() as stack:
            scheduler = job.scheduler(REIGEN_DEADLINE="60")  # until somebody comes
            server = job.start((sys.executable, "-m", "reigen", "server"), PS_VERBOSE="1")
            workers = [
                job.start((sys.executable, str(CALLS)), DMLC_ROLE="worker", DMLC_TASK_ID=str(rank))
                for rank in range(num_workers)
            ]
            for worker in workers:
                worker.hear()
                worker.tell("prepare")
            for worker in workers:
                assert worker.hear()["error"] == ""
            if what == "a stopped server":
                server.signal(signal.SIGSTOP)
            elif what == "a stopped scheduler":
                scheduler.signal(signal.SIGSTOP)
            elif not is_partner:
                server.kill()
            if what == "a silent server":
                stack.enter_context(socket.create_server(("127.0.0.1", port_of(server)), backlog=64))
            took = {}
            for call in WAITING:
                told = workers[0].ask(call)
                took[call] = round(told["seconds"], 2), told["error"]
            late = {call: one for call, one in took.items() if one[0] > seconds + TOLERANCE_SECONDS}
            assert not late
            assert {call for call, (_, error) in took.items() if not error} == FINE[what], took

    patiently(attempt, 0.6)


def port_of(server: Process) -> int:
    found = re.search(r"this server listens at \S+:(\d+)", server.errors())
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("whose", ["server's", "worker's", "own"])
def test_where_memory_cannot_be_mapped_values_travel_through_sockets(
    whose: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened: set[ShmSegment] = set()
    original_open, original_map = ShmSegment.open, ShmSegment.map

    def open_it(pid: int, fd: int) -> ShmSegment:
        opened.add(segment := original_open(pid, fd))
        return segment

    def map_it(segment: ShmSegment, offset: int, nbytes: int) -> Any:
        where = "server's" if threading.current_thread().name.startswith("server-") else "worker's"
        if (segment in opened and where == whose) or (segment not in opened and whose == "own"):
            raise OSError(errno.ENOMEM, f"cannot map {nbytes} bytes of shared memory: Cannot allocate memory")
        return original_map(segment, offset, nbytes)

    monkeypatch.setattr(ShmSegment, "open", open_it)
    monkeypatch.setattr(ShmSegment, "map", map_it)

    def work(store: DistStore) -> Any:
        store.init([0, 1], [np.zeros(100_000, np.float32), np.zeros(3, np.float32)])
        outs = [np.full(100_000, store.rank + 1, np.float32), np.full(3, store.rank + 1, np.float32)]
        for _ in range(5):
            store.pushpull([0, 1], outs)
        return [set(out.tolist()) for out in outs]

    with caplog.at_level(logging.WARNING), job(2, 1, host_id="this") as made:
        assert made.results(work) == [[{48.0}, {48.0}]] * 2  # 3, then twice that, and so on
    warnings = [record.getMessage() for record in caplog.records]
    assert all("annot map" in text and "REIGEN_KV_SHARED_MEMORY=0" in text for text in warnings), warnings
    # one for each that has no room; of a server that cannot read, and on each worker that it cannot
    assert len(warnings) == {"server's": 4, "worker's": 2, "own": 3}[whose], warnings


def test_where_a_server_has_no_memory_at_all_every_worker_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RequestHandler.place

    def place(handler: RequestHandler, header: Any) -> Any:
        if header.body_bytes > 1 << 16:
            raise MemoryError("Unable to allocate 390. KiB")
        return original(handler, header)

    monkeypatch.setattr(RequestHandler, "place", place)

    def work(store: DistStore) -> None:
        store.init("w", np.zeros(100_000, np.float32))

    with job(2, 1, kv_shared_memory=False) as made:
        results = made.run(work)
    for result in results:
        assert type(result) is CollectiveError, results
        assert "server 0 on host here has not enough memory (Unable to allocate 390. KiB)" in str(result)


def test_a_bug_that_a_message_meets_breaks_its_store_off_and_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = RequestHandler.place

    def place(handler: RequestHandler, header: Any) -> Any:
        if header.body_bytes > 1 << 16:
            raise IndexError("index 9 is out of bounds")
        return original(handler, header)

    monkeypatch.setattr(RequestHandler, "place", place)

    def work(store: DistStore) -> None:
        store.init("w", np.zeros(100_000, np.float32))

    with job(2, 1, kv_shared_memory=False) as made:
        results = made.run(work)
    for result in results:
        assert type(result) is CollectiveError, results
        assert "server 0 on host here has a bug: IndexError: index 9 is out of bounds" in str(result)
    assert "Traceback" in caplog.text


def test_connections_that_lead_to_nothing_are_made_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    num_hellos = 0

    def work(store: DistStore) -> None:
        nonlocal num_hellos
        store.init("w", np.zeros(3, np.float32))

        def hear(*_: object) -> None:
            nonlocal num_hellos
            num_hellos += 1
            raise ConnectionResetError("the test wants it")

        monkeypatch.setattr("reigen.kv.server.server.KVServer.handle_hello", hear)
        with store._worker._driving:
            store._worker._servers[0].lose(ConnectionResetError("the test wants it"))
        store.pushpull("w", np.zeros(3, np.float32))

    with job(1, 1, peer_timeout_seconds=2.0) as made:
        (result,) = made.run(work)
    assert "none that led to anything, for 2 s" in str(result)
    assert 3 <= num_hellos <= 7
