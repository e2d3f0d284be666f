"""Threads of a server that compute; the thread that does I/O hears of the end of each task."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable

from reigen.kernels.float_errors import ignore_float_errors
from reigen.kv.server.buffers import ReductionScratch

_log = logging.getLogger(__name__)
#: Unless somebody asks for more.
_MOST_THREADS = 4
#: Computes something with a thread's own scratch.
ComputeTask = Callable[[ReductionScratch], None]
#: Called in the thread of `ComputeThreads.collect`: with what the task raised, or None.
TaskCallback = Callable[[BaseException | None], None]


def choose_num_threads(asked: int | None, num_processors: int, *, saves: bool) -> tuple[int, str]:
    """Return how many threads of a server compute, and the reason in words.

    Besides them there is the one that does I/O, which computes what is small. More threads than processors add nothing:
    they take Python's lock and the caches from each other, and processors from workers on the same host.
    ``num_processors`` is how many this process may use; ``saves``: the threads write snapshots, too.
    """
    if asked is not None:
        return asked, "as set"
    if saves:
        return _MOST_THREADS, "some of them may wait for a disk"
    number = max(1, min(num_processors - 1, _MOST_THREADS))
    return number, f"{num_processors} processor(s), and one of them for the thread that does I/O"


class ComputeThreads:
    """Threads that carry out tasks, in any order.

    Args:
        num_threads: at least 1; they start with the first task.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._tasks: queue.SimpleQueue[tuple[ComputeTask, TaskCallback] | None] = queue.SimpleQueue()
        self._ended: deque[tuple[TaskCallback, BaseException | None]] = deque()
        self._threads: list[threading.Thread] = []
        self._doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._scratch = ReductionScratch()
        self.num_running = 0

    def fileno(self) -> int:
        """Return a descriptor that is readable while `collect` has something to do."""
        return self._doorbell

    def now(self, task: ComputeTask) -> BaseException | None:
        """Carry out a task here and now; returns the exception that it raised."""
        return _run_task(task, self._scratch)

    def begin(self, task: ComputeTask, done: TaskCallback) -> None:
        """Have a thread carry out a task; where none can be started, this one does."""
        if len(self._threads) < self._num_threads and self.num_running >= len(self._threads):
            self._start_one()
        self.num_running += 1
        if self._threads:
            self._tasks.put((task, done))
        else:
            self._ended.append((done, self.now(task)))
            os.eventfd_write(self._doorbell, 1)

    def _start_one(self) -> None:
        thread = threading.Thread(target=self._work, name=f"reigen-kv-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no memory for its stack, or as many threads as the user may have
            self._num_threads = len(self._threads)
            _log.warning("continues with %d computing threads and the one that does I/O: %s", self._num_threads,
                         str(error))  # fmt: skip
        else:
            self._threads.append(thread)

    def collect(self) -> None:
        """Call ``done`` of every task that has ended."""
        try:
            os.eventfd_read(self._doorbell)
        except BlockingIOError:
            return
        while self._ended:
            done, error = self._ended.popleft()
            self.num_running -= 1
            done(error)

    def close(self) -> None:
        """Wait for the tasks that were begun, and end the threads. May be called twice."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._doorbell >= 0:
            os.close(self._doorbell)
            self._doorbell = -1

    def _work(self) -> None:
        scratch = ReductionScratch()
        with ignore_float_errors():
            while (item := self._tasks.get()) is not None:
                task, done = item
                self._ended.append((done, _run_task(task, scratch)))
                del item, task, done
                os.eventfd_write(self._doorbell, 1)


def _run_task(task: ComputeTask, scratch: ReductionScratch) -> BaseException | None:
    try:
        task(scratch)
    except Exception as error:  # noqa: BLE001  told to whoever waits for the result
        return error
    return None
