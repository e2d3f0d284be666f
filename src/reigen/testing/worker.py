"""Rank of a :class:`reigen.testing.RankPool`: a process that performs one task after another.

Tasks and replies pass a socket pair that the rank inherits from the test: it has no name and no other process can reach
it, so functions and results travel pickled.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import cloudpickle

from reigen import context
from reigen.runner.serialization import pickle_exception
from reigen.testing.leaks import LeakCheck

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class RankTask:
    """Call of one function in one rank.

    Attributes:
        call: the pickled function and its arguments.
        environment: variables that are set for this call alone.
        module_path: the test's sys.path, so that the rank finds the same modules.
        init: whether the call is wrapped in Reigen's init and shutdown.
        check_leaks: whether the call fails when it leaves threads, descriptors, children or shared memory.
    """

    call: bytes
    environment: dict[str, str]
    module_path: list[str]
    init: bool
    check_leaks: bool


@dataclass(frozen=True)
class RankReply:
    """Result of a task, pickled (None: it failed), or its exception, pickled where possible, and as text."""

    result: bytes | None
    error: bytes | None = None
    traceback: str = ""


def main(descriptor: int, parent: int) -> None:
    """Perform tasks from the inherited end of the socket pair until the test, process ``parent``, closes its end.

    When that ends, however it ends, so does this process.
    """
    _die_with(parent)
    os.set_inheritable(descriptor, False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    environment, directory, module_path = dict(os.environ), os.getcwd(), list(sys.path)  # noqa: PTH109  for chdir
    with Connection(descriptor) as connection:
        while True:
            try:
                task = connection.recv()
            except EOFError:
                return
            reply = _perform(task)
            os.environ.clear()  # the next task must not see what this one has changed
            os.environ.update(environment)
            os.chdir(directory)
            sys.path[:] = module_path
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send(reply)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the request above
        os._exit(1)


def _perform(task: RankTask) -> RankReply:
    sys.path[:] = task.module_path
    os.environ.update(task.environment)
    try:
        func, args = pickle.loads(task.call)
        with LeakCheck() if task.check_leaks else contextlib.nullcontext(), _job(task.init):
            result = func(*args)
        return RankReply(cloudpickle.dumps(result))
    except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt are for the test to judge, too
        return RankReply(None, pickle_exception(error), traceback.format_exc())


@contextlib.contextmanager
def _job(init: bool) -> Iterator[None]:
    """Wraps a call in init and shutdown if asked to; leaves no job behind in either case."""
    if init:
        context.init()
    try:
        yield
    finally:
        if context.is_initialized():
            context.shutdown()
