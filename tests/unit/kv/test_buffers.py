"""A server's memory and threads: what is being read is not written, what is free is used again, tasks end."""

import select
import threading

import pytest

from reigen.kv.server.buffers import BufferPool, ValueAllocator
from reigen.kv.server.thread_pool import ComputeThreads
from reigen.kv.shm_arena import ShmArena


@pytest.fixture(params=["arena", "plain", "full"])
def memory(request):
    arena = None if request.param == "plain" else ShmArena("reigen-test", 1 << 46 if request.param == "arena" else 1)
    yield ValueAllocator(arena)
    if arena is not None:
        arena.close()


def test_what_is_read_is_not_written(memory):
    value = memory.new(1000)
    assert memory.target(value) is value
    memory.lease(value)
    memory.lease(value)
    other = memory.target(value)
    assert other is not value
    memory.retire(value)
    block = value.block
    memory.release(value)
    assert value.block is block, "there is still a reader"
    memory.release(value)
    assert value.block is None
    if memory.arena is not None and block is not None:
        assert memory.arena.allocate(1000).offset == block.offset
    memory.retire(other)


def test_buffers_are_used_again():
    buffers = BufferPool()
    first = buffers.take(100)
    buffers.give(first)
    assert buffers.take(100) is first
    assert buffers.take(100) is not first
    assert len(buffers.take(0)) == 0


@pytest.fixture
def workers():
    workers = ComputeThreads(2)
    yield workers
    workers.close()


def test_tasks_end_in_the_thread_that_collects(workers):
    ended, gate = [], threading.Event()
    for number in range(4):

        def task(scratch, number=number):
            gate.wait(10)
            if number == 2:
                raise ValueError("two")

        workers.begin(task, lambda error, number=number: ended.append((number, error, threading.current_thread())))
    workers.collect()
    assert not ended
    gate.set()
    while len(ended) < 4:
        assert select.select([workers], [], [], 10)[0]
        workers.collect()
    assert {number for number, _, _ in ended} == {0, 1, 2, 3}
    assert [str(error) for number, error, _ in ended if error is not None] == ["two"]
    assert {thread for _, _, thread in ended} == {threading.current_thread()}
    assert workers.num_running == 0


def test_a_task_can_be_done_at_once(workers):
    assert workers.now(lambda scratch: None) is None
    assert isinstance(workers.now(lambda scratch: 1 // 0), ZeroDivisionError)
