"""Handle of a collective that is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from reigen.backends.base import BlockJournal, MemoryRegion
from reigen.backends.device import HostOrDeviceArray
from reigen.errors import CollectiveError


class CollectiveResult(msgspec.Struct, frozen=True, eq=False):
    """The result of a collective.

    Attributes:
        array: the output, of the output's shape, storage dtype; None for a barrier. On a device it is complete when its
            ``ready`` has passed.
        received_splits: for alltoall, how many rows came from each rank.
        region: for an allocation.
        value: for a join, the last rank that joined; for a new process set, its number.
        members: for a group, one outcome each.
        payloads: for an exchange, what each rank of the set said, in their order.
    """

    array: HostOrDeviceArray | None = None
    received_splits: tuple[int, ...] = ()
    region: MemoryRegion | None = None
    value: int = -1
    members: tuple[CollectiveResult, ...] = ()
    payloads: tuple[bytes, ...] = ()

    @property
    def on_host(self) -> NDArray[Any]:
        """The output of an operation that has one, in host memory."""
        assert isinstance(self.array, np.ndarray)
        return self.array


class TensorTableEntry(msgspec.Struct, eq=False):
    """The memory of one submission.

    Attributes:
        source: flat input, or None where this rank contributes nothing.
        target: flat output where its size is known beforehand.
        output: the target in its shape.
        make_output: gives an array of a shape where it is not.
        members: of a group, in its order.
        journal: of a reduction in registered memory; see `reigen.backends.base.ReduceBuffer`.
    """

    source: HostOrDeviceArray | None = None
    target: HostOrDeviceArray | None = None
    output: HostOrDeviceArray | None = None
    make_output: Callable[[tuple[int, ...]], HostOrDeviceArray] | None = None
    members: tuple[TensorTableEntry, ...] = ()
    journal: BlockJournal | None = None

    @property
    def parts(self) -> tuple[TensorTableEntry, ...]:
        """The members of a group; else the task itself."""
        return self.members or (self,)

    @property
    def nbytes(self) -> int:
        """Bytes of the input; of a group, of all of its members."""
        return sum(part.source.nbytes for part in self.parts if part.source is not None)


class HandleWaiter(Protocol):
    """Interface of `reigen.engine.engine.Engine`, which completes handles."""

    def wait_for(self, handle: Handle) -> None:
        """Return when the handle is complete."""
        ...

    def wait_briefly(self, handle: Handle, seconds: float) -> None:
        """Wait so long at most; then complete the handle on a thread of its own."""
        ...


_NO_MEMORY = TensorTableEntry()
Other = TypeVar("Other")
if TYPE_CHECKING:
    from typing_extensions import TypeVar as _TypeVar  # `Handle` alone means Handle[CollectiveResult]

    Result = _TypeVar("Result", default=CollectiveResult)
else:
    Result = TypeVar("Result")


class Handle(msgspec.Struct, Generic[Result], eq=False):
    """A collective that was submitted. Any thread may poll or wait. No two handles are equal.

    Without ``deliver`` the result is the `CollectiveResult`, for each who waits, any number of times.

    Attributes:
        name: the operation's.
        task: its memory.
        done: whether `wait` would not block.
        is_in_program: it is an execution of an operation that a runtime repeats. If a rank does not come in time, the
            job ends: that rank's execution would meet the next one of the others, which has the same name.
    """

    _engine: HandleWaiter
    name: str
    task: TensorTableEntry
    #: makes the result of the outcome, once; None: the outcome is the result
    _deliver: Callable[[CollectiveResult], Any] | None = None
    done: bool = False
    is_in_program: bool = False
    _outcome: CollectiveResult | None = None
    _error: CollectiveError | None = None
    #: called once each, by the thread that takes one out
    _callbacks: list[Callable[[], None]] | None = None

    __repr__ = object.__repr__

    def poll(self) -> bool:
        """True when `wait` would not block."""
        return self.done

    def wait(self) -> Result:
        """Wait for the end of the operation and return its result.

        What `then` has made of it is handed out once: later calls return None, also after a failure.

        Raises:
            MismatchError: the ranks submitted different things under this name; they all get this error.
            DeadlineError: some rank did not submit it in time.
            PeerLostError: a rank died or left.
            CollectiveError: the job was shut down, or a rank gave up.
        """
        deliver = self._deliver
        if deliver is not None:
            if deliver is _handed_out:
                return None  # type: ignore[return-value]  # the first to wait has it
            self._deliver = _handed_out
        if not self.done:
            self._engine.wait_for(self)  # type: ignore[arg-type]
        if self._error is not None:
            raise self._error.anew()
        outcome = self._outcome
        assert outcome is not None
        if deliver is None:
            return outcome  # type: ignore[return-value]
        self._outcome, self.task = None, _NO_MEMORY  # a program that keeps its handles keeps no tensors by them
        return deliver(outcome)  # type: ignore[no-any-return]

    def wait_briefly(self, seconds: float) -> bool:
        """After a blocking submission: wait so long at most, and return `poll`; a thread of Reigen goes on with it."""
        if not self.done:
            self._engine.wait_briefly(self, seconds)  # type: ignore[arg-type]
        return self.done

    def then(self, change: Callable[[Result], Other]) -> Handle[Other]:
        """Return this handle with ``change`` applied to its result when it is waited for; for its submitter."""
        deliver = self._deliver
        assert deliver is not _handed_out, "the result has been taken"
        self._deliver = change if deliver is None else lambda outcome: change(deliver(outcome))  # type: ignore[assignment]
        return self  # type: ignore[return-value]

    def complete(self, result: CollectiveResult | CollectiveError) -> None:
        """For the engine: the operation is over."""
        if isinstance(result, CollectiveError):
            self._error = result
        else:
            self._outcome = result
        self.done = True
        if self._callbacks:
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


def _handed_out(outcome: CollectiveResult) -> None:
    """Mark, in place of what makes a result, one that has been handed out."""
