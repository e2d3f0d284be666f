"""What a caller holds while a collective is under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from reigen.errors import CollectiveError
from reigen.planes.base import Region
from reigen.planes.device import Memory

if TYPE_CHECKING:
    from reigen.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a collective.

    Attributes:
        array: the output, of the output's shape, storage dtype; None for a barrier. On a device it is complete when its
            ``ready`` has passed.
        received_splits: for alltoall, how many rows came from each rank.
        region: for an allocation.
        value: for a join, the last rank that joined; for a new process set, its number.
        members: for a group, one outcome each.
    """

    array: Memory | None = None
    received_splits: tuple[int, ...] = ()
    region: Region | None = None
    value: int = -1
    members: tuple[Outcome, ...] = ()

    @property
    def on_host(self) -> NDArray[Any]:
        """The output of an operation that has one, in host memory."""
        assert isinstance(self.array, np.ndarray)
        return self.array


@dataclass(slots=True)
class Task:
    """The memory of one submission.

    Attributes:
        source: flat input, or None where this rank contributes nothing.
        target: flat output where its size is known beforehand.
        output: the target in its shape.
        make_output: gives an array of a shape where it is not.
        members: of a group, in its order.
    """

    source: Memory | None = None
    target: Memory | None = None
    output: Memory | None = None
    make_output: Callable[[tuple[int, ...]], Memory] | None = None
    members: tuple[Task, ...] = ()

    @property
    def parts(self) -> tuple[Task, ...]:
        """The members of a group; else the task itself."""
        return self.members or (self,)


class Handle:
    """A collective that was submitted. Any thread may poll or wait, any number of times."""

    __slots__ = ("_callbacks", "_engine", "_error", "_outcome", "done", "name", "task")

    def __init__(self, engine: Engine, name: str, task: Task) -> None:
        self._engine = engine
        self.name = name
        self.task = task
        self.done = False
        self._outcome: Outcome | None = None
        self._error: CollectiveError | None = None
        #: called once each; whoever takes one out calls it
        self._callbacks: list[Callable[[], None]] | None = None

    def poll(self) -> bool:
        """True when `wait` would not block."""
        return self.done

    def wait(self) -> Outcome:
        """Wait for the end of the operation.

        Raises:
            MismatchError: the ranks submitted different things under this name; they all get this error.
            DeadlineError: some rank did not submit it in time.
            PeerLostError: a rank died or left.
            CollectiveError: the job was shut down, or a rank gave up.
        """
        if not self.done:
            self._engine.wait_for(self)
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        return self._outcome

    def complete(self, result: Outcome | CollectiveError) -> None:
        """For the engine: the operation is over."""
        if isinstance(result, CollectiveError):
            self._error = result
        else:
            self._outcome = result
        self.done = True
        self._call_back()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when `poll` is True: now, or on the thread that completes the operation.

        It must be short, must not raise, and must not wait for a collective. For the thread that submitted this one.
        """
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(callback)
        if self.done:  # otherwise `complete`, which looks for callbacks after it has set this, finds it
            self._call_back()

    def _call_back(self) -> None:
        callbacks = self._callbacks
        while callbacks:
            try:
                callback = callbacks.pop()
            except IndexError:  # the other thread was faster
                return
            callback()
