"""Operations of Reigen as operations of MXNet's engine.

MXNet runs nothing at once: each call becomes an operation in its engine, with the arrays that it reads and those that
it writes, and is started when earlier operations are done with them. A collective is one of them:

a. `EngineQueue.push` puts it into the engine, with its arrays, and returns.
b. When the arrays are ready (the gradient has been computed), one of the engine's threads calls `_begin`. That submits
   the collective to Reigen's engine, and returns: the thread is free for the next. Other operations go on meanwhile.
c. When the collective is complete, Reigen's engine calls back, which completes it in MXNet's engine; that starts the
   operations that waited for the result (the update of the weight). A failed one hands over its error, which is raised
   by waiting for the array, or for any result computed from it.

The interface is `MXEnginePushAsyncND` of MXNet's C API. The operation gets the callback for its end, which is a
C++ object of three pointers (`CallbackOnComplete` in mxnet/engine.h: function, engine, parameter). An error is a C++
`std::runtime_error`, which the C++ runtime's own constructor makes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mxnet as mx
from mxnet.base import _LIB, MXNetError, check_call

from reigen import context
from reigen.api.runtime_threads import KnownThreads, wait_until_left
from reigen.engine.handle import Handle
from reigen.errors import CollectiveError, ReigenError
from reigen.mxnet.errors import EngineErrors, to_mxnet_error

_POINTER = ctypes.c_void_p
_ASYNC_FUNCTION = ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _POINTER)
_DELETER = ctypes.CFUNCTYPE(None, _POINTER)
_ON_COMPLETE = ctypes.CFUNCTYPE(None, _POINTER, _POINTER, _POINTER)
#: `FnProperty::kCPUPrioritized`: by threads that do not compute, the largest priority first
_PRIORITIZED = ctypes.c_int(3)
#: more than any std::runtime_error has: a pointer to functions and one to the text
_ERROR_BYTES = 64
#: seconds that the end of a script waits for pending reductions, beyond the deadline of each collective
_GRACE_SECONDS = 5.0


class _CContext(ctypes.Structure):
    """`mxnet::Context`: a kind of device, and its number."""

    _fields_ = [("kind", ctypes.c_int), ("number", ctypes.c_int)]


class AsyncOperation(Protocol):
    """Pending operation, as `reigen.engine.handle.Handle` is."""

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Have the callback called once, when it is over; at once, if it is."""

    def wait(self) -> object:
        """Raise its error, if it has failed."""


@dataclass(slots=True, eq=False)
class _Operation:
    """Operation that was pushed and is not over."""

    #: submits the collective
    begin: Callable[[], AsyncOperation]
    #: called when it has left
    forgotten: Callable[[], None] | None
    error: BaseException | None = None
    #: the one that began it
    thread: int | None = None


class EngineQueue:
    """Queue of this process's collectives in MXNet's engine."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        #: by number; each leaves when MXNet forgets it, and so also if MXNet never runs it
        self._operations: dict[int, _Operation] = {}
        self._forgotten = threading.Condition()
        #: MXNet's calls that are in Python now
        self._calls: dict[object, None] = {}
        self._failures = EngineErrors()
        self._known_threads = KnownThreads()
        self._cpp = ctypes.CDLL("libstdc++.so.6")
        self._push = ctypes.CDLL(_LIB._name).MXEnginePushAsyncND  # of our own: other code may declare it otherwise
        self._push.argtypes = [
            *(_ASYNC_FUNCTION, _POINTER, _DELETER, _POINTER, _POINTER, ctypes.c_int, _POINTER, ctypes.c_int, _POINTER),
            *(ctypes.c_int, ctypes.c_char_p, ctypes.c_bool),
        ]
        # MXNet keeps these for as long as the process lives
        self._begin_function = _ASYNC_FUNCTION(self._begin)
        self._forget_function = _DELETER(self._forget)
        self._host = _CContext(1, 0)

    def push(
        self,
        begin: Callable[[], AsyncOperation],
        reads: Sequence[Any],
        writes: Sequence[Any],
        priority: int,
        name: str,
        forgotten: Callable[[], None] | None = None,
    ) -> None:
        """Put a collective into MXNet's engine; does not wait.

        Args:
            begin: submits it. Called when the arrays are ready, on a thread of MXNet's; never if one of them could not
                be written. It has to keep the arrays alive.
            reads: NDArrays in host memory, which it reads only.
            writes: those that it writes.
            priority: the largest is begun first, among those that are ready.
            name: for MXNet's profiler.
            forgotten: called once, when it is over, or will never be begun.

        Raises:
            ReigenError, MXNetError: only where MXNet's engine runs everything at once (MXNET_ENGINE_TYPE=NaiveEngine).
        """
        written = _distinct(writes)
        mutable = _handles(written.values())
        const = _handles(array for chunk, array in _distinct(reads).items() if chunk not in written)
        number = next(self._numbers)
        operation = self._operations[number] = _Operation(begin, forgotten)
        try:
            status = self._push(
                self._begin_function,
                number,
                self._forget_function,
                ctypes.byref(self._host),
                const,
                len(const),
                mutable,
                len(mutable),
                ctypes.byref(_PRIORITIZED),
                priority,
                name.encode(),
                False,
            )
            check_call(status)
        except BaseException:
            self._forget_operation(number)
            raise
        if operation.thread == threading.get_ident() and operation.error is not None:
            error = operation.error
            raise to_mxnet_error(error) if isinstance(error, ReigenError) else error

    def drain(self) -> None:
        """Wait for the end of everything that was pushed: it is complete, or has failed, in Reigen's deadline."""
        if self._operations and context.is_initialized():
            latest = time.monotonic() + context.current().config.deadline_seconds + _GRACE_SECONDS
            with self._forgotten:
                while self._operations and (remaining := latest - time.monotonic()) > 0:
                    self._forgotten.wait(remaining)
        self.wait_for_engine_threads()

    def wait_for_engine_threads(self) -> None:
        """Return when no thread of MXNet's is in Python.

        After the end of the operations, and before the interpreter is stopped for such a thread: by its end, or a fork.
        """
        wait_until_left(self._calls)

    def prepare_fork(self) -> None:
        """Wait until all pushed operations are over.

        MXNet stops its engine for a fork (of gluon's DataLoader, for one) and joins its threads, with the interpreter's
        lock in the hands of the thread that forks.
        """
        with self._forgotten:
            self._forgotten.wait_for(lambda: not self._operations)
        self.wait_for_engine_threads()

    # -- on threads of MXNet's engine ---------------------------------------------------------------------------------

    # Each call notes that it is in Python. To take that back is the last that it does: see `wait_until_left`.

    def _begin(self, run_context: int, on_complete: int, number: int) -> None:
        call = object()
        self._calls[call] = None
        self._begin_operation(on_complete, number)
        del self._calls[call]

    def _forget(self, number: int) -> None:
        call = object()
        self._calls[call] = None
        self._forget_operation(number)
        del self._calls[call]

    def _begin_operation(self, on_complete: int, number: int) -> None:
        operation = self._operations[number]
        callback, engine, parameter = (_POINTER * 3).from_address(on_complete)  # copied: it lives for this call
        assert callback is not None
        end = functools.partial(_ON_COMPLETE(callback), engine, parameter)
        operation.thread = threading.get_ident()
        self._known_threads.stay()
        try:
            pending = operation.begin()
            if isinstance(pending, Handle):
                pending.is_in_program = True  # the script goes on without its result
            pending.add_done_callback(lambda: self._end(operation, pending, end))
        except BaseException as error:  # noqa: BLE001  raised where the arrays are waited for
            self._fail(operation, error, end)

    def _forget_operation(self, number: int) -> None:
        with self._forgotten:
            operation = self._operations.pop(number, None)
            self._forgotten.notify_all()
        if operation is not None and operation.forgotten is not None:
            operation.forgotten()

    # -- on the thread of Reigen that completes the collective ---------------------------------------------------------

    def _end(self, operation: _Operation, pending: AsyncOperation, end: Callable[[Any], None]) -> None:
        try:
            pending.wait()
        except BaseException as error:  # noqa: BLE001  raised where the arrays are waited for
            self._fail(operation, error, end)
        else:
            end(None)

    def _fail(self, operation: _Operation, error: BaseException, end: Callable[[Any], None]) -> None:
        operation.error = error
        what = (ctypes.c_char * _ERROR_BYTES)()
        self._cpp._ZNSt13runtime_errorC1EPKc(what, self._failures.text_of(error).encode())  # std::runtime_error()
        end(ctypes.addressof(what))
        self._cpp._ZNSt13runtime_errorD1Ev(what)  # and its end; MXNet has made a copy


@functools.cache
def get_engine_queue() -> EngineQueue:
    """Return this process's queue."""
    made = EngineQueue()
    pid = os.getpid()

    def at_exit() -> None:
        # A script that ends without waiting for its last step has done its part all the same: other ranks may wait for
        # it. One that was ended by an exception has not.
        if os.getpid() == pid and not hasattr(sys, "last_type"):
            made.drain()

    atexit.register(at_exit)
    os.register_at_fork(before=made.prepare_fork)
    return made


def _handles(arrays: Any) -> ctypes.Array[ctypes.c_void_p]:
    handles = [array.handle for array in arrays]
    return (_POINTER * len(handles))(*handles)


def _distinct(arrays: Sequence[Any]) -> dict[int | None, Any]:
    """Return one of all arrays that are slices of the same: by their `Chunk`, the first field of an NDArray."""
    return {_POINTER.from_address(array.handle.value).value: array for array in arrays}


def shutdown() -> None:
    """Leave the job, when everything in MXNet's engine is complete. ``init()`` may be called again."""
    change_job(context.shutdown)


def change_job(change: Callable[[], None]) -> None:
    """Leave the job by ``change``, which may enter another, as `shutdown` does."""
    get_engine_queue().drain()
    change()


@contextlib.contextmanager
def written_again() -> Iterator[None]:
    """Have arrays that could not be written because a collective failed writable again, before its error leaves.

    MXNet keeps the failure with each array that was to be computed from the result, and writes none of them any more
    until it has been raised; waiting for all of them has it forget all failures.
    """
    try:
        yield
    except CollectiveError:
        get_engine_queue().drain()
        with contextlib.suppress(MXNetError):
            mx.nd.waitall()
        raise
