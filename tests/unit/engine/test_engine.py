"""The engine between threads: who drives, who is woken, and what happens to those who wait when something ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest

from reigen.backends.base import Array
from reigen.backends.null import NullBackend
from reigen.cluster.local_peers import LocalPeers
from reigen.context import Context
from reigen.engine.coordinator import Coordinator
from reigen.engine.counters import EngineCounters
from reigen.engine.engine import Engine
from reigen.engine.handle import Handle, TensorTableEntry
from reigen.engine.messages import MAX_NOTE_BYTES, Operation, OperationKind, Response, SubmitRequest, Topic
from reigen.engine.shutdown import PeerExitGrace
from reigen.engine.tensor_queue import TensorQueue
from reigen.engine.transport import PeerMonitor, SingleRankTransport
from reigen.errors import CollectiveError, DeadlineError, PeerLostError
from reigen.types import DTYPES, ReduceOp
from tests.multiprocess.launcher import until
from tests.patience import patiently
from tests.unit.engine.jobs import between

FLOAT = DTYPES["float32"]


def reduce(job: Context, name: str, *, blocking: bool = False) -> float:
    x = np.ones(3, np.float32)
    job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name=name, blocking=blocking).wait()
    return float(x[0])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_blocking_and_asynchronous_submissions_mix(size: int) -> None:
    def act(job: Context) -> list[float]:
        return [reduce(job, f"t{i % 3}", blocking=(i + job.rank) % 2 == 0) for i in range(50)]

    assert between(size, act) == [[float(size)] * 50] * size


def test_whoever_does_not_wait_is_called_back_once_when_an_operation_is_done_or_has_failed() -> None:
    handed_in = threading.Barrier(2)

    def act(job: Context) -> tuple[list[int], list[bool], str]:
        calls, was_done, ended = [0] * 200, [False] * 200, threading.Semaphore(0)
        arrays = [np.ones(3, np.float32) for _ in calls]
        handles = [job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name=f"t{i}") for i, x in enumerate(arrays)]

        def back(number: int) -> None:
            calls[number] += 1
            was_done[number] = handles[number].poll()
            ended.release()

        for number, handle in enumerate(handles):  # some are done by now, others are not
            handle.add_done_callback(lambda number=number: back(number))  # type: ignore[misc]
        for _ in handles:
            assert ended.acquire(timeout=60)
        failed = job.barrier(name=f"nobody else's {job.rank}")
        told: list[str] = []
        failed.add_done_callback(lambda: told.append("told"))
        handed_in.wait(60.0)  # of who leaves earlier, the other would hear instead
        job.close()
        with pytest.raises(CollectiveError):
            failed.wait()
        return calls, was_done, *told

    assert between(2, act) == [([1] * 200, [True] * 200, "told")] * 2


def test_a_blocking_submission_wakes_who_sleeps_on_something_else() -> None:
    """Five hundred operations take far less than five hundred slices of a sleep that nobody ends."""

    def act(job: Context) -> float:
        held = job.barrier(name=f"held {job.rank}")  # answered by nobody until the end
        began = time.monotonic()
        for i in range(500):
            reduce(job, f"t{i % 50}", blocking=True)
        seconds = time.monotonic() - began
        others = [job.barrier(name=f"held {r}") for r in range(job.size) if r != job.rank]
        for handle in (held, *others):
            handle.wait()
        return seconds

    assert max(between(2, act)) < 25


def test_of_submissions_in_a_row_the_first_wakes_the_engine() -> None:
    def act(job: Context) -> list[int]:
        engine, arrays = job._engine, [np.ones(3, np.float32) for _ in range(5)]
        woken: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            wake = engine._transport.wake
            patch.setattr(engine._transport, "wake", lambda who: (woken.append(who), wake(who)))
            found = []
            for _ in range(2):
                with engine._driver:  # nobody takes what is handed in
                    woken.clear()
                    handles = [job.allreduce(arrays[0], arrays[0], FLOAT, name="first")]
                    found.append(len(woken))
                    handles += [job.allreduce(x, x, FLOAT, name=f"t{i}") for i, x in enumerate(arrays[1:])]
                    found.append(len(woken))
                until(lambda: all(handle.poll() for handle in handles))  # noqa: B023
        return found

    assert between(2, act) == [[1, 1, 1, 1]] * 2


def test_a_blocking_submission_that_was_interrupted_keeps_no_later_one_waiting() -> None:
    def act(job: Context) -> int:
        engine, arrays = job._engine, [np.ones(3, np.float32) for _ in range(2)]
        woken: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            wake, submit = engine._transport.wake, engine.submit
            patch.setattr(engine._transport, "wake", lambda who: (woken.append(who), wake(who)))
            with engine._driver:  # nobody takes what is handed in
                woken.clear()
                patch.setattr(engine, "submit", lambda operation, handle, _: submit(operation, handle, True))
                handles = [job.allreduce(arrays[0], arrays[0], FLOAT, name="interrupted")]
                patch.setattr(engine, "submit", submit)
                handles.append(job.allreduce(arrays[1], arrays[1], FLOAT, name="later"))
                found = len(woken)
            until(lambda: all(handle.poll() for handle in handles))
        return found

    assert between(2, act) == [1, 1]


def test_an_expired_name_is_refused_in_time_although_rank_zero_had_been_driving() -> None:
    def attempt(seconds: float) -> None:
        def act(job: Context) -> tuple[str, tuple[int, ...]]:
            reduce(job, "warm", blocking=True)
            if job.rank == 0:
                return "", ()
            with pytest.raises(DeadlineError) as caught:
                reduce(job, "alone", blocking=True)
            return caught.value.tensor or "", caught.value.ranks

        assert between(3, act, deadline_seconds=seconds)[1:] in (
            [("alone", (0,)), ("alone", (0,))],
            [("alone", (0, 2)), ("alone", (0, 1))],
        )

    patiently(attempt, 0.3)


def test_a_late_rank_ends_the_job_where_programs_repeat_operations() -> None:
    """Its execution would meet the next one of the others, under the same name."""
    given_up = threading.Barrier(3)

    def execute(job: Context) -> tuple[int, ...]:
        x = np.ones(3, np.float32)
        handle = job.allreduce(x, x, FLOAT, name="in a program")
        handle.is_in_program = True
        with pytest.raises(DeadlineError) as caught:
            handle.wait()
        return caught.value.ranks

    def act(job: Context) -> list[tuple[int, ...]]:
        first = [] if job.rank == 2 else [execute(job)]
        given_up.wait(20)
        with pytest.raises(DeadlineError, match="in a program"):
            reduce(job, "in a program")
        return first

    assert between(3, act, deadline_seconds=0.3) == [[(2,)], [(2,)], []]


def test_what_is_outstanding_fails_when_a_rank_leaves() -> None:
    def act(job: Context) -> tuple[int, ...]:
        if job.rank == 2:
            job.close()
            return ()
        with pytest.raises(PeerLostError) as caught:
            reduce(job, "t")
        return caught.value.ranks

    assert between(3, act) == [(2,), (2,), ()]


def test_who_leaves_is_waited_for_only_where_somebody_is_let_down(monkeypatch: pytest.MonkeyPatch) -> None:
    lingered: list[int] = []
    before: list[int] = []
    monkeypatch.setattr(LocalPeers, "linger", lambda self, ranks, over: lingered.append(self.rank))
    left = threading.Barrier(3, lambda: before.extend(lingered))

    def act(job: Context) -> None:
        reduce(job, "t")
        if job.rank == 2:
            job.close()
        else:
            until(lambda: not job._engine.is_operational)
        left.wait(60.0)
        if job.rank != 2:
            for _ in range(2):
                with pytest.raises(PeerLostError):
                    reduce(job, "u")

    between(3, act)
    assert before == []
    assert sorted(lingered) == [0, 1]


def test_who_gives_up_by_itself_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows why; in an elastic job each moment counts. What others tell it meanwhile is no reason to wait either."""
    lingered: list[int] = []
    monkeypatch.setattr(LocalPeers, "linger", lambda self, ranks, over: lingered.append(self.rank))
    given_up = threading.Barrier(2)

    def act(job: Context) -> None:
        reduce(job, "t")
        job.give_up(PeerLostError("rank 2 is dead"))
        given_up.wait(60.0)
        with pytest.raises(PeerLostError):
            reduce(job, "u")

    between(2, act)
    assert lingered == []


def test_who_waits_for_the_ends_of_others_waits_no_more_when_it_gives_up() -> None:
    waits = threading.Event()

    class Watch:
        def linger(self, ranks: Sequence[int], over: Callable[[], bool]) -> None:
            assert ranks == (1,)
            waits.set()
            until(over)

    grace = PeerExitGrace(cast(PeerMonitor, Watch()), TensorQueue())
    thread = threading.Thread(target=grace.give, args=(PeerLostError("rank 1 has gone", ranks=(1,)),))
    thread.start()
    waits.wait(60.0)
    grace.end()
    thread.join(60.0)
    assert not thread.is_alive()


def test_a_broken_engine_rests_though_names_have_expired() -> None:
    def act(job: Context) -> float:
        engine = job._engine
        with engine._driver:
            assert engine._coordinator is not None
            expired = SubmitRequest(Operation(OperationKind.BARRIER, "expired"))
            engine._coordinator.receive(0, [expired], time.monotonic() - 100)
            assert engine._sleep_until_event(5.0) == 0.0
            engine._break(PeerLostError("rank 1 died", ranks=(1,)))
            return engine._sleep_until_event(5.0)

    assert between(2, lambda job: act(job) if job.rank == 0 else 5.0, deadline_seconds=10.0) == [5.0, 5.0]


class Slow(SingleRankTransport):
    """Messages leave at the third attempt."""

    def __init__(self) -> None:
        self.backlog = 0
        self.attempts = 0

    def send(self, message: bytes) -> None:
        self.backlog += 1

    def flush(self) -> None:
        self.attempts += 1
        if self.attempts >= 3:
            self.backlog = 0


def test_no_collective_begins_before_all_have_heard_of_it() -> None:
    """The others could never come, and rank 0, waiting for them in the backend, would not send what they lack."""
    transport = Slow()
    left_behind: list[int] = []

    class Backend(NullBackend):
        def broadcast(self, source: Array | None, target: Array, root: int, deadline: float) -> None:
            left_behind.append(transport.backlog)

    coordinator = Coordinator(2, 0, 0, 30.0)
    engine = Engine(Backend(), transport, transport, coordinator, 30.0, looks=0)
    operation = Operation(OperationKind.BROADCAST, "t", "float32", (3,), root=0)
    x = np.ones(3, np.float32)
    coordinator.receive(1, [SubmitRequest(operation)], time.monotonic())
    engine.submit(operation, Handle(engine, "t", TensorTableEntry(x, x, x)), blocking=True)
    assert left_behind == [0]
    assert transport.attempts == 3
    engine.close()


def test_closing_fails_what_other_threads_wait_for() -> None:
    def act(job: Context) -> str:
        if job.rank == 0:
            return ""
        handle = job.barrier(name="never", blocking=True)
        told: list[str] = []

        def wait() -> None:
            with pytest.raises(CollectiveError) as caught:
                handle.wait()
            told.append(str(caught.value))

        waiters = [threading.Thread(target=wait) for _ in range(3)]
        for waiter in waiters:
            waiter.start()
        job.close()
        for waiter in waiters:
            waiter.join(30)
        return told[0] if len(told) == 3 else f"{told}"

    assert between(2, act)[1].startswith("never: Reigen has been shut down")


def test_notes_reach_rank_zero_and_from_it_all_others_in_order() -> None:
    def act(job: Context) -> list[tuple[int, bytes]]:
        heard: list[tuple[int, bytes]] = []
        come = threading.Event()
        expected = 2 * (job.size - 1) if job.rank == 0 else 2

        def listener(rank: int, data: bytes) -> None:
            heard.append((rank, data))
            if len(heard) == expected:
                come.set()

        job.listen(Topic.STACKS, listener)
        job.barrier(blocking=True).wait()
        for text in (b"first", b"x" * MAX_NOTE_BYTES):
            job.post(Topic.STACKS, text)
            job.post(Topic.TIMELINE, b"nobody listens")
        assert come.wait(10.0)
        return sorted(heard, key=lambda note: note[0])

    both = [b"first", b"x" * MAX_NOTE_BYTES]
    first, *others = between(3, act)
    assert first == [(1, both[0]), (1, both[1]), (2, both[0]), (2, both[1])]
    assert others == [[(0, both[0]), (0, both[1])]] * 2


def test_what_a_rank_does_is_counted_where_a_job_wants_it() -> None:
    """Rank 1 comes when rank 0 waits."""
    is_waiting = threading.Event()

    class Counters(EngineCounters):
        def begin_wait(self, name: str) -> None:
            super().begin_wait(name)
            is_waiting.set()

    def act(job: Context) -> Counters:
        counters = Counters()
        job._engine.count_in(counters)
        if job.rank:
            assert is_waiting.wait(60)
        x = np.ones(3, np.float32)
        job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="x").wait()
        return counters

    first, second = between(2, act)
    assert first.waits_for == "x"
    assert first.blocked_seconds > 0
    assert second.waits_for in {"x", ""}  # the result may be there
    for counters in (first, second):
        assert not counters.is_waiting
        assert (counters.operations[OperationKind.ALLREDUCE], counters.cache_misses) == (1, 1)


def test_operations_bytes_fusion_and_cached_responses_are_counted() -> None:
    def act(job: Context) -> dict[tuple[str, tuple[str, ...]], float]:
        x, y = np.ones(1000, np.float32), np.ones(3, np.float64)
        for _ in range(3):
            with_two = job.grouped_allreduce([x, y], [x, y], [FLOAT, DTYPES["float64"]], op=ReduceOp.SUM, name="two")
            with_two.wait()
        job.broadcast(x, x, FLOAT, root_rank=0, name="b").wait()
        job.barrier(blocking=True).wait()
        return {(name, labels): value for name, labels, value in job.samples()}

    for found in between(2, act):
        assert found["reigen_operations_total", ("allreduce",)] == 3
        assert found["reigen_operations_total", ("broadcast",)] == 1
        assert found["reigen_operations_total", ("barrier",)] == 1
        assert found["reigen_bytes_total", ("allreduce", "shared_memory")] == 3 * (4000 + 24)
        assert found["reigen_bytes_total", ("broadcast", "shared_memory")] == 4000
        assert found["reigen_batches_total", ()] == 5
        assert found["reigen_response_cache_misses_total", ()] == 3
        assert found["reigen_response_cache_hits_total", ()] == 2
        assert found["reigen_queue_length", ("outstanding",)] == 0
        assert found["reigen_ranks", ()] == 2
        assert found["reigen_memory_bytes", ("segment",)] > 0


def test_what_is_fused_and_what_is_eager_is_counted() -> None:
    def act(job: Context) -> dict[tuple[str, tuple[str, ...]], float]:
        x = np.ones(1000, np.float32)
        for _ in range(20):
            job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="small", blocking=True).wait()
        job.barrier(blocking=True).wait()
        return {(name, labels): value for name, labels, value in job.samples()}

    for found in between(2, act):
        assert found["reigen_operations_total", ("allreduce",)] == 20
        assert found["reigen_bytes_total", ("allreduce", "shared_memory")] == 20 * 4000
        num_eager = found["reigen_eager_operations_total", ()]
        assert 0 <= num_eager <= 19
        assert found["reigen_batches_total", ()] == 21
        assert found["reigen_response_cache_hits_total", ()] == 19
        assert found["reigen_fused_operations_total", ()] == 0


def test_an_observer_is_told_what_becomes_of_every_submission() -> None:
    class Diary:
        def __init__(self) -> None:
            self.lines: list[str] = []
            self.waits: list[str] = []

        def submitted(self, operation: Operation) -> None:
            self.lines.append(f"submitted {operation.name}")

        def began(self, batch: Sequence[tuple[Operation, Response]]) -> None:
            self.lines.append(f"began {' '.join(o.name for o, _ in batch)}")

        def ended(self, batch: Sequence[tuple[Operation, Response]]) -> None:
            self.lines.append(f"ended {' '.join(o.name for o, _ in batch)}")

        def failed(self, name: str) -> None:
            self.lines.append(f"failed {name}")

        def announced(self) -> None:
            self.lines.append("announced")

        def waiting(self, name: str) -> None:
            self.waits.append(f"waiting {name}")

        def waited(self, name: str) -> None:
            self.waits.append(f"waited {name}")

        def phase_ended(self, name: str) -> None:
            self.lines.append(name)

    def act(job: Context) -> tuple[list[str], list[str]]:
        diary = Diary()
        job.observe(diary)
        reduce(job, "a", blocking=True)
        x = np.ones(2 + job.rank, np.float32)
        with pytest.raises(CollectiveError, match="shapes"):
            job.allreduce(x, x, FLOAT, name="b", blocking=True).wait()
        job.observe(None)
        reduce(job, "c")
        return diary.lines, diary.waits

    phases = ["MEMCPY_IN_FUSION_BUFFER", "WAIT_FOR_OTHER_RANKS", "SHM_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]
    lines = ["submitted a", "announced", "began a", *phases, "ended a", "submitted b", "announced", "failed b"]
    waits = ["waiting a", "waited a", "waiting b", "waited b"]
    assert between(2, act) == [(lines, waits)] * 2
