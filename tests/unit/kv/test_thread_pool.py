"""Threads that compute for a server."""

import select
import threading

import pytest

from reigen.kv.server.thread_pool import ComputeThreads, choose_num_threads


@pytest.mark.parametrize(
    ("asked", "num_processors", "expected"),
    [(None, 1, 1), (None, 2, 1), (None, 3, 2), (None, 5, 4), (None, 96, 4), (1, 96, 1), (8, 2, 8)],
)
def test_one_processor_is_left_to_the_thread_that_does_io(asked, num_processors, expected):
    number, reason = choose_num_threads(asked, num_processors, saves=False)
    assert number == expected
    assert reason == "as set" if asked else f"{num_processors} processor(s)" in reason


def test_threads_that_may_wait_for_a_disk_are_as_many_on_any_machine():
    assert choose_num_threads(None, 1, saves=True) == choose_num_threads(None, 96, saves=True)
    assert choose_num_threads(None, 2, saves=True)[0] > 1
    assert choose_num_threads(3, 2, saves=True) == (3, "as set")


def test_where_no_thread_can_be_started_there_is_one_that_works(monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    workers, done = ComputeThreads(2), []
    try:
        workers.begin(lambda scratch: None, done.append)
        workers.begin(lambda scratch: 1 / 0, done.append)
        assert done == []  # as ever: told by `collect`
        assert select.select([workers.fileno()], [], [], 10)[0]
        workers.collect()
        assert done[0] is None
        assert isinstance(done[1], ZeroDivisionError)
        assert workers.num_running == 0
    finally:
        workers.close()
