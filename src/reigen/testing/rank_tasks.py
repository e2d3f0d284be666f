"""Tasks and replies between a test process and its ranks.

They pass a socket pair that the rank inherits from the test: it has no name and no other process can reach it, so
functions and results travel pickled. Nothing in Reigen proper does that.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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


def dump(thing: object) -> bytes:
    """Pickle, by value where cloudpickle is installed and it is a lambda, a closure or from ``__main__``."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(thing)
    data: bytes = cloudpickle.dumps(thing)
    return data


def load(data: bytes) -> Any:
    """Unpickle the bytes of :func:`dump`, from a private pipe only."""
    return pickle.loads(data)


def load_call(data: bytes) -> tuple[Callable[..., object], tuple[object, ...]]:
    """Unpickle the function and the arguments of a task."""
    func, args = load(data)
    return func, args
