"""The TCP backend beyond the conformance suite: bytes, bits, some of the ranks, and whom an early end is blamed on."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from reigen.backends.base import Backend, ProgressHook, ReduceBuffer
from reigen.backends.null import NullBackend
from reigen.backends.tcp import backend as tcp
from reigen.backends.tcp.backend import TcpNetwork
from reigen.backends.tcp.connection import PeerConnection
from reigen.cluster.connection_pool import ConnectionPool
from reigen.cluster.membership.rendezvous import Rendezvous
from reigen.errors import CollectiveError, DeadlineError, PeerLostError, SharedMemoryError
from reigen.kernels.reduce import BlockReducer, Reduction
from reigen.net.bulk_connection import BulkConnection
from reigen.testing import run_threads
from reigen.types import DTYPES, ReduceOp
from tests.patience import patiently

FLOAT = DTYPES["float32"]


def soon(seconds: float = 100.0) -> float:
    return time.monotonic() + seconds


def nothing_known(_: Sequence[int]) -> None:
    return None


@contextmanager
def network(rank: int, size: int, rendezvous: Rendezvous, **options: Any) -> Iterator[TcpNetwork]:
    mesh = ConnectionPool(rank, size, rendezvous, b"s" * 32, "127.0.0.1", 20.0)
    made = TcpNetwork(mesh, failure=options.pop("failure", nothing_known), **options)
    try:
        yield made
    finally:
        made.close()
        mesh.close()


def run_backends(size: int, body: Callable[[Backend], Any], **options: Any) -> list[Any]:
    """``body`` for each of ``size`` ranks, which are threads. All keep their connections until everybody is done."""

    def one(rank: int, rendezvous: Rendezvous) -> Any:
        with network(rank, size, rendezvous, **options) as mine:
            backend = mine.among(range(size), soon())
            try:
                result = body(backend)
                backend.close()
            finally:
                rendezvous.put(f"done/{rank}", b"")
            for other in range(size):
                rendezvous.get(f"done/{other}", 30.0)
            return result

    return run_threads(one, size)


def reduction(size: int, op: ReduceOp = ReduceOp.SUM) -> Reduction:
    return Reduction(FLOAT, op, size)


def allreduce(backend: Backend, *arrays: np.ndarray[Any, Any], deadline: float | None = None) -> None:
    backend.allreduce([ReduceBuffer(a, a) for a in arrays], reduction(backend.size), deadline or soon())


# ---------------------------------------------------------------------------------------------- what is sent


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[str]]:
    """By thread: bytes and messages that links were given."""
    counts: dict[str, Counter[str]] = {}
    post_send = BulkConnection.post_send

    def counting(link: BulkConnection, data: memoryview) -> None:
        count = counts.setdefault(threading.current_thread().name, Counter())
        count["bytes"] += data.nbytes
        count["messages"] += 1
        post_send(link, data)

    monkeypatch.setattr(BulkConnection, "post_send", counting)
    return counts


@pytest.mark.parametrize("num_sockets", [1, 2])
@pytest.mark.parametrize("algorithm", ["direct", "ring", "latency"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_an_allreduce_sends_no_more_than_its_algorithm_must(
    size: int, algorithm: str, num_sockets: int, sent: dict[str, Counter[str]]
) -> None:
    count = 3 * 4 * 16 * 10_000  # elements: equal slices, whole lines
    run_backends(
        size,
        lambda backend: allreduce(backend, np.ones(count, np.float32)),
        algorithm=algorithm,
        num_sockets=num_sockets,
    )
    share = size - 1 if algorithm == "latency" else 2 * (size - 1) / size
    assert sum(told["bytes"] for told in sent.values()) == round(size * share * 4 * count)
    for told in sent.values():
        assert told["bytes"] == pytest.approx(share * 4 * count, rel=1e-3)  # slices end where a line of the cache does
        assert told["messages"] <= 200


@pytest.mark.parametrize("size", [2, 3])
def test_where_there_are_several_ranks_a_link_is_given_a_message_when_its_last_has_left(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the second message to one rank is not ahead of the first to another."""
    depths: set[int] = set()
    post_send = BulkConnection.post_send

    def watching(link: BulkConnection, data: memoryview) -> None:
        post_send(link, data)
        depths.add(len(link._pieces) // 2)

    monkeypatch.setattr(BulkConnection, "post_send", watching)
    run_backends(size, lambda backend: allreduce(backend, np.ones(1 << 20, np.float32)), algorithm="direct")
    assert (max(depths) == 1) is (size > 2)


def test_a_small_allreduce_is_one_message_to_each(sent: dict[str, Counter[str]]) -> None:
    tensors = [np.ones(count, np.float32) for count in (3, 0, 100, 1)]
    run_backends(4, lambda backend: allreduce(backend, *[a.copy() for a in tensors]))
    assert all(count == {"bytes": 3 * 4 * 104, "messages": 3} for count in sent.values())


@pytest.mark.parametrize("size", [2, 3, 5])
def test_other_operations_send_what_they_must(size: int, sent: dict[str, Counter[str]]) -> None:
    count = 60 * 1000  # elements of each rank, and of each rank's part of each

    def total(act: Callable[[Backend], None]) -> int:
        sent.clear()
        run_backends(size, act)
        return sum(told["bytes"] for told in sent.values())

    def scatter(backend: Backend) -> None:
        source, target = np.ones(size * count, np.float32), np.empty(count, np.float32)
        backend.reduce_scatter(source, [count] * size, target, reduction(size), soon())

    def gather(backend: Backend) -> None:
        backend.allgather(np.ones(count, np.float32), [count] * size, np.empty(size * count, np.float32), soon())

    def exchange(backend: Backend) -> None:
        source, target = np.ones(size * count, np.float32), np.empty(size * count, np.float32)
        backend.alltoall(source, [[count] * size] * size, target, soon())

    def spread(backend: Backend) -> None:
        data = np.ones(count, np.float32)
        backend.broadcast(data if backend.rank == 1 else None, data, 1, soon())

    once = 4 * count
    assert total(scatter) == total(gather) == total(exchange) == size * (size - 1) * once
    assert total(spread) == (size - 1) * once
    assert total(lambda backend: backend.barrier(soon())) == 0


# ---------------------------------------------------------------------------------------------- bits


def test_bits_do_not_depend_on_the_algorithm_the_sockets_or_on_how_tensors_are_fused() -> None:
    size, count = 3, 700_001
    inputs = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(size)]
    truth = np.empty(count, np.float32)
    BlockReducer(reduction(size, ReduceOp.AVERAGE)).reduce(inputs, truth)
    for algorithm, num_sockets in [("direct", 1), ("direct", 3), ("latency", 1)]:
        for parts in ([count], [1, 99_999, 0, 400_000, 200_001]):

            def body(backend: Backend, parts: Sequence[int] = parts) -> list[np.ndarray[Any, Any]]:
                data = inputs[backend.rank].copy()
                edges = itertools.pairwise(itertools.accumulate(parts, initial=0))
                buffers = [ReduceBuffer(data[low:high], data[low:high]) for low, high in edges]
                backend.allreduce(buffers, reduction(size, ReduceOp.AVERAGE), soon())
                return [data]

            for (result,) in run_backends(size, body, algorithm=algorithm, num_sockets=num_sockets):
                np.testing.assert_array_equal(result.view(np.uint32), truth.view(np.uint32))


def test_algorithm_and_sockets_change_between_two_operations() -> None:
    size, count, choices = 3, 90_001, [("ordered", 4), ("direct", 1), ("ordered", 3), ("latency", 2), ("direct", 4)]
    inputs = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(size)]
    truth = np.empty(count, np.float32)
    BlockReducer(reduction(size)).reduce(inputs, truth)

    def one(rank: int, rendezvous: Rendezvous) -> list[np.ndarray[Any, Any]]:
        results = []
        with network(rank, size, rendezvous, algorithm="ordered", num_sockets=4) as mine:
            backend = mine.among(range(size), soon())
            for algorithm, num_sockets in choices * 3:
                mine.tune(algorithm, num_sockets)
                for elements in (count, 5):  # the second one ends on another connection than it began
                    data = inputs[rank][:elements].copy()
                    allreduce(backend, data)
                    results.append(data)
            backend.close()
            rendezvous.put(f"done/{rank}", b"")
            for other in range(size):
                rendezvous.get(f"done/{other}", 30.0)
        return results

    for results in run_threads(one, size):
        assert len(results) == 6 * len(choices)
        for result in results:
            np.testing.assert_array_equal(result.view(np.uint32), truth[: result.size].view(np.uint32))


def test_the_backend_says_whether_it_adds_in_order() -> None:
    for algorithm in ("auto", "ordered", "direct", "latency", "ring"):
        (told, _) = run_backends(2, lambda backend: backend.capabilities.ordered_sums, algorithm=algorithm)
        assert told == (algorithm != "ring")


# ---------------------------------------------------------------------------------------------- some of the ranks


def test_backends_among_any_ranks_of_a_network() -> None:
    groups = [(0, 2, 3), (1, 2), (0, 1, 2, 3), (3,)]

    def body(rank: int, rendezvous: Rendezvous) -> None:
        with network(rank, 4, rendezvous) as mine:
            backends = [(group, mine.among(group, soon())) for group in groups if rank in group]
            for _ in range(3):
                for group, backend in backends:
                    assert (backend.rank, backend.size) == (group.index(rank), len(group))
                    data = np.full(5, 1 << rank, np.float32)
                    allreduce(backend, data)
                    assert data[0] == sum(1 << r for r in group)
            assert isinstance(backends[-1][1], NullBackend) == (rank == 3)
            mine.among(range(4), soon()).barrier(soon())

    run_threads(body, 4)


def test_backends_that_are_split_off_work_beside_the_whole() -> None:
    def body(backend: Backend) -> None:
        pair = backend.split([1, 3], soon())
        alone = backend.split([2], soon())
        assert (pair is None, alone is None) == (backend.rank not in {1, 3}, backend.rank != 2)
        for size in (10, 300_000):
            data = np.full(size, backend.rank, np.float32)
            if pair is not None:
                allreduce(pair, data)
                assert data[-1] == 4
            data[:] = backend.rank
            allreduce(backend, data)
            assert data[-1] == 6
        if pair is not None:
            pair.close()
        backend.barrier(soon())

    run_backends(4, body)


@pytest.mark.parametrize("size", [3, 6])
def test_connections_are_made_when_they_are_needed(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As among so many ranks that not everybody is connected to everybody beforehand; barriers are chains, too."""
    monkeypatch.setattr(tcp, "_CONNECTED_RANKS", 0)
    monkeypatch.setattr(tcp, "_DIRECT_BARRIER_RANKS", 0)
    opened: dict[int, set[int]] = {rank: set() for rank in range(size)}
    open_streams = ConnectionPool.open

    def counting(mesh: ConnectionPool, peers: Sequence[int], *args: Any, **options: Any) -> Any:
        opened[mesh.rank].update(peers)
        return open_streams(mesh, peers, *args, **options)

    monkeypatch.setattr(ConnectionPool, "open", counting)

    def body(backend: Backend) -> None:
        data = np.ones(2_000_000, np.float32)
        backend.broadcast(data if backend.rank == 0 else None, data, 0, soon())
        assert opened[backend.rank] == {backend.rank - 1, backend.rank + 1} & set(range(size))
        allreduce(backend, data)
        assert data[0] == size
        for _ in range(20):
            backend.barrier(soon())
        backend.allgather(np.array([backend.rank]), [1] * size, np.empty(size, np.int64), soon())
        assert opened[backend.rank] == set(range(size)) - {backend.rank}

    run_backends(size, body, algorithm="ring")


@pytest.mark.parametrize("num_sockets", [1, 2])
@pytest.mark.parametrize("is_far", [False, True])
def test_within_a_machine_each_direction_has_connections_of_its_own(
    is_far: bool, num_sockets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_far:
        monkeypatch.setattr(PeerConnection, "is_same_host", False)
    uses: dict[BulkConnection, set[str]] = {}
    for use in ("post_send", "post_receive"):
        original = getattr(BulkConnection, use)

        def noting(link: BulkConnection, data: memoryview, use: str = use, original: Any = original) -> None:
            uses.setdefault(link, set()).add(use)
            original(link, data)

        monkeypatch.setattr(BulkConnection, use, noting)

    def body(backend: Backend) -> None:
        data = np.ones(2_000_000, np.float32)
        allreduce(backend, data)
        assert set(data.tolist()) == {3.0}

    run_backends(3, body, algorithm="direct", num_sockets=num_sockets)
    assert len(uses) == 3 * 2 * num_sockets * (1 if is_far else 2)
    assert all(len(ways) == (2 if is_far else 1) for ways in uses.values())


def test_memory_that_one_rank_has_not_is_no_rank_s(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = np.zeros
    refused: list[int] = []

    def scarce(shape: Any, *args: Any) -> Any:
        if threading.current_thread().name == "rank-1" and not refused:
            refused.append(shape)
            raise MemoryError
        return zeros(shape, *args)

    monkeypatch.setattr(np, "zeros", scarce)

    def body(backend: Backend) -> None:
        with pytest.raises(SharedMemoryError, match=r"on rank\(s\) 1"):
            backend.allocate(1000, soon())
        assert backend.allocate(1000, soon()).array.size == 1000

    run_backends(3, body)


# ---------------------------------------------------------------------------------------------- while it waits


def test_who_waits_does_other_things_tells_whom_it_lacks_and_what_it_has_done() -> None:
    began = threading.Event()

    def body(backend: Backend) -> None:
        if backend.rank == 1:
            assert began.wait(20.0)
            allreduce(backend, np.ones(1_000_000, np.float32))
            return
        ranks_missing: list[list[int]] = []
        work: list[bytes] = []
        phases: list[str] = []
        readable, writable = os.pipe()

        def lack(members: Sequence[int]) -> None:
            ranks_missing.append(list(members))
            os.write(writable, b"x")

        def do() -> None:
            work.append(os.read(readable, 1))
            began.set()

        backend.ranks_missing, backend.progress_hook, backend.phase_ended = (
            lack,
            ProgressHook(readable, do),
            phases.append,
        )
        allreduce(backend, np.ones(1_000_000, np.float32))
        assert ranks_missing[0] == [1]
        assert work[0] == b"x"
        assert phases == ["TCP_ALLREDUCE"]
        backend.ranks_missing = backend.progress_hook = None
        os.close(readable)
        os.close(writable)

    run_backends(2, body)


# ---------------------------------------------------------------------------------------------- ends


def error_of(act: Callable[[], None]) -> CollectiveError:
    try:
        act()
    except CollectiveError as error:
        return error
    raise AssertionError("nothing was raised")


ACTS: dict[str, Callable[[Backend, float], None]] = {
    "barrier": lambda backend, deadline: backend.barrier(deadline),
    "small": lambda backend, deadline: allreduce(backend, np.ones(8, np.float32), deadline=deadline),
    "large": lambda backend, deadline: allreduce(backend, np.ones(1_000_000, np.float32), deadline=deadline),
    "broadcast": lambda backend, deadline: backend.broadcast(
        np.ones(50_000) if backend.rank == 0 else None, np.ones(50_000), 0, deadline
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["direct", "ring"])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("late", [0, 2])
def test_the_deadline_names_who_did_not_come_and_nobody_else(
    act: str, algorithm: str, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where ranks wait for ranks that wait for it. Deadlines do not pass at the same moment."""

    def attempt(seconds: float) -> None:
        monkeypatch.setattr(tcp, "_DIRECT_BARRIER_RANKS", 0 if algorithm == "ring" else 8)
        done = threading.Barrier(5)

        def body(backend: Backend) -> None:
            began = time.monotonic()
            try:
                if backend.rank != late:
                    patience = seconds * (2 if act == "large" else 1)  # until all but one have done their part
                    ACTS[act](backend, began + patience + 0.06 * seconds * backend.rank)
                    assert act == "broadcast", "everybody waits for everybody"
                    assert backend.rank < late, "only who passes things on need not wait"
            except DeadlineError as error:
                assert error.ranks == (late,)
            done.wait(100.0)

        run_backends(5, body, algorithm=algorithm)

    patiently(attempt, 0.5)


def test_who_comes_when_the_others_have_given_it_up_is_told_so() -> None:
    def attempt(seconds: float) -> None:
        gone = threading.Barrier(3)

        def body(backend: Backend) -> None:
            if backend.rank == 1:
                gone.wait(60.0)
                backend.barrier(soon())  # the others had come to this one
            error = error_of(lambda: backend.barrier(soon(seconds if backend.rank != 1 else 60.0)))
            assert isinstance(error, DeadlineError)
            assert error.ranks == (1,)
            if backend.rank != 1:
                gone.wait(60.0)

        run_backends(3, body)

    patiently(attempt, 0.3)


def test_abort_ends_what_others_do_and_what_this_rank_does_in_another_thread() -> None:
    def body(backend: Backend) -> None:
        if backend.rank == 2:
            return  # it never comes
        if backend.rank == 0:
            reason = CollectiveError("enough is enough " * 200, ranks=range(1000))
            timer = threading.Timer(0.2, backend.abort, [reason])
            timer.start()
        began = time.monotonic()
        error = error_of(lambda: backend.barrier(soon()))
        assert "enough is enough" in str(error)
        assert time.monotonic() - began < 60.0
        assert "(told by rank 0)" in str(error) or backend.rank == 0
        assert "enough is enough" in str(error_of(lambda: backend.barrier(soon()))), "it is of no use any more"
        if backend.rank == 0:
            timer.join()

    run_backends(3, body)


def test_an_error_in_the_middle_is_told_to_the_others() -> None:
    def body(backend: Backend) -> None:
        if backend.rank == 0:

            def interrupt(_: Sequence[int]) -> None:
                raise KeyboardInterrupt

            backend.ranks_missing = interrupt
            with pytest.raises(KeyboardInterrupt):
                backend.barrier(soon())
        elif backend.rank == 1:
            error = error_of(lambda: backend.barrier(soon()))
            assert "rank 0 gave up in the middle of a collective (KeyboardInterrupt())" in str(error)
            assert error.ranks == (0,)

    run_backends(3, body)


def test_a_connection_that_ends_is_a_rank_that_died_unless_somebody_knows_more() -> None:
    def body(rank: int, rendezvous: Rendezvous) -> None:
        known = PeerLostError("rank 2 (host h2) died of hunger", ranks=[2])
        asked: list[Sequence[int]] = []

        def failure(needed: Sequence[int]) -> CollectiveError | None:
            asked.append(needed)
            return known if rank == 0 and len(asked) > 3 else None

        with network(rank, 3, rendezvous, failure=failure) as mine:
            backend = mine.among(range(3), soon())
            backend.barrier(soon())
            if rank == 2:
                return
            error = error_of(lambda: ACTS["large"](backend, soon()))
            assert isinstance(error, PeerLostError)
            assert error.ranks == (2,)
            if rank == 0:
                assert error is known or "(told by rank 1)" in str(error)
            rendezvous.put(f"done/{rank}", b"")
            rendezvous.get(f"done/{1 - rank}", 30.0)

    run_threads(body, 3)


def test_what_a_rank_sent_before_it_left_is_received_though_its_other_connections_have_ended() -> None:
    def body(rank: int, rendezvous: Rendezvous) -> None:
        with network(rank, 2, rendezvous, num_sockets=3) as mine:
            backend = mine.among(range(2), soon())
            backend.barrier(soon())  # all connections are there
            if rank == 0:
                rendezvous.get("left", 30.0)
            array = np.full(1000, float(rank), np.float32)
            backend.broadcast(array if rank == 1 else None, array, 1, soon())
            assert set(array.tolist()) == {1.0}
        rendezvous.put("left" if rank == 1 else "done", b"")

    run_threads(body, 2)


def test_what_the_job_knows_ends_waiting_although_connections_stand() -> None:
    def failure(needed: Sequence[int]) -> CollectiveError | None:
        return PeerLostError("host h1 was lost", ranks=[1]) if 1 in needed else None

    def body(backend: Backend) -> None:
        if backend.rank == 0:
            assert "host h1 was lost" in str(error_of(lambda: backend.barrier(soon())))

    run_backends(2, body, failure=failure)


def test_a_rank_that_never_comes_to_a_network_is_named() -> None:
    def body(rank: int, rendezvous: Rendezvous) -> None:
        with network(rank, 2, rendezvous) as mine:
            if rank == 0:
                error = error_of(lambda: mine.among([0, 1], soon(0.3)))  # type: ignore[arg-type, func-returns-value]
                assert isinstance(error, DeadlineError)
                assert error.ranks == (1,)

    run_threads(body, 2)


def test_a_rank_with_another_secret_is_refused_in_the_backends_own_words() -> None:
    def body(rank: int, rendezvous: Rendezvous) -> None:
        mesh = ConnectionPool(rank, 2, rendezvous, bytes([rank]) * 32, "127.0.0.1", 20.0)
        mine = TcpNetwork(mesh, failure=nothing_known)
        error = error_of(lambda: mine.among([0, 1], soon(0.5)))  # type: ignore[arg-type, func-returns-value]
        assert "does not know this job's secret" in str(error) or "1 connection(s) were refused" in str(error)
        mine.close()
        mesh.close()

    run_threads(body, 2)
