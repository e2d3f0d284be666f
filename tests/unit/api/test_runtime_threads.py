"""Threads on which programs of a runtime go on."""

from __future__ import annotations

import threading

import pytest

from reigen.api.runtime_threads import ContinuationThreads
from tests.multiprocess.launcher import until

PATIENCE_SECONDS = 30


def make_threads() -> ContinuationThreads:
    return ContinuationThreads("test-continuation", idle_seconds=0.2)


def test_no_work_waits_for_other_work() -> None:
    threads, together = make_threads(), threading.Barrier(4)
    for _ in range(3):
        threads.run(lambda: together.wait(PATIENCE_SECONDS))
    together.wait(PATIENCE_SECONDS)


def test_an_idle_thread_works_again() -> None:
    threads, used = ContinuationThreads("test-continuation", idle_seconds=2.0), []
    threads.run(lambda: used.append(threading.get_ident()))
    until(lambda: threads.num_idle == 1)
    threads.run(lambda: used.append(threading.get_ident()))
    until(lambda: len(used) == 2)
    assert used[0] == used[1]


def test_work_comes_while_threads_end() -> None:
    threads, count = ContinuationThreads("test-continuation", idle_seconds=0.0), 500
    done = threading.Semaphore(0)
    for _ in range(count):
        threads.run(done.release)
    assert all(done.acquire(timeout=PATIENCE_SECONDS) for _ in range(count))
    until(lambda: threads.num_idle == 0)


def test_where_no_thread_can_be_started_the_caller_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    used: list[int] = []
    make_threads().run(lambda: used.append(threading.get_ident()))
    assert used == [threading.get_ident()]
