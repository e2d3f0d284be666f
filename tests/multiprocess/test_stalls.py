"""Stalled jobs: what rank 0 tells while it lasts, and how the job goes on, or ends.

The rank that is missed is held until rank 0 has warned: rank 0's log handler lets it go.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reigen import context
from reigen.errors import DeadlineError
from reigen.testing import RankPool
from reigen.types import DTYPES, ReduceOp
from tests.patience import patiently

pytestmark = pytest.mark.slow  # many real processes

FLOAT = DTYPES["float32"]


def check(seconds: float) -> dict[str, str]:
    """Variables of a job that looks for stalls so often."""
    return {"REIGEN_STALL_CHECK_TIME_SECONDS": f"{seconds:g}"}


class Gate:
    """Holds a thread until another process opens it. A named pipe; whoever waits is in read(2)."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDWR)

    def hold(self) -> None:
        os.read(self.descriptor, 1)  # held here

    def hold_with_the_interpreter(self) -> None:
        """In native code that keeps the interpreter's lock."""
        ctypes.PyDLL(None).read(self.descriptor, ctypes.create_string_buffer(1), 1)

    def open(self, count: int = 1) -> None:
        """Let ``count`` threads go on."""
        os.write(self.descriptor, b"." * count)

    def close(self) -> None:
        os.close(self.descriptor)


class Told(logging.Handler):
    """What rank 0 says of stalls; opens the gate at the first warning after `expect`."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []
        self.then: Callable[[], object] | None = None

    def expect(self, then: Callable[[], object]) -> None:
        self.messages.clear()
        self.then = then

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        then, self.then = self.then, None
        if then is not None:
            then()


@contextmanager
def told_and_gate(path: str) -> Iterator[tuple[Told, Gate]]:
    told, gate = Told(), Gate(path)
    logger = logging.getLogger("reigen")
    logger.addHandler(told)
    try:
        yield told, gate
    finally:
        logger.removeHandler(told)
        gate.close()


def reduce(name: str, process_set: int = 0) -> float:
    x = np.ones(3, np.float32)
    job = context.current()
    job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name=name, process_set=process_set, blocking=True).wait()
    return float(x[0])


def gather(name: str, held: Callable[[], object], process_set: int = 0) -> None:
    """An allgather in the middle of which this rank calls ``held``."""

    def make_output(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        held()
        return np.empty(shape, np.float32)

    x = np.ones(3, np.float32)
    context.current().allgather(x, FLOAT, name=name, make_output=make_output, process_set=process_set).wait()


def nothing() -> None:
    return None


def stop() -> None:
    """Stop this process; this thread first, so that it does nothing more."""
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def pids() -> list[int]:
    numbers = context.current().allgather(np.array([os.getpid()]), DTYPES["int64"]).wait().array
    assert numbers is not None
    return [int(number) for number in numbers]


def compute(hold: Callable[[], None]) -> None:
    hold()  # it computes


@pytest.fixture
def path(tmp_path: Path) -> str:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    return str(gate)


# -- deadlocks --------------------------------------------------------------------------------------------------------


def different_collectives(path: str) -> tuple[list[str], float]:
    """What rank 0 tells while each rank waits in another collective, and how long rank 0 waited."""
    job, started = context.current(), time.monotonic()
    with told_and_gate(path) as (told, _):
        with pytest.raises(DeadlineError):
            reduce(f"of rank {job.rank}")
        waited = time.monotonic() - started
        reduce("all")
        return list(told.messages), waited


def test_ranks_that_all_wait_in_different_collectives_are_told_of_within_seconds(
    path: str, rank_pool: Callable[[int], RankPool]
) -> None:
    """Long before REIGEN_STALL_CHECK_TIME_SECONDS, which is 60."""

    def attempt(seconds: float) -> None:
        env = {"REIGEN_DEADLINE": f"{seconds:g}"}
        messages, waited = rank_pool(3).run(different_collectives, path, init=True, env=env)[0]
        assert waited < 60
        [text] = [message for message in messages if "Stall: " in message]
        assert "Every rank waits in one of them, so none can submit what the others lack" in text
        for rank in range(3):
            assert f"allreduce of rank {rank} for " in text
            assert re.search(rf"rank {rank} \(process \d+ on \S+\) is at \S+test_stalls.py:\d+ in reduce: ", text), text

    patiently(attempt, 12.0)


# -- in negotiation ---------------------------------------------------------------------------------------------------


def ranks_that_do_not_submit(path: str) -> dict[str, list[str]]:
    """Rank 0's messages in each case."""
    job = context.current()
    found = {}
    with told_and_gate(path) as (told, gate):
        evens = job.add_process_set([0, 2])
        for case, missing in [("python", [1]), ("rank 0", [0, 1])]:
            told.expect(functools.partial(gate.open, len(missing)))
            if job.rank in missing:
                compute(gate.hold)
            assert reduce(case) == 3.0
            found[case] = list(told.messages)
        told.expect(gate.open)
        if job.rank == 2:
            compute(gate.hold)
        if job.rank != 1:
            assert reduce("in a set", evens) == 2.0
        found["process set"] = list(told.messages)
        reduce("all")
    return found


def test_a_rank_that_computes_is_told_of_with_its_stack(path: str, rank_pool: Callable[[int], RankPool]) -> None:
    def attempt(seconds: float) -> None:
        found = rank_pool(3).run(ranks_that_do_not_submit, path, init=True, env=check(seconds))[0]
        for case, who in [
            ("python", "waiting: ranks 0, 2; missing: rank 1"),
            ("rank 0", "waiting: rank 2; missing: ranks 0, 1"),
        ]:
            first, last = found[case][0], found[case][-1]
            lines = [line.strip() for line in first.splitlines()]
            assert lines[1].startswith(f"allreduce {case} for 0."), first
            assert lines[2] == who
            assert lines[3].startswith("rank 1 (process " if case == "python" else "rank 0 (process ")
            assert "test_stalls.py:" in lines[3]
            assert lines[3].endswith("in Gate.hold: os.read(self.descriptor, 1)  # held here")
            assert lines[4].endswith("in compute: hold()  # it computes"), first
            assert "in ranks_that_do_not_submit: compute(gate.hold)" in lines[5]
            assert last.startswith(f"Stall over: allreduce {case}: no rank is missing any more, after ")
        [first, *_, last] = found["process set"]
        assert "  allreduce in a set of process set 1 (ranks 0, 2) for 0." in first
        assert "    waiting: rank 0; missing: rank 2\n" in first
        assert last.startswith("Stall over")

    patiently(attempt, 0.4)


def ranks_that_cannot_answer(path: str, how: str) -> list[str]:
    job = context.current()
    numbers = pids()
    with told_and_gate(path) as (told, gate):
        told.expect(gate.open if how == "native" else lambda: os.kill(numbers[1], signal.SIGCONT))
        if job.rank == 1 and how == "native":
            gate.hold_with_the_interpreter()
        elif job.rank == 1:
            stop()
        assert reduce("t") == 2.0
        return told.messages


@pytest.mark.parametrize(("how", "state"), [("native", "sleeps in the kernel; native"), ("stop", "is stopped, by")])
def test_of_a_rank_that_cannot_answer_the_kernel_tells(
    how: str, state: str, path: str, rank_pool: Callable[[int], RankPool]
) -> None:
    def attempt(seconds: float) -> None:
        pool = rank_pool(2)
        pool.start()
        pid = pool.pids[1]
        first, *_, last = pool.run(ranks_that_cannot_answer, path, how, init=True, env=check(seconds))[0]
        assert "    waiting: rank 0; missing: rank 1\n" in first
        assert f"  rank 1 does not answer within 2 s: its process {pid} {state}" in first
        assert last.startswith("Stall over: allreduce t: ")

    patiently(attempt, 0.4)


def ranks_in_different_collectives(path: str) -> list[str]:
    """Each waits in its own; once that has been told, another thread brings what the others wait for."""
    job = context.current()
    with told_and_gate(path) as (told, gate):
        told.expect(lambda: gate.open(job.size))
        own, other = (["only 1", *(f"b{i}" for i in range(7))], ["only 0"])[:: 1 if job.rank == 1 else -1]

        def bring() -> None:
            gate.hold()
            for handle in [job.barrier(name=name) for name in other]:
                handle.wait()

        thread = threading.Thread(target=bring)
        thread.start()
        for handle in [job.barrier(name=name) for name in own]:
            handle.wait()
        thread.join()
        return told.messages


def test_a_rank_in_a_collective_of_another_name_is_told_of(path: str, rank_pool: Callable[[int], RankPool]) -> None:
    def attempt(seconds: float) -> None:
        first = rank_pool(3).run(ranks_in_different_collectives, path, init=True, env=check(seconds))[0][0]
        assert "  barrier only 0 for 0." in first
        assert "    waiting: ranks 0, 2; missing: rank 1\n" in first
        assert "  barrier only 1, b0, b1, b2, b3 and 3 more for 0." in first
        assert "    waiting: rank 1; missing: ranks 0, 2\n" in first
        assert "it waits in barrier only 1, for which ranks 0, 2 are missing" in first
        assert "it waits in barrier only 0, for which rank 1 is missing" in first
        circle = ["only 0 lacks rank 1, which waits in only 1", "only 1 lacks rank 0, which waits in only 0"]
        assert any(f"in a circle: {'; '.join(order)}." in first for order in (circle, circle[::-1])), first

    patiently(attempt, 0.4)


# -- in the middle of a collective ------------------------------------------------------------------------------------


def ranks_in_the_middle(path: str) -> dict[str, list[str]]:
    job = context.current()
    numbers = pids()
    found = {}
    with told_and_gate(path) as (told, gate):
        pair = job.add_process_set([1, 2])

        told.expect(lambda: os.kill(numbers[2], signal.SIGCONT))
        gather("stopped", stop if job.rank == 2 else nothing)
        reduce("between")
        found["all"] = list(told.messages)
        told.expect(gate.open)
        if job.rank:
            gather("in a set", gate.hold if job.rank == 2 else nothing, pair)
        reduce("after the set's")
        reduce("end")
        found["set"] = list(told.messages)
    return found


@pytest.mark.slow
def test_a_rank_that_stops_in_the_middle_of_a_collective_is_told_of(
    path: str, rank_pool: Callable[[int], RankPool]
) -> None:
    def attempt(seconds: float) -> None:
        found = rank_pool(3).run(ranks_in_the_middle, path, init=True, env=check(seconds))[0]
        first, *_, last = found["all"]
        assert "  allgather stopped for " in first
        assert "    in the middle of it: ranks 0, 1; missing: rank 2\n" in first
        assert "  rank 2 does not answer within 2 s: its process " in first
        assert "is stopped, by SIGSTOP" in first
        assert last.startswith("Stall over: allgather stopped: its data has been moved, after ")
        everything = "\n".join(found["set"])
        assert "  allgather in a set of process set 1 (ranks 1, 2) for " in everything
        assert "    in the middle of it: rank 1; missing: rank 2\n" in everything
        assert "  allreduce after the set's for " in everything
        assert "it is in the middle of allgather in a set (process set 1), for whose data rank 2" in everything
        assert "Stall over: allgather in a set" in everything

    patiently(attempt, 0.4)


def rank_zero_stops(path: str, where: str) -> list[str]:
    numbers = pids()
    job = context.current()
    with told_and_gate(path) as (told, _):
        told.expect(lambda: os.kill(numbers[0], signal.SIGCONT))
        held = stop if job.rank == 0 else nothing
        if where == "negotiation":
            held()
            reduce("t")
        else:
            gather("t", held)
        reduce("u")
        return told.messages


@pytest.mark.parametrize("where", ["negotiation", "middle"])
def test_of_rank_zero_another_rank_tells(where: str, path: str, rank_pool: Callable[[int], RankPool]) -> None:
    def attempt(seconds: float) -> None:
        results = rank_pool(3).run(rank_zero_stops, path, where, init=True, env=check(seconds))
        first = results[1][0]
        assert first.startswith("Stall: rank 0 does not answer within 2 s: its process ")
        assert "is stopped, by SIGSTOP" in first
        assert "  t has waited for 2." in first
        assert results[1][-1] == "Stall over: rank 0 answers."
        assert results[2] == []

    patiently(attempt, 0.4)


# -- the end of the job -----------------------------------------------------------------------------------------------


def end_of_the_job(path: str, missing: int, where: str) -> tuple[str, str | None, tuple[int, ...], dict[int, str], str]:
    job = context.current()
    with told_and_gate(path) as (_, gate):

        def held() -> None:
            if job.rank == missing:
                compute(gate.hold)

        try:
            if where == "negotiation":
                held()
                reduce("late")
            else:
                gather("late", held)
                reduce("next")  # who was missed has what it came for, but nothing after it
        except DeadlineError as error:
            gate.open()
            with pytest.raises(DeadlineError) as again:
                reduce("never")
            return type(error).__name__, error.tensor, error.ranks, error.details, str(again.value)
        raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("missing", "where"), [(0, "negotiation"), (1, "negotiation"), (1, "middle")])
def test_the_shutdown_time_ends_the_job_on_all_ranks(
    missing: int, where: str, path: str, rank_pool: Callable[[int], RankPool]
) -> None:
    def attempt(seconds: float) -> None:
        env = {**check(seconds), "REIGEN_STALL_SHUTDOWN_TIME_SECONDS": f"{2 * seconds:g}"}
        results = rank_pool(3).run(end_of_the_job, path, missing, where, init=True, env=env)
        for rank, (kind, tensor, ranks, details, again) in enumerate(results):
            assert (kind, tensor, ranks) == ("DeadlineError", "late", (missing,)), rank
            assert again.startswith("late: ")
            if where == "negotiation":
                assert "in Gate.hold: os.read(self.descriptor, 1)  # held here" in details[missing]
            elif rank != missing:
                assert "does not answer within 2 s: its process" in details[missing]

    patiently(attempt, 0.4)


def until_the_deadline(path: str) -> None:
    job = context.current()
    gate = Gate(path)
    if job.rank == 1:
        gate.hold()
    else:
        with pytest.raises(DeadlineError):
            reduce("t")
        gate.open()
    job.barrier().wait()
    gate.close()


@pytest.mark.parametrize("disable", ["0", "1"])
def test_the_warning_is_on_stderr_unless_it_is_disabled(
    disable: str, path: str, rank_pool: Callable[[int], RankPool]
) -> None:
    def attempt(seconds: float) -> None:
        pool = rank_pool(2)
        env = {**check(seconds), "REIGEN_DEADLINE": f"{2.5 * seconds:g}", "REIGEN_STALL_CHECK_DISABLE": disable}
        pool.run(until_the_deadline, path, init=True, env=env)
        said = pool.output(0)[1]
        assert ("missing: rank 1" in said) is (disable == "0"), said
        assert "Stall over" not in said  # the deadline is no end that would be worth telling
        assert "Stall" not in pool.output(1)[1]

    patiently(attempt, 0.4)
