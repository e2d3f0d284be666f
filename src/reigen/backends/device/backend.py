"""Backend for devices: collectives of a process group on tensors where they lie.

How it works
------------
a. *Connecting.* At the first operation of a group of ranks, over the backend of the same ranks in host memory
   (`reigen.backends.device.rendezvous`). Until then the backend costs nothing.
b. *Operations.* The side stream waits for the producers' events; then the process group enqueues all tensors of the
   batch; then an event is recorded. No thread waits for the device.
c. *Pending operations* are kept in order, with memory and deadline: one side stream for all backends of a rank, so that
   they end in order. `look` drops those that have ended, and asks for errors.
d. *Errors.* Where a rank dies, its connections break, too, and the library's error may come sooner than the name of the
   dead: so an error of the library's is kept back for a moment (`_NAMING_SECONDS`).
e. *Abort* ends operations that wait for a rank that is gone. `close` lets pending ones end; if something goes wrong, it
   aborts, too.

Differences from the backends in host memory: the library chooses the order of sums, so bits may depend on sizes
and topology (though all ranks hold the same bits); half-precision types are added as they are, with a rounding at each
step; MIN and MAX need not propagate NaN.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from reigen.backends.base import Backend
from reigen.backends.device.base import Device, DeviceArray, DeviceEvent, DeviceGroup, DeviceWork
from reigen.backends.device.rendezvous import connect_devices
from reigen.backends.device.rules import explain_unsupported
from reigen.errors import ArgumentError, CollectiveError, DeadlineError
from reigen.kernels.reduce import neutral_element
from reigen.types import DTYPES, DType, ReduceOp

_log = logging.getLogger(__name__)

#: Seconds that an error of the library's is kept back, until the rank at fault is known.
_NAMING_SECONDS = 5.0
_POLL_SECONDS = 2e-3
#: Seconds for which the library calls a collective complete, and its event has not passed, before its error is asked
#: for. Of one that did not fail the event usually passes sooner; and torch warns when it is asked for the first time.
_LAG_SECONDS = 1.0


@dataclass(slots=True)
class _PendingOperation:
    """Operation that was enqueued, with its collectives and the memory that it needs.

    Attributes:
        completed_since: when one of its collectives was first seen to be complete, well or not.
    """

    backend: DeviceBackend
    ended: DeviceEvent
    deadline: float
    memory: Sequence[DeviceArray]
    works: Sequence[DeviceWork]
    completed_since: float | None = None

    def exception(self, now: float) -> BaseException | None:
        """Return why it has failed, if it has."""
        completed = [work for work in self.works if work.is_completed()]
        if not completed:
            return None
        if self.completed_since is None:
            self.completed_since = now
        if now < self.completed_since + _LAG_SECONDS:
            return None
        return next((error for work in completed if (error := work.exception()) is not None), None)


@dataclass(slots=True)
class _SharedQueue:
    """State that the backends of one rank have in common.

    Attributes:
        device: the only one that this rank uses, once it has used any.
        operations: those that are enqueued, in order.
        logged: whether the devices have been logged.
        failing_since: when the library's error was seen first.
    """

    device: Device | None = None
    operations: deque[_PendingOperation] = field(default_factory=deque)
    logged: bool = False
    failing_since: float | None = None


class DeviceBackend:
    """Operations of a group of ranks on devices, one device for each rank.

    The rules are those of `reigen.backends.base.Backend`. `launch` returns, as soon as an operation is enqueued, an
    event that passes when this rank's outputs are complete and its inputs may be overwritten; it keeps the memory until
    then. For the thread that drives the engine, except `takes`.

    Args:
        host: the backend of the same ranks for host memory.
        ranks: how the job numbers them.

    Attributes:
        failure: returns the reason why the other ranks will never answer, or None.
    """

    def __init__(self, host: Backend, ranks: Sequence[int]) -> None:
        self.failure: Callable[[], CollectiveError | None] = _no_failure
        self._host = host
        self._ranks = tuple(ranks)
        self._shared = _SharedQueue()
        self._group: DeviceGroup | None = None
        self._broken: CollectiveError | None = None

    # -- what can be done ---------------------------------------------------------------------------------------------

    @property
    def used(self) -> bool:
        """True if there has been an operation, so that the ranks of the group hold connections to each other."""
        return self._group is not None

    @property
    def has_pending(self) -> bool:
        """True if an operation is enqueued, here or on a backend of `make_subgroup`, and not known to have ended."""
        return self._broken is None and bool(self._shared.operations)

    def takes(self, device: Device, dtype: DType, reduction: tuple[ReduceOp, float, float] | None = None) -> bool:
        """Return whether memory of ``device`` need not be staged through the host: then it is this rank's only device.

        The same on all ranks that are installed alike; where ranks differ, an operation is refused. Any thread.

        Args:
            device: where the memory is.
            dtype: its element type.
            reduction: operator, prescale and postscale, where it is to be reduced.

        Raises:
            ArgumentError: this rank has used another device before.
        """
        library, reason = device.library()
        if not self._shared.logged:
            self._shared.logged = True
            if self._host.rank == 0:
                what = "are reduced on the GPUs" if library else "are staged through the host"
                _log.info("CUDA tensors %s: %s", what, reason)
        if not library or (reduction is not None and explain_unsupported(dtype, *reduction) is not None):
            return False
        claimed = self._shared.device
        if claimed is None:
            self._shared.device = claimed = device
        if claimed is not device:
            raise ArgumentError(
                f"this tensor is on {device.name}, but this rank has used {claimed.name} before, and a rank uses one "
                "GPU; call torch.cuda.set_device(hvd.local_rank()) after hvd.init() and put everything there"
            )
        return True

    def make_subgroup(self, host: Backend, ranks: Sequence[int]) -> DeviceBackend:
        """Return a device backend for ``ranks``, whose ``host`` was split off from the backend of this one's."""
        backend = DeviceBackend(host, ranks)
        backend.failure, backend._shared = self.failure, self._shared
        return backend

    # -- operations ---------------------------------------------------------------------------------------------------

    def neutral_array(self, num_elements: int, dtype: DType, op: ReduceOp) -> DeviceArray:
        """Return memory for an allreduce that this rank has joined out of: elements that leave the result as it is.

        Raises:
            CollectiveError: this rank has used no device so far.
        """
        device = self._shared.device
        if device is None:
            rank = self._ranks[self._host.rank]
            raise CollectiveError(
                f"rank {rank} has joined before it used a GPU, and cannot take part in the others' operations on GPUs; "
                "let every rank reduce at least one tensor before join(), or set REIGEN_NCCL=0",
                ranks=(rank,),
            )
        with device.aside():
            number = DTYPES["float64"] if dtype.is_floating else dtype
            return device.full(num_elements, dtype, neutral_element(number, op))

    def launch(
        self, memory: Sequence[DeviceArray], work: Callable[[DeviceGroup], Sequence[DeviceWork]], deadline: float
    ) -> DeviceEvent:
        """Enqueue an operation of the group of these ranks, and return the event behind it.

        Args:
            memory: all that it reads and writes.
            work: calls one method of the group.
            deadline: until when it may take on the device.

        Raises:
            DeviceError: on every rank, at the first operation: the devices cannot be used together; the job carries on.
            CollectiveError: it cannot be enqueued, or an earlier one has failed.
        """
        device = memory[0].device
        group, stream = self._connected(device, deadline), device.side
        works: list[DeviceWork] = []
        try:
            self._drop_completed()
            for event in {id(array.ready): array.ready for array in memory}.values():
                if event is not None:
                    stream.wait(event)
            stream.run(lambda: works.extend(work(group)))
            ended = stream.record()
        except RuntimeError as error:
            raise self._named(CollectiveError(f"a collective on {device.name} failed: {error}")) from error
        self._shared.operations.append(_PendingOperation(self, ended, deadline, memory, works))
        return ended

    def _connected(self, device: Device, deadline: float) -> DeviceGroup:
        if self._broken is not None:
            raise self._broken.anew()
        if self._group is None:
            self._group = connect_devices(self._host, self._ranks, device, deadline)
        return self._group

    def _named(self, error: CollectiveError) -> CollectiveError:
        """Return an error with the lost rank, if that is known in a moment, and else the library's own: step d."""
        until = time.monotonic() + _NAMING_SECONDS
        while (lost := self.failure()) is None and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        return lost or error

    # -- how it goes --------------------------------------------------------------------------------------------------

    def look(self) -> CollectiveError | None:
        """Return the error of a pending operation. None: there is none, as far as one can see. Never waits."""
        error = self._find_error()
        if error is None:
            return None
        now = time.monotonic()
        since = self._shared.failing_since = self._shared.failing_since or now
        return self.failure() or (error if now >= since + _NAMING_SECONDS else None)

    def _find_error(self) -> CollectiveError | None:
        operations = self._shared.operations
        name, now = self._shared.device and self._shared.device.name, time.monotonic()
        try:
            self._drop_completed()
            for operation in operations:
                if (error := operation.exception(now)) is not None:
                    return CollectiveError(f"a collective on {name} failed: {error}")
        except RuntimeError as error:
            return CollectiveError(f"{name} has failed: {error}")
        if operations and now >= operations[0].deadline:
            return DeadlineError(
                f"a collective on {name} did not end in time: a rank has not enqueued it, or its GPU is busy with "
                "something that does not end"
            )
        return None

    def _drop_completed(self) -> None:
        operations = self._shared.operations
        while operations and operations[0].ended.passed():
            operations.popleft()

    # -- ends ---------------------------------------------------------------------------------------------------------

    def abort(self, error: CollectiveError) -> None:
        """End pending operations, with any result. From now on every operation raises ``error``."""
        self._broken = self._broken or error
        group, self._group = self._group, None
        if group is not None:
            try:
                group.abort()
            except RuntimeError as failed:  # no rank is left that it could help
                _log.debug("the process group cannot be aborted: %s", failed)

    def close(self) -> None:
        """Release the device's resources, once nothing is pending here any more, or it is aborted."""
        try:
            while self._group is not None and any(one.backend is self for one in self._shared.operations):
                error = self._find_error() or self.failure()
                if error is not None:
                    raise error
                time.sleep(_POLL_SECONDS)
            if self._group is not None:
                self._group.close()
                self._group = None
        except RuntimeError as error:  # CollectiveError is one; so are the framework's
            _log.debug("the process group is aborted: %s", error)
            self.abort(CollectiveError("the process group is closed"))
        finally:
            self.failure = _no_failure


def _no_failure() -> None:
    """Report no failures of other ranks: not yet, or not any more."""
