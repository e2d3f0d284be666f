"""The operations of a rank that are not complete: any thread hands them in, the one that drives completes them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from reigen.engine.handle import CollectiveResult, Handle
from reigen.engine.messages import JOIN_NAME, Operation, OperationKind
from reigen.engine.observer import EngineObserver
from reigen.errors import ArgumentError, CollectiveError, DuplicateNameError

#: The error of what is submitted after the end.
SHUTDOWN_MESSAGE = (
    "Reigen has been shut down. This was caused by an exception on one of the ranks or an attempt to run a collective "
    "after one of the ranks finished execution."
)


class TensorQueue:
    """Operations, their handles, and what becomes of them when nothing works any more.

    Attributes:
        closed: this rank has left the job.
        broken: why nothing works any more, if so.
        is_operational: operations still go somewhere: neither of the two.
        inbox: what was handed in and not taken yet.
        is_wakeup_pending: a thread that drives was woken for the inbox, and has not looked there since.
        handles: of every operation that is not complete, by name, in order of submission.
        overdue: when the coordinator's answer is, even if it is slow; for those that were taken, in that order. Who
            takes them writes it.
    """

    def __init__(self) -> None:
        #: guards inbox's order, handles and closed
        #: (reentrant: the garbage collector may free registered memory, which is a submission, at any moment)
        self._mutex = threading.RLock()
        self.inbox: deque[Operation] = deque()
        self.is_wakeup_pending = False
        self.handles: dict[str, Handle] = {}
        self.overdue: dict[str, float] = {}
        self._completed = threading.Condition()
        self._num_waiters = 0
        self.closed = False
        self.broken: CollectiveError | None = None
        self.is_operational = True

    def add(self, operation: Operation, handle: Handle, observer: EngineObserver | None) -> None:
        """Hand in an operation. Any thread.

        Args:
            operation: what is wanted.
            handle: completed in time.
            observer: called before any thread can begin it.

        Raises:
            DuplicateNameError: an operation of this name is outstanding.
            ArgumentError: a join is outstanding.
            CollectiveError: a rank was lost, or this one has left.
        """
        name, handles = operation.name, self.handles
        with self._mutex:
            if self.closed:
                raise CollectiveError(SHUTDOWN_MESSAGE, tensor=name)
            if self.broken is not None:
                raise self.broken.of(name)
            if name in handles:
                raise DuplicateNameError(name)
            if JOIN_NAME in handles and operation.kind is not OperationKind.FREE:
                raise ArgumentError(f"{name}: this rank has joined; wait for join() before anything else")
            handles[name] = handle
            if observer is not None:
                observer.submitted(operation)
            self.inbox.append(operation)

    def add_alone(self, name: str, handle: Handle) -> bool:
        """Hand in an operation that the caller, who drives, carries out himself; False if anything is outstanding."""
        with self._mutex:
            if self.handles or not self.is_operational:
                return False
            self.handles[name] = handle
        return True

    def finish_alone(self, name: str, handle: Handle, result: CollectiveResult) -> None:
        """Complete an operation of `add_alone`; wake threads that wait."""
        del self.handles[name]
        handle.complete(result)
        if self._num_waiters:
            self._notify()

    def finish(self, results: Iterable[tuple[str, CollectiveResult | CollectiveError]]) -> None:
        """Complete these operations; wake who waits for them. A name is free again before its handle is done."""
        for name, result in results:
            self.overdue.pop(name, None)
            handle = self.handles.pop(name, None)
            if handle is not None:
                handle.complete(result)
        if self._num_waiters:
            self._notify()

    def _notify(self) -> None:
        with self._completed:
            self._completed.notify_all()

    def fail_all(self, error: CollectiveError) -> None:
        """All that is outstanding is over, taken or not."""
        self.inbox.clear()
        self.finish([(name, error.of(name)) for name in list(self.handles)])

    def close(self) -> bool:
        """From now on nothing can be handed in; False if that was so before."""
        with self._mutex:
            was_open, self.closed, self.is_operational = not self.closed, True, False
        return was_open

    def set_broken(self, error: CollectiveError) -> None:
        """From now on nothing works."""
        with self._mutex:
            self.broken, self.is_operational = error, False

    def wait(self, handle: Handle, timeout_seconds: float) -> None:
        """Return when something is complete, this handle perhaps, or after the time given."""
        with self._completed:
            self._num_waiters += 1
            try:
                if not handle.done:
                    self._completed.wait(timeout_seconds)
            finally:
                self._num_waiters -= 1
