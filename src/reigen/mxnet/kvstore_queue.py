"""The way of a store's operations through MXNet's engine, and back when they are done.

The caller's thread puts an operation into the engine's queue (:mod:`reigen.mxnet.engine`) and goes on. When its
NDArrays are ready, a thread of the engine hands it to the lane's own thread, and is free again. That thread alone works
with the store: it begins what is ready, all that has come meanwhile together, takes in what is answered, and tells the
engine what is done. So the caller never waits, backward passes overlap with what travels, whoever reads an NDArray
afterwards waits for it as for any other, and a step of many small arrays wakes few threads.

The error of an operation that fails is raised where somebody waits for the NDArrays that it was to write, and by the
next call to the store.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from reigen.errors import CollectiveError, ReigenError
from reigen.kv.store import KVStore, Pending
from reigen.mxnet.engine import get_engine_queue
from reigen.mxnet.errors import to_mxnet_error

#: Begins an operation in the store, when its NDArrays are ready; None: it is done.
StartOperation = Callable[[], Pending | None]

#: How often `KVStoreQueue.let_begin` looks: nothing is told of each operation that begins.
_LOOK_SECONDS = 0.005


class _InputsReady:
    """A `reigen.mxnet.engine.AsyncOperation` of an operation whose NDArrays are ready.

    Attributes:
        begin: begins it in the store.
        pending: what that returned.
        error: what it has met.
    """

    __slots__ = ("_callback", "_lane", "begin", "error", "pending")

    def __init__(self, lane: KVStoreQueue, begin: StartOperation) -> None:
        self._lane, self.begin = lane, begin
        self.pending: Pending | None = None
        self.error: Exception | None = None
        self._callback: Callable[[], None] | None = None

    def tell(self) -> None:
        """It is over: whoever wants to know is told."""
        assert self._callback is not None
        self._callback()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """See `reigen.mxnet.engine.AsyncOperation`. The operation is begun when it is known whom to tell."""
        self._callback = callback
        self._lane.take(self)

    def wait(self) -> None:
        """See `reigen.mxnet.engine.AsyncOperation`; it is over."""
        if self.error is not None:
            raise self.error


class KVStoreQueue:
    """See the module. It ends with `close`.

    Args:
        store: what operations are begun in.
    """

    def __init__(self, store: KVStore) -> None:
        self._store = store
        #: held by whoever calls the store, which serves one thread at a time
        self.store_lock = threading.RLock()
        self._changed = threading.Condition()
        self._num_pending = 0
        #: ready, and not begun
        self._ready: deque[_InputsReady] = deque()
        #: begun, in order
        self._running: dict[_InputsReady, None] = {}
        #: of these, what is over; any thread of the store says so
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
        """Have an operation begin when its NDArrays are ready; see `reigen.mxnet.engine.EngineQueue.push`.

        Raises:
            Exception: what an operation before has met.
        """
        self.check()
        with self._changed:
            self._num_pending += 1
        get_engine_queue().push(
            functools.partial(_InputsReady, self, begin), reads, writes, priority, name, self._is_over
        )

    def settle(self) -> None:
        """Return when all operations are over.

        Raises:
            Exception: what one of them has met.
        """
        self.check()
        self.wait_until_done()
        self.check()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made it, and not a child, where nothing of it runs."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Raise what an operation has met, once.

        Raises:
            CollectiveError: or this process was forked from the one whose store it is.
        """
        if not self.is_here:
            raise CollectiveError("this process was forked from a worker, and is none: let the worker call its store")
        if self._error is None:
            return
        with self._changed:
            error, self._error = self._error, None
        if error is not None:
            raise to_mxnet_error(error) if isinstance(error, ReigenError) else error

    def wait_until_begun(self) -> None:
        """Return when all operations have begun, or are over. For the end: it looks again and again."""
        with self._changed:
            while self._num_pending > sum(one.pending is not None for one in list(self._running)):
                self._changed.wait(_LOOK_SECONDS)

    def wait_until_done(self) -> None:
        """Return when all operations are over, however they end."""
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

    # -- how operations begin and end ---------------------------------------------------------------------------------

    def take(self, arrival: _InputsReady) -> None:
        """An operation is ready. On a thread of the engine."""
        self._ready.append(arrival)
        self._wake()

    def _wake(self) -> None:
        """Have the thread look at what there is now."""
        if self._attends:  # said before it looks for the last time
            self._store.interrupt()
            return
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        """The thread."""
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

    def _begin(self, arrival: _InputsReady) -> None:
        self._running[arrival] = None
        try:
            with self.store_lock:
                arrival.pending = arrival.begin()
        except Exception as error:  # noqa: BLE001  whoever waits is told
            arrival.error = error
        if arrival.pending is None:
            self._end(arrival)
        else:
            arrival.pending.add_done_callback(functools.partial(self._ended, arrival))

    def _ended(self, arrival: _InputsReady) -> None:
        self._over.append(arrival)
        if threading.current_thread() is not self._thread:
            self._wake()

    def _attend(self, oldest: _InputsReady) -> None:
        """Wait until there is something to do."""
        assert oldest.pending is not None
        self._attends = True
        try:
            self._store.attend(oldest.pending, self._has_work)
        except Exception as error:  # noqa: BLE001  whoever waits is told
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

    def _end(self, arrival: _InputsReady) -> None:
        """An operation is over: the engine is told. Once: one that was late may come yet."""
        if arrival not in self._running:
            return
        del self._running[arrival]
        if arrival.error is None and arrival.pending is not None:
            try:
                arrival.pending.wait()
            except Exception as error:  # noqa: BLE001  whoever waits is told
                arrival.error = error
        if arrival.error is not None:
            with self._changed:
                self._error = self._error or arrival.error
        arrival.tell()

    def _is_over(self) -> None:
        with self._changed:
            self._num_pending -= 1
            if not self._num_pending:
                self._changed.notify_all()
