"""NumPy's floating-point warnings, off: infinity and NaN are data like any other."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np


class _ThreadDepth(threading.local):
    num_blocks = 0


_DEPTH = _ThreadDepth()


class ignore_float_errors:  # noqa: N801  a context manager, used like those of NumPy
    """Context manager without such warnings in this thread.

    One within another costs next to nothing, while entering ``np.errstate`` takes as long as adding up thousands of
    elements: threads that compute all day are in one from their start.
    """

    __slots__ = ("_errstate",)

    def __enter__(self) -> None:
        self._errstate = None
        if not _DEPTH.num_blocks:
            self._errstate = np.errstate(all="ignore")
            self._errstate.__enter__()
        _DEPTH.num_blocks += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _DEPTH.num_blocks -= 1
        if self._errstate is not None:
            self._errstate.__exit__(kind, error, traceback)


def _run_quietly(function: Callable[..., object], *arguments: Any, **keywords: Any) -> object:
    with ignore_float_errors():
        return function(*arguments, **keywords)


if int(np.__version__.partition(".")[0]) < 2:  # the setting belongs to a thread, not to a context

    def make_quiet_runner() -> Callable[..., object]:
        """Return ``run(function, ...)``, a call without such warnings; not for two threads at once."""
        return _run_quietly

else:
    _QUIET = contextvars.Context()
    _QUIET.run(np.seterr, all="ignore")

    def make_quiet_runner() -> Callable[..., object]:
        """Return ``run(function, ...)``, a call without such warnings; not for two threads at once.

        Unlike the block it costs next to nothing where it is not nested, too: a context that has them off is entered.
        """
        return _QUIET.copy().run
