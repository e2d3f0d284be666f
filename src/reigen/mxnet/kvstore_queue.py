"""Queue of a store's operations through MXNet's engine, and back when they are done.

The caller's thread puts an operation into the engine's queue (:mod:`reigen.mxnet.engine`) and goes on. When its
NDArrays are ready, a thread of the engine hands it to the store's own thread, and is free again. That thread alone
works with the store: it begins all operations that are ready together, takes in answers, and completes operations in
the engine. So the caller never waits, backward passes overlap with transfers, later readers of an NDArray wait for it
as for any other, and a step of many small arrays wakes few threads.

The error of an operation is raised by waiting for the NDArrays that it was to write, and by the next call to the store.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from reigen.errors import CollectiveError, ReigenError
from reigen.kv.store import KVStore, Pending
from reigen.mxnet.engine import get_engine_queue
from reigen.mxnet.errors import to_mxnet_error

#: Begins an operation in the store, when its NDArrays are ready; None: it is done.
StartOperation = Callable[[], Pending | None]

#: Seconds between looks of `KVStoreQueue.wait_until_begun`: the begin of each operation is not announced.
_LOOK_SECONDS = 0.005


@dataclass(slots=True, eq=False)
class _InputsReady:
    """`reigen.mxnet.engine.AsyncOperation` of an operation whose NDArrays are ready."""

    _queue: KVStoreQueue
    #: begins it in the store; that returns ``pending``
    begin: StartOperation
    pending: Pending | None = None
    error: Exception | None = None
    _callback: Callable[[], None] | None = None

    def complete(self) -> None:
        """Call the callback: it is over."""
        assert self._callback is not None
        self._callback()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Set the callback, and have the operation begun."""
        self._callback = callback
        self._queue.take(self)

    def wait(self) -> None:
        """Raise the error, if it has failed; it is over."""
        if self.error is not None:
            raise self.error


class KVStoreQueue:
    """Queue of a store's operations, and its thread, which ends with `close`. See the module."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        #: held for calls of the store, which serves one thread at a time
        self.store_lock = threading.RLock()
        self._changed = threading.Condition()
        self._num_pending = 0
        #: ready, and not begun
        self._ready: deque[_InputsReady] = deque()
        #: begun, in order
        self._running: dict[_InputsReady, None] = {}
        #: of these, the ones that are over; any thread of the store adds to them
        self._over: deque[_InputsReady] = deque()
        #: the thread is in the store, not in ``_changed``
        self._attends = False
        self._error: Exception | None = None
        self._is_closing = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="reigen-mxnet-kv", daemon=True)
        self._thread.start()

    def add(
        self, begin: StartOperation, *, reads: Sequence[Any] = (), writes: Sequence[Any], priority: int = 0, name: str
    ) -> None:
        """Have an operation begin when its NDArrays are ready (`EngineQueue.push`); raises the error of one before."""
        self.check()
        with self._changed:
            self._num_pending += 1
        get_engine_queue().push(
            functools.partial(_InputsReady, self, begin), reads, writes, priority, name, self._is_over
        )

    def settle(self) -> None:
        """Wait until all operations are over; raises the error of one of them."""
        self.check()
        self.wait_until_done()
        self.check()

    @property
    def is_owner_process(self) -> bool:
        """Return whether this is the process that made it, and not a child, where nothing of it runs."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Raise an operation's error, once; CollectiveError in a process that was forked from the store's."""
        if not self.is_owner_process:
            raise CollectiveError("this process was forked from a worker, and is none: let the worker call its store")
        if self._error is None:
            return
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise to_mxnet_error(error) if isinstance(error, ReigenError) else error

    def wait_until_begun(self) -> None:
        """Wait until all operations have begun, or are over. For the end: it looks again and again."""
        with self._changed:
            while self._num_pending > sum(one.pending is not None for one in list(self._running)):
                self._changed.wait(_LOOK_SECONDS)

    def wait_until_done(self) -> None:
        """Wait until all operations are over, however they end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_pending)

    def close(self) -> None:
        """End the thread, when all operations are over, and MXNet's threads have left them."""
        self.wait_until_done()
        get_engine_queue().wait_for_engine_threads()
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    # -- begin and end of operations ----------------------------------------------------------------------------------

    def take(self, operation: _InputsReady) -> None:
        """Take an operation that is ready. On a thread of the engine."""
        self._ready.append(operation)
        self._wake()

    def _wake(self) -> None:
        """Wake the thread, to look for work."""
        if self._attends:  # set before it looks for the last time
            self._store.interrupt()
            return
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        """Run the thread."""
        while not self._is_closing:
            self._await_work()
            with self._store.attention():
                self._work()

    def _work(self) -> None:
        """Begin and end operations until there are none."""
        while self._ready or self._running:
            while self._over:
                self._end(self._over.popleft())
            if self._ready:
                self._begin(self._ready.popleft())
            elif self._running:
                self._attend(next(iter(self._running)))

    def _begin(self, operation: _InputsReady) -> None:
        self._running[operation] = None
        try:
            with self.store_lock:
                operation.pending = operation.begin()
        except Exception as error:  # noqa: BLE001  raised where the arrays are waited for
            operation.error = error
        if operation.pending is None:
            self._end(operation)
        else:
            operation.pending.add_done_callback(functools.partial(self._ended, operation))

    def _ended(self, operation: _InputsReady) -> None:
        self._over.append(operation)
        if threading.current_thread() is not self._thread:
            self._wake()

    def _attend(self, oldest: _InputsReady) -> None:
        """Wait for work."""
        assert oldest.pending is not None
        self._attends = True
        try:
            self._store.attend(oldest.pending, self._has_work)
        except Exception as error:  # noqa: BLE001  raised where the arrays are waited for
            oldest.error = error
            self._over.append(oldest)
        finally:
            self._attends = False
        if not self._has_work():
            self._await_work()

    def _has_work(self) -> bool:
        return bool(self._ready or self._over)

    def _await_work(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_work() or self._is_closing)

    def _end(self, operation: _InputsReady) -> None:
        """Complete an operation in the engine. Once: one that was late may come yet."""
        if operation not in self._running:
            return
        del self._running[operation]
        if operation.error is None and operation.pending is not None:
            try:
                operation.pending.wait()
            except Exception as error:  # noqa: BLE001  raised where the arrays are waited for
                operation.error = error
        if operation.error is not None:
            with self._changed:
                self._error = self._error or operation.error
        operation.complete()

    def _is_over(self) -> None:
        with self._changed:
            self._num_pending -= 1
            if not self._num_pending:
                self._changed.notify_all()
