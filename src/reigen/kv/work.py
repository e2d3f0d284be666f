"""The threads of a server that compute; the end of each task is told to the thread that does I/O."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable

from reigen.kernels.quiet import quiet
from reigen.kv.memory import Scratch

#: Unless somebody asks for more.
_MOST_THREADS = 4
#: Computes something with a thread's own scratch.
Task = Callable[[Scratch], None]
#: Called in the thread of `Workers.collect`: with what the task raised, or None.
Done = Callable[[BaseException | None], None]


def choose_num_threads(asked: int | None, num_processors: int, *, saves: bool) -> tuple[int, str]:
    """How many threads of a server compute, and the reason in words.

    Besides them there is the one that does I/O, which computes what is small. More threads than processors add nothing:
    they take Python's lock and the caches from each other, and processors from workers on the same host.

    Args:
        asked: what the user says; None: nothing.
        num_processors: how many this process may use.
        saves: they write snapshots, too.
    """
    if asked is not None:
        return asked, "as set"
    if saves:
        return _MOST_THREADS, "some of them may wait for a disk"
    number = max(1, min(num_processors - 1, _MOST_THREADS))
    return number, f"{num_processors} processor(s), and one of them for the thread that does I/O"


class Workers:
    """Threads that carry out tasks, in any order.

    Args:
        num_threads: at least 1; they start with the first task.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._tasks: queue.SimpleQueue[tuple[Task, Done] | None] = queue.SimpleQueue()
        self._ended: deque[tuple[Done, BaseException | None]] = deque()
        self._threads: list[threading.Thread] = []
        self._doorbell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._scratch = Scratch()
        self.num_running = 0

    def fileno(self) -> int:
        """A descriptor that is readable while `collect` has something to do."""
        return self._doorbell

    def now(self, task: Task) -> BaseException | None:
        """Carry out a task here and now; returns what it raised."""
        return _outcome(task, self._scratch)

    def begin(self, task: Task, done: Done) -> None:
        """Have a thread carry out a task."""
        if len(self._threads) < self._num_threads and self.num_running >= len(self._threads):
            thread = threading.Thread(target=self._work, name=f"reigen-kv-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self.num_running += 1
        self._tasks.put((task, done))

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
        scratch = Scratch()
        with quiet():
            while (item := self._tasks.get()) is not None:
                task, done = item
                self._ended.append((done, _outcome(task, scratch)))
                del item, task, done
                os.eventfd_write(self._doorbell, 1)


def _outcome(task: Task, scratch: Scratch) -> BaseException | None:
    try:
        task(scratch)
    except Exception as error:  # noqa: BLE001  told to whoever waits for the result
        return error
    return None
