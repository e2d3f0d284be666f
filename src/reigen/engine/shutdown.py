"""Shutdown of a rank's engine: the wait for operations on devices, the grace for lost ranks, the error of a failure.

An operation on devices is over for the engine when it is enqueued. A rank that left then would take away what its own
device, or those of the others, still need: memory, and connections that carry the rest of its data. So a rank that has
used devices waits before it leaves

a. until nothing is flying here. That ends with the deadline of what is flying at the latest, or with the job;
b. until the others have come as far, if they leave as well: a barrier, which they have no reason to come to if they do
   not. Therefore it is given up after a moment.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Mapping
from typing import Protocol

import msgspec

from reigen.backends.device import DeviceBackend
from reigen.engine.handle import Handle, HandleWaiter, TensorTableEntry
from reigen.engine.messages import UNNAMED, Operation, OperationKind
from reigen.engine.operation_builders import qualify_name
from reigen.engine.process_set import ProcessSetGroup
from reigen.engine.tensor_queue import TensorQueue
from reigen.engine.transport import PeerMonitor
from reigen.errors import ArgumentError, CollectiveError, PeerLostError

#: For the others to come to the end of what they do.
_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.002


class Submitter(HandleWaiter, Protocol):
    """Interface of `reigen.engine.engine.Engine`, which takes operations."""

    device: DeviceBackend | None

    @property
    def is_operational(self) -> bool:
        """Return whether operations can still be completed."""
        ...

    def submit(self, operation: Operation, handle: Handle, blocking: bool) -> None:
        """Begin an operation."""
        ...


def wait_for_devices(engine: Submitter, process_set_groups: Mapping[int, ProcessSetGroup]) -> None:
    """Wait until no device needs this rank any more: steps a and b above, on the closing thread. Raises nothing.

    Args:
        engine: works, and has a thread of its own.
        process_set_groups: the process sets by number.
    """
    used = [
        number
        for number, process_set_group in process_set_groups.items()
        if process_set_group.device is not None and process_set_group.device.used
    ]
    if not used or engine.device is None:
        return
    while engine.is_operational and engine.device.has_pending:
        time.sleep(_POLL_SECONDS)
    handles = []
    for number in [0] if 0 in used else used:
        name = qualify_name(f"barrier{UNNAMED}farewell", number)
        handle = Handle(engine, name, TensorTableEntry())
        try:
            engine.submit(Operation(OperationKind.BARRIER, name, process_set=number), handle, blocking=False)
        except (CollectiveError, ArgumentError):
            return  # the job is over, or this rank has joined and waits for its end
        handles.append(handle)
    until = time.monotonic() + _GRACE_SECONDS
    while engine.is_operational and time.monotonic() < until and not all(handle.done for handle in handles):
        time.sleep(_POLL_SECONDS)


class PeerExitGrace:
    """Give ranks that are lost a moment to end before the first error is raised here.

    Args:
        watch: knows whether they have.
        outstanding: operations of this rank. When they are closed, it leaves itself, and waits no more.
    """

    def __init__(self, watch: PeerMonitor, outstanding: TensorQueue) -> None:
        self._watch, self._outstanding = watch, outstanding
        self._lock, self._is_over = threading.Lock(), False

    def end(self) -> None:
        """Wait no more, in no thread: this rank knows that it cannot go on, whatever others come to."""
        self._is_over = True

    def give(self, error: PeerLostError) -> None:
        """Prepare for an error that is about to be raised. Any thread."""
        with self._lock:
            if not self._is_over:
                self._watch.linger(error.ranks, lambda: self._is_over or self._outstanding.closed)
                self._is_over = True

    def give_if_outstanding(self, error: CollectiveError) -> None:
        """Prepare for an error that is about to be raised in the thread that waits for an operation, if one does."""
        if isinstance(error, PeerLostError) and self._outstanding.handles:
            self.give(error)


def clear_frames(error: BaseException) -> None:
    """Clear the frames of an error that ends here: they hold it, the engine, and with it the memory of backends.

    Where it is no error of Reigen's, its origin matters: its traceback stays, without variables.
    """
    traceback.clear_frames(error.__traceback__)
    cause = error.__cause__ if isinstance(error, CollectiveError) else None
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__


def interruption_error(error: BaseException, rank: int) -> CollectiveError:
    """Report to all ranks that one has failed in the middle of an operation."""
    clear_frames(error)
    if isinstance(error, CollectiveError):
        return error.anew()  # without the frames, which hold the engine that will keep it
    what = "an unreadable control message" if isinstance(error, msgspec.DecodeError) else repr(error)
    known = CollectiveError(f"rank {rank} was interrupted: {what}", ranks=(rank,))
    known.__cause__ = error
    return known
