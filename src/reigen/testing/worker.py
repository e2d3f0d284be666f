"""Rank of a :class:`reigen.testing.RankPool`: a process that performs one task after another."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType

from reigen.testing.leaks import LeakCheck
from reigen.testing.rank_tasks import RankReply, RankTask, dump, load, load_call

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class _Baseline:
    """State that a task may change and the next one must not see."""

    environment: dict[str, str]
    directory: str
    module_path: list[str]

    @classmethod
    def now(cls) -> _Baseline:
        return cls(dict(os.environ), os.getcwd(), list(sys.path))  # noqa: PTH109  chdir takes the string back

    def restore(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.directory)
        sys.path[:] = self.module_path


def main(descriptor: int, parent: int) -> None:
    """Perform tasks from the inherited end of the socket pair until the test, process ``parent``, closes its end.

    When that ends, however it ends, so does this process.
    """
    _die_with(parent)
    os.set_inheritable(descriptor, False)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    baseline = _Baseline.now()
    with Connection(descriptor) as connection:
        while True:
            try:
                task = load(connection.recv_bytes())
            except EOFError:
                return
            reply = _perform(task)
            baseline.restore()
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send_bytes(dump(reply))


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the request above
        os._exit(1)


def _perform(task: RankTask) -> RankReply:
    sys.path[:] = task.module_path
    os.environ.update(task.environment)
    try:
        func, args = load_call(task.call)
        with LeakCheck() if task.check_leaks else contextlib.nullcontext(), _job(task.init):
            result = func(*args)
        return RankReply(dump(result))
    except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt are for the test to judge, too
        return RankReply(None, _dump_error(error), traceback.format_exc())


@contextlib.contextmanager
def _job(init: bool) -> Iterator[None]:
    """Wraps a call in init and shutdown if asked to; leaves no job behind in either case."""
    if init:
        _context().init()
    try:
        yield
    finally:
        if "reigen.context" in sys.modules and _context().is_initialized():
            _context().shutdown()


def _context() -> ModuleType:
    """Imported when needed: many tasks test lower rooms, and starting a rank should be cheap."""
    from reigen import context

    return context


def _dump_error(error: BaseException) -> bytes | None:
    try:
        return dump(error)
    except Exception:  # noqa: BLE001  anything can go wrong in somebody's __reduce__; the traceback tells enough
        return None
