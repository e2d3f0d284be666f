"""Ranks that die, stop, leave or give up: everybody else gets an error that names them, in time."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from reigen import context
from reigen.errors import CollectiveError, DeadlineError, PeerLostError
from reigen.net.doorbells import WaitingThread
from reigen.net.shm_ring import ShmTransport
from reigen.testing import LeakCheck, RankError, RankPool, run_ranks
from reigen.types import DTYPES, ReduceOp
from tests.patience import patiently

pytestmark = pytest.mark.slow  # many real processes

FLOAT = DTYPES["float32"]
#: Far from the deadline of ten minutes. On a machine that is not busy a death is seen within a second.
SEEN_SECONDS = 40.0
#: Elements of an array that takes a while between three ranks.
LARGE = 16_000_000


def allreduce(name: str, count: int = 4) -> None:
    x = np.ones(count, np.float32)
    context.current().allreduce(x, x, FLOAT, op=ReduceOp.SUM, name=name).wait()


def error_of(act: Callable[[], Any]) -> tuple[str, tuple[int, ...], float, str]:
    """Kind, ranks, moment and text of the error that ``act`` raises."""
    try:
        act()
    except CollectiveError as error:
        return type(error).__name__, error.ranks, time.monotonic(), str(error)
    raise AssertionError("nothing was raised")


def die(victim: int, how: str) -> None:
    """The victim tells when it dies, as the last thing it does; everybody else goes on."""
    if context.current().rank == victim:
        os.write(int(os.environ["LAST_WORDS"]), f"{time.monotonic()}\n".encode())
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)


def negotiate_with_a_dead(victim: int, how: str) -> tuple[str, tuple[int, ...], float, str]:
    allreduce("before")
    die(victim, how)
    return error_of(lambda: allreduce("after"))


def compute_with_a_dying(victim: int, how: str) -> tuple[str, tuple[int, ...], float, str]:
    x = np.ones(LARGE, np.float32)
    job = context.current()

    def make_output(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        die(victim, how)  # called when all have submitted: the others are in the collective, or about to be
        return np.empty(shape, np.float32)

    return error_of(lambda: job.allgather(x, FLOAT, name="large", make_output=make_output).wait())


def die_between_chunks(victim: int, how: str) -> tuple[str, tuple[int, ...], float, str]:
    """A thread of the victim ends it while its main thread copies chunk after chunk."""
    job = context.current()
    x = np.ones(LARGE, np.float32)
    allreduce("warm", 1 << 20)
    handle = job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="large")
    if job.rank == victim:

        def watch() -> None:
            while not (x[: 1 << 18] != 1).all():  # the first chunk is there, the last is far away
                pass
            die(victim, how)

        threading.Thread(target=watch, daemon=True).start()

    def wait_and_go_on() -> None:
        handle.wait()
        while True:  # where nobody gave the thread a turn in time, the next one is cut short
            job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="large").wait()

    return error_of(wait_and_go_on)


def run_with_last_words(func: Callable[..., Any], size: int, victim: int, how: str) -> tuple[RankError, float]:
    """The failed run, and when the victim died."""
    pipe = os.pipe()
    os.set_inheritable(pipe[1], True)
    try:
        with pytest.raises(RankError) as caught:
            run_ranks_inheriting(func, size, victim, how, descriptor=pipe[1])
        return caught.value, float(os.read(pipe[0], 100).split()[0])
    finally:
        for fd in pipe:
            os.close(fd)


def run_ranks_inheriting(func: Callable[..., Any], size: int, *args: Any, descriptor: int) -> None:
    """Ranks open the test's pipe through /proc, since they inherit nothing."""
    run_ranks(_with_last_words, size, func, args, f"/proc/{os.getpid()}/fd/{descriptor}", init=True)


def _with_last_words(func: Callable[..., Any], args: tuple[Any, ...], path: str) -> Any:
    descriptor = os.open(path, os.O_WRONLY)
    os.environ["LAST_WORDS"] = str(descriptor)
    try:
        return func(*args)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("act", [negotiate_with_a_dead, compute_with_a_dying, die_between_chunks])
def test_a_killed_rank_is_named_long_before_the_deadline(act: Callable[..., Any], victim: int) -> None:
    failed, died = run_with_last_words(act, 3, victim, "kill")
    assert [(f.rank, f.kind, f.exit_code) for f in failed.failures] == [(victim, "died", -signal.SIGKILL)], str(failed)
    for kind, ranks, when, text in failed.results.values():
        assert (kind, ranks) == ("PeerLostError", (victim,)), text
        assert "died" in text
        assert when - died < SEEN_SECONDS
    assert len(failed.results) == 2


def test_a_rank_that_exits_without_a_word_is_named() -> None:
    failed, died = run_with_last_words(negotiate_with_a_dead, 2, 1, "exit")
    [(kind, ranks, when, _)] = failed.results.values()
    assert (kind, ranks) == ("PeerLostError", (1,))
    assert when - died < SEEN_SECONDS


def leave_while_others_wait(leaver: int) -> tuple[str, tuple[int, ...], float, str]:
    allreduce("before")
    if context.current().rank == leaver:
        context.shutdown()
        return "left", (), time.monotonic(), ""
    kind, ranks, when, text = error_of(lambda: allreduce("after"))
    again, *_ = error_of(lambda: allreduce("later"))
    assert again == kind
    return kind, ranks, when, text


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_rank_that_shuts_down_in_good_order_is_named(leaver: int, rank_pool: Callable[[int], RankPool]) -> None:
    results = rank_pool(3).run(leave_while_others_wait, leaver, init=True)
    left = results.pop(leaver)
    for kind, ranks, when, text in results:
        assert (kind, ranks) == ("PeerLostError", (leaver,))
        assert "left the job" in text
        assert when - left[2] < SEEN_SECONDS


def leave_what_was_submitted(leaver: int) -> str:
    """The leaver does not wait for what all others take part in."""
    job = context.current()
    x = np.ones(1 << 22, np.float32)
    if job.rank == leaver:
        job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="large")
        context.shutdown()
        return "left"
    try:
        job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="large").wait()
    except PeerLostError as error:
        return str(error.ranks)
    return "done"


@pytest.mark.parametrize("leaver", [0, 1])
def test_leaving_in_the_middle_ends_the_waiting_of_others(leaver: int, rank_pool: Callable[[int], RankPool]) -> None:
    results = rank_pool(2).run(leave_what_was_submitted, leaver, init=True)
    assert results[1 - leaver] in (f"({leaver},)", "done")


def miss(missing: int) -> list[tuple[str, tuple[int, ...], float, str]]:
    job = context.current()
    told = []
    if job.rank != missing:
        told.append(error_of(lambda: allreduce("lacking")))
    while True:  # the job carries on, once all have come to this
        try:
            allreduce("after")
        except DeadlineError:
            continue
        return told


@pytest.mark.parametrize("missing", [0, 1])
def test_who_does_not_submit_by_the_deadline_is_named_and_the_job_goes_on(
    missing: int, rank_pool: Callable[[int], RankPool]
) -> None:
    def attempt(seconds: float) -> None:
        began = time.monotonic()
        results = rank_pool(3).run(miss, missing, init=True, env={"REIGEN_DEADLINE": f"{seconds:g}"})
        assert results[missing] == []
        for rank in {0, 1, 2} - {missing}:
            [(kind, ranks, when, text)] = results[rank]
            assert (kind, ranks) == ("DeadlineError", (missing,))
            assert text.startswith(f"lacking: rank(s) {missing} did not submit it within {seconds:g} s")
            assert when - began >= seconds

    patiently(attempt, 1.0)


def stop_in_the_middle(victim: int) -> tuple[str, tuple[int, ...], float, str]:
    """The victim stops itself; the first other that has its error lets it go on."""
    job = context.current()
    numbers = job.allgather(np.array([os.getpid()]), DTYPES["int64"]).wait().array
    assert numbers is not None
    x = np.ones(1 << 20, np.float32)

    def make_output(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        if job.rank == victim:
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # the process's might be taken later
        return np.empty(shape, np.float32)

    told = error_of(lambda: job.allgather(x, FLOAT, name="stopped", make_output=make_output).wait())
    if job.rank != victim:
        os.kill(int(numbers[victim]), signal.SIGCONT)
    return told


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_at_the_deadline_and_gets_an_error_itself(victim: int) -> None:
    def attempt(seconds: float) -> None:
        results = run_ranks(stop_in_the_middle, 3, victim, init=True, env={"REIGEN_DEADLINE": f"{seconds:g}"})
        others = [results[rank] for rank in range(3) if rank != victim]
        assert {kind for kind, *_ in others} == {"DeadlineError"}
        assert {ranks for _, ranks, *_ in others} == {(victim,)}
        assert results[victim][0] in ("DeadlineError", "PeerLostError")

    patiently(attempt, 1.0)


def shut_down_in_the_middle(victim: int) -> float:
    """Shut down while the engine's thread waits for a rank that is stopped; how long that takes."""
    job = context.current()
    numbers = job.allgather(np.array([os.getpid()]), DTYPES["int64"]).wait().array
    assert numbers is not None
    reached = threading.Event()

    def make_output(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        if job.rank == victim:
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # the process's might be taken later
        reached.set()
        return np.empty(shape, np.float32)

    job.allgather(np.ones(1 << 20, np.float32), FLOAT, name="stopped", make_output=make_output)
    assert reached.wait(60.0)
    began = time.monotonic()
    context.shutdown()
    took = time.monotonic() - began
    if job.rank != victim:
        os.kill(int(numbers[victim]), signal.SIGCONT)
    return took


def test_shutdown_does_not_wait_for_the_deadline_of_a_collective() -> None:
    took = run_ranks(shut_down_in_the_middle, 2, 1, init=True)
    assert took[0] < 40.0  # the deadline is 600 s


def interrupt_the_wait(victim: int) -> tuple[str, tuple[int, ...]]:
    job = context.current()
    allreduce("before")
    if job.rank != victim:
        kind, ranks, *_ = error_of(lambda: allreduce("after"))
        return kind, ranks
    main, engine = threading.main_thread().ident, job._engine
    transport = engine._transport
    assert main is not None
    assert isinstance(transport, ShmTransport)

    def interrupt() -> None:
        # until the main thread sleeps: as the one who drives, or for the engine's thread, which does
        while transport._waiter.load() != WaitingThread.CALLER and not engine._outstanding._num_waiters:
            pass
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    x = np.ones(4, np.float32)
    handle = job.allreduce(x, x, FLOAT, name="alone", blocking=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    thread.join()
    context.shutdown()  # as at the end of a script that a KeyboardInterrupt ends
    kind, ranks, *_ = error_of(handle.wait)
    return kind, ranks


@pytest.mark.parametrize("victim", [0, 1])
def test_an_interrupt_ends_a_wait_at_once_and_that_of_the_others(
    victim: int, rank_pool: Callable[[int], RankPool]
) -> None:
    results = rank_pool(2).run(interrupt_the_wait, victim, init=True)
    # who drove gave up in the middle; who did not has left in good order
    assert results[1 - victim] in (("CollectiveError", (victim,)), ("PeerLostError", (victim,)))
    assert results[victim][0] == "CollectiveError"


def fail_in_make_output(victim: int) -> tuple[str, str, str]:
    job = context.current()

    def make_output(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        if job.rank == victim:
            raise MemoryError("no room for the output")
        return np.empty(shape, np.float32)

    try:
        job.allgather(np.ones(3, np.float32), FLOAT, name="g", make_output=make_output).wait()
    except CollectiveError as error:
        return type(error).__name__, str(error), repr(error.__cause__)
    return "", "", ""


@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_in_make_output_is_told_to_all(victim: int, rank_pool: Callable[[int], RankPool]) -> None:
    results = rank_pool(2).run(fail_in_make_output, victim, init=True)
    for kind, text, _ in results:
        assert kind == "CollectiveError"
        assert f"rank {victim} was interrupted: MemoryError('no room for the output')" in text
    assert results[victim][2] == "MemoryError('no room for the output')"


def work_until_killed(seed: int) -> str:
    rng = np.random.default_rng(seed)
    try:
        while True:
            allreduce("t", int(rng.integers(1, 200_000)))
            context.current().barrier().wait()
    except PeerLostError as error:
        return str(error.ranks)


@pytest.mark.slow
def test_kill_loop() -> None:
    """Six times one of four ranks is killed at a random moment; nothing is left of any of them."""
    rng = random.Random(20)
    for seed in range(6):
        victim, moment = rng.randrange(4), rng.uniform(0.0, 0.6)
        patiently(functools.partial(kill_at_work, seed, victim, moment), 2.0)


def kill_at_work(seed: int, victim: int, moment: float, patience: float) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(LeakCheck())
        pool = stack.enter_context(RankPool(4))
        pool.run(os.getpid)  # all are there
        pidfds = [os.pidfd_open(pid) for pid in pool.pids]
        for fd in pidfds:
            stack.callback(os.close, fd)
        timer = threading.Timer(moment, os.kill, (pool.pids[victim], signal.SIGKILL))
        timer.start()
        stack.callback(timer.join)
        with pytest.raises(RankError) as caught:
            pool.run(work_until_killed, seed, init=True, env={"REIGEN_START_TIMEOUT": f"{patience:g}"})
        failures = {f.rank: f for f in caught.value.failures}
        assert failures.pop(victim).exit_code == -signal.SIGKILL
        for failure in failures.values():  # killed during init(), perhaps before anybody could know of it
            assert isinstance(failure.error, PeerLostError | DeadlineError), str(caught.value)
            assert failure.error.ranks == (victim,), str(caught.value)
        assert set(caught.value.results.values()) <= {f"({victim},)"}
        pool.close(kill=True)
        ended, _, _ = select.select(pidfds, [], [], 60.0)
        assert len(ended) == 4


def stopped_before_submitting(victim: int) -> tuple[str, tuple[int, ...]]:
    """A rank that is stopped outside of a collective and later takes its part gets its own deadline."""
    allreduce("before")
    job = context.current()
    numbers = job.allgather(np.array([os.getpid()]), DTYPES["int64"]).wait().array
    assert numbers is not None
    if job.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    kind, ranks, *_ = error_of(lambda: allreduce("stopped"))
    if job.rank != victim:
        os.kill(int(numbers[victim]), signal.SIGCONT)
    return kind, ranks


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_stopped_in_negotiation_is_named(victim: int) -> None:
    def attempt(seconds: float) -> None:
        results = run_ranks(stopped_before_submitting, 3, victim, init=True, env={"REIGEN_DEADLINE": f"{seconds:g}"})
        assert results.pop(victim)[0] in (
            "DeadlineError",
            "PeerLostError",
        )  # it depends on who looks first
        assert results == [("DeadlineError", (victim,))] * 2

    patiently(attempt, 1.0)
