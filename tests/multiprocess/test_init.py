"""Joining and leaving a job: again and again, late, never, and with a rank that dies or has no memory meanwhile."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reigen import context
from reigen.cluster.environ import detect_job
from reigen.cluster.membership.rendezvous import RendezvousClient
from reigen.errors import CollectiveError, DeadlineError, NotInitializedError, PeerLostError, SharedMemoryError
from reigen.testing import RankError, RankPool, run_ranks
from reigen.types import DTYPES, ReduceOp
from tests.multiprocess.launcher import run
from tests.patience import patiently

Pools = Callable[[int], RankPool]
FLOAT = DTYPES["float32"]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def come_and_go(times: int) -> tuple[int, int, int, int]:
    """Descriptors, threads, mappings and bytes that so many jobs one after another have left."""

    def once() -> None:
        job = context.init()
        assert context.init() is job
        region = job.allocate(1 << 16, name="r")
        x = region.array.view(np.float32)
        x[:] = 1
        job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="x", region=region).wait()
        assert (x == job.size).all()
        context.shutdown()
        context.shutdown()

    def count() -> tuple[int, int, int, int]:
        gc.collect()
        mappings = Path("/proc/self/maps").read_text().count("/memfd:reigen")
        return len(os.listdir("/proc/self/fd")), threading.active_count(), mappings, resident_bytes()  # noqa: PTH208

    once()
    before = count()
    for _ in range(times):
        once()
    after = count()
    return after[0] - before[0], after[1] - before[1], after[2] - before[2], after[3] - before[3]


@pytest.mark.slow
def test_more_than_a_hundred_jobs_in_one_process_leave_nothing(rank_pool: Pools) -> None:
    for descriptors, threads, mappings, nbytes in rank_pool(2).run(come_and_go, 101):
        assert (descriptors, threads, mappings) == (0, 0, 0)
        assert nbytes < 8 << 20


def after_the_end() -> list[str]:
    job = context.init()
    x = np.ones(4, np.float32)
    handle = job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="x")
    handle.wait()
    context.shutdown()
    with pytest.raises(NotInitializedError):
        context.current()
    texts = []
    with pytest.raises(CollectiveError) as caught:
        job.barrier()
    texts.append(str(caught.value))
    assert handle.wait().array is x  # what was done stays done
    assert (x == job.size).all()
    return texts


@pytest.mark.parametrize("size", [1, 2])
def test_a_job_that_was_left_takes_nothing_more(size: int, rank_pool: Pools) -> None:
    for [text] in rank_pool(size).run(after_the_end):
        assert "Reigen has been shut down" in text


def views_outlive_the_job() -> float:
    job = context.init()
    region = job.allocate(4096, name="r")
    view = region.array.view(np.float32)
    view[:] = job.rank
    del region
    context.shutdown()
    del job
    gc.collect()
    view += 1
    return float(view.sum())


def test_views_of_registered_memory_outlive_the_job(rank_pool: Pools) -> None:
    assert rank_pool(2).run(views_outlive_the_job) == [1024.0, 2048.0]


def lack(missing: int) -> tuple[str, tuple[int, ...]]:
    if int(os.environ["REIGEN_RANK"]) == missing:
        return "", ()
    with pytest.raises(DeadlineError) as caught:
        context.init()
    assert not context.is_initialized()
    return str(caught.value), caught.value.ranks


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_who_does_not_come_is_named_alone(missing: int, rank_pool: Pools) -> None:
    def attempt(seconds: float) -> None:
        results = rank_pool(3).run(lack, missing, env={"REIGEN_START_TIMEOUT": f"{seconds:g}"})
        for rank in {0, 1, 2} - {missing}:
            text, ranks = results[rank]
            assert ranks == (missing,)
            assert f"rank(s) {missing} did not call init() within {seconds:g} s" in text

    patiently(attempt, 0.5)


def die_in_init(victim: int) -> tuple[tuple[int, ...], float]:
    """The victim dies when it has shown its segment and before it has mapped the others'."""
    if int(os.environ["REIGEN_RANK"]) == victim:
        from reigen.net import shm_segment

        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        shm_segment.ShmSegment.map = die  # type: ignore[method-assign,assignment]
    began = time.monotonic()
    with pytest.raises(PeerLostError, match=r"during init\(\)") as caught:
        context.init()
    return caught.value.ranks, time.monotonic() - began


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_death_during_init_is_seen(victim: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(die_in_init, 3, victim)
    assert [(f.rank, f.exit_code) for f in caught.value.failures] == [(victim, -signal.SIGKILL)], str(caught.value)
    for ranks, seconds in caught.value.results.values():
        assert ranks == (victim,)
        assert seconds < 40  # far from the time allowed for starting


def poor_from_the_start(poor: int) -> str:
    if int(os.environ["REIGEN_RANK"]) == poor:
        from reigen.resources import memory

        memory.available_memory = lambda: memory.AvailableMemory(1 << 20)
    with pytest.raises(SharedMemoryError) as caught:
        context.init()
    return str(caught.value)


def test_shortage_on_one_rank_during_init_is_raised_on_all() -> None:
    texts = run_ranks(poor_from_the_start, 3, 1)
    assert all("not enough shared memory for staging" in text for text in texts)
    assert "(told by rank 1)" in texts[0]
    assert "told by" not in texts[1]


def try_again() -> int:
    """One waits in vain and tries again; the other comes after that."""
    rank = int(os.environ["REIGEN_RANK"])
    job = detect_job(os.environ)
    assert job.rendezvous is not None
    assert job.secret is not None
    client = RendezvousClient(job.rendezvous, job.secret, rank, 60.0)
    try:
        if rank == 1:
            client.get("the other has given up", 60.0)
        else:
            with pytest.raises(DeadlineError):
                context.init({**os.environ, "REIGEN_START_TIMEOUT": "0.3"})
            client.put("the other has given up", b"")
    finally:
        client.close()
    while True:
        try:
            return context.init().size
        except PeerLostError:  # the other's first try was still to be seen
            continue


def test_init_can_be_tried_again(rank_pool: Pools) -> None:
    assert rank_pool(2).run(try_again) == [2, 2]


def fork_after_init() -> str:
    """A forked child is no rank: it is told so, and its end harms nobody."""
    job = context.current()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            context.current()
        except NotInitializedError as error:
            os.write(writer, str(error).encode())
        atexit._run_exitfuncs()  # those that the parent has registered
        os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    with os.fdopen(reader, "rb") as told:
        text = told.read().decode()
    x = np.ones(3, np.float32)
    job.allreduce(x, x, DTYPES["float32"], op=ReduceOp.SUM).wait()
    assert (x == job.size).all()
    return text


def test_a_forked_child_is_no_rank_and_does_no_harm(rank_pool: Pools) -> None:
    for rank, text in enumerate(rank_pool(2).run(fork_after_init, init=True)):
        assert text.startswith(f"this process was forked from rank {rank} after init()")


def start_a_child() -> tuple[int, str]:
    """A process that the rank starts calls init(); then the rank goes on, leaves and comes again."""
    job = context.init()
    child = subprocess.run(
        [sys.executable, "-c", "import reigen; reigen.init()"], stderr=subprocess.PIPE, text=True, check=False
    )
    x = np.ones(4, np.float32)
    job.allreduce(x, x, FLOAT, op=ReduceOp.SUM, name="x").wait()
    context.shutdown()
    context.init().barrier().wait()
    context.shutdown()
    return int(x[0]), child.stderr.splitlines()[-1]


def test_a_process_that_a_rank_starts_is_no_rank_and_does_no_harm(rank_pool: Pools) -> None:
    for rank, (total, complaint) in enumerate(rank_pool(2).run(start_a_child)):
        assert total == 2
        assert f"ConfigError: rank {rank} of this job is process" in complaint


def test_processes_that_follow_one_another_as_one_rank_form_jobs_one_after_another() -> None:
    program = "import reigen as r, numpy as n; r.init(); print(int(r.allreduce(n.full(1, r.rank() + 1), op=r.Sum)[0]))"
    script = f'"{sys.executable}" -c "{program}" && "{sys.executable}" -c "{program}"'
    assert run("-np", "2", "--no-prefix", "sh", "-c", script) == (0, "3\n" * 4, "")
