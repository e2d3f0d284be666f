"""Interface between the device backend and the framework whose tensors lie in a device's memory.

`reigen.backends.device.DeviceBackend` stands beside the backend of the same ranks (`reigen.backends.base`), which
carries what lies in host memory. The engine chooses by the operation: the kind of device is part of what the ranks
agree on. A `Device` comes with the tensor that lies on it and brings the library that connects such devices, so that
nothing here, and nothing above, has to know a framework or a library.

No thread waits for a device. Work is ordered by *streams*, queues of the device, and *events*, marks in them:

a. A thread that lends memory records an event behind its own work on it (`DeviceArray.ready`).
b. The backend lets its own stream, the device's side stream, wait for that event, enqueues the collective there and
   records an event behind it. With this the operation counts as done for the engine: its handle completes.
c. A thread that takes the result lets its stream wait for that second event.

So in a training step the processor only enqueues. An enqueued operation may fail, or never end because a rank died.
Therefore the engine asks the backend from time to time how it does (`DeviceBackend.look`), as long as something is
pending: enqueued, and not known to have ended. An error breaks the job as one in the middle of any collective does: the
groups are aborted, which ends pending ones with garbage as their results, and every later operation raises the error.
So results that were taken shortly before may be garbage: a program that keeps some for good (a checkpoint, say) has to
synchronize with the device, and then to see another operation succeed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from numpy.typing import NDArray

from reigen.backends.device.store import ReplicatedStore
from reigen.kernels.reduce import Reduction
from reigen.types import DType


class DeviceEvent(Protocol):
    """Mark in a stream."""

    def passed(self) -> bool:
        """Return whether the device has come to it, without waiting.

        Raises:
            RuntimeError: the device has failed.
        """


class DeviceStream(Protocol):
    """Queue of a device. ``handle`` identifies it among the device's streams."""

    @property
    def handle(self) -> int:
        """The ``cudaStream_t``."""

    def record(self) -> DeviceEvent:
        """Return a mark behind everything that has been enqueued so far."""

    def wait(self, event: DeviceEvent) -> None:
        """Let work that is enqueued from now on begin when ``event`` has passed."""

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue the device's operations of ``work``; tensors that it makes belong to this stream.

        Raises:
            RuntimeError: it cannot be enqueued.
        """


class DeviceWork(Protocol):
    """Collective that was started."""

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not, without waiting."""

    def exception(self) -> BaseException | None:
        """Return why it has failed, if it has."""


class DeviceGroup(Protocol):
    """Devices of some ranks, connected. Called within `DeviceStream.run` of the side stream, but for the ends.

    Every operation returns what it has started, and lets the stream wait for it; nothing, where no rank has elements.
    Arrays are of one device. The rules are those of `reigen.backends.base.Backend`.
    """

    def allreduce(
        self, buffers: Sequence[tuple[DeviceArray, DeviceArray]], reduction: Reduction
    ) -> Sequence[DeviceWork]:
        """Start `Backend.allreduce`."""

    def reduce_scatter(
        self, source: DeviceArray, counts: Sequence[int], target: DeviceArray, reduction: Reduction
    ) -> Sequence[DeviceWork]:
        """Start `Backend.reduce_scatter`."""

    def allgather(self, source: DeviceArray, counts: Sequence[int], target: DeviceArray) -> Sequence[DeviceWork]:
        """Start `Backend.allgather`."""

    def broadcast(self, source: DeviceArray, target: DeviceArray, root: int) -> Sequence[DeviceWork]:
        """Start `Backend.broadcast`; ``source`` is given everywhere, and read on the root."""

    def alltoall(
        self, source: DeviceArray, counts: Sequence[Sequence[int]], target: DeviceArray
    ) -> Sequence[DeviceWork]:
        """Start `Backend.alltoall`."""

    def abort(self) -> None:
        """End pending operations, with any result. The group is not used any more. Any thread."""

    def close(self) -> None:
        """Release the group's resources, once nothing is pending."""


class Device(Protocol):
    """Device, as its framework shows it. One object for each device of a process.

    Attributes:
        kind: ``cuda``.
        name: ``cuda:0``: the process's own name for it.
        identity: the same for two processes if, and only if, they use the same device of one host.
    """

    kind: str
    name: str
    identity: str

    def library(self) -> tuple[str, str]:
        """Return the library that connects devices, with its version, and a reason; "": there is none. Any thread."""

    def connect(self, store: ReplicatedStore, rank: int, size: int) -> DeviceGroup:
        """Connect with the devices of the other ranks, which call this at the same time. On a thread of its own.

        Raises:
            RuntimeError: it failed.
        """

    @property
    def side(self) -> DeviceStream:
        """Stream for collectives; always the same."""

    def current(self) -> DeviceStream:
        """Return the stream into which the calling thread enqueues its work on this device."""

    def aside(self) -> AbstractContextManager[object]:
        """Let the calling thread be on this device, and enqueue into the side stream, within a ``with`` block."""

    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        """Return new memory for the calling thread's next operations: within `aside`, in the side stream."""

    def full(self, num_elements: int, dtype: DType, value: float) -> DeviceArray:
        """Return the same, with every element ``value``."""


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """C-contiguous memory of a device.

    Attributes:
        device: whose.
        shape: its extents.
        dtype: its element type.
        owner: the framework's tensor, of as many elements; keeps the memory for as long as this object lives.
        ready: before this has passed, the contents are not there, and the memory must not be written; None: whoever
            enqueues into the side stream may use it.
    """

    device: Device
    shape: tuple[int, ...]
    dtype: DType
    owner: Any
    ready: DeviceEvent | None = None

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * self.dtype.itemsize

    def reshape(self, extent: int) -> DeviceArray:
        """Return the same as a vector. ``extent`` is -1, or the number of elements: what NumPy calls for."""
        assert extent in (-1, self.size)
        return replace(self, shape=(self.size,))


#: Array of a front end for a context: in host memory, or in that of a device.
HostOrDeviceArray = NDArray[Any] | DeviceArray
