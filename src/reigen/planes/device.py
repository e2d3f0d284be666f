"""What a device plane is: the thing that moves and reduces tensors where they lie, in the memory of a GPU.

It stands beside the data plane of the same ranks (`reigen.planes.base`), which carries what lies in host memory. The
engine chooses by the operation: the kind of device is part of what the ranks agree on.

Nobody waits for a device. Work is ordered by *streams*, queues of the device, and *events*, marks in them:

a. Whoever lends memory records an event behind what he has enqueued for it (`DeviceArray.ready`).
b. The plane lets its own stream, the device's side stream, wait for that event, enqueues the collective there and
   records an event behind it. With this the operation counts as done for the engine: its handle completes.
c. Whoever takes the result lets his stream wait for that second event.

So in a training step the processor only enqueues. What is enqueued may still fail, or never end because a rank died.
Therefore the engine asks the plane from time to time how it does (`look`), as long as something is *flying*: enqueued,
and not known to have ended. An error breaks the job as one in the middle of any collective does: the communicators are
aborted, which ends what is flying with garbage as its result, and every later operation raises the error. So results
that were taken shortly before may be garbage: whoever keeps something for good (a checkpoint, say) has to synchronize
with the device, and then to see another operation succeed.

Frameworks stay in their rooms: a plane sees streams, events and memory through the protocols below, and hands numbers
(pointers, stream handles) to its library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from numpy.typing import NDArray

from reigen.errors import CollectiveError
from reigen.kernels.reduce import Reduction
from reigen.planes.base import DataPlane
from reigen.types import DType, ReduceOp


class Event(Protocol):
    """A mark in a stream."""

    def passed(self) -> bool:
        """Whether the device has come to it. Never waits.

        Raises:
            RuntimeError: the device has failed.
        """
        ...


class Stream(Protocol):
    """A queue of a device. ``handle`` is the CUDA runtime's, as a number."""

    @property
    def handle(self) -> int:
        """The ``cudaStream_t``."""
        ...

    def record(self) -> Event:
        """A mark behind everything that has been enqueued so far."""
        ...

    def wait(self, event: Event) -> None:
        """What is enqueued from now on begins when ``event`` has passed."""
        ...


class Device(Protocol):
    """A device, as the room of its framework shows it. One object for each device of a process.

    Attributes:
        kind: ``cuda``.
        name: ``cuda:0``: the process's own name for it.
        identity: the same for two processes if, and only if, they use the same device of one machine.
    """

    kind: str
    name: str
    identity: str

    @property
    def side(self) -> Stream:
        """The stream for collectives; always the same."""
        ...

    def current(self) -> Stream:
        """The stream into which the calling thread enqueues its work on this device."""
        ...

    def aside(self) -> AbstractContextManager[object]:
        """Within it, the calling thread is on this device, and enqueues into the side stream."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        """New memory, for what the calling thread enqueues from now on: within `aside`, into the side stream."""
        ...

    def full(self, num_elements: int, dtype: DType, value: float) -> DeviceArray:
        """The same, with every element ``value``."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """C-contiguous memory of a device.

    Attributes:
        device: whose.
        pointer: where it begins.
        shape: its extents.
        dtype: its element type.
        owner: keeps the memory for as long as this object lives.
        ready: before this has passed, the contents are not there, and the memory must not be written; None: whoever
            enqueues into the side stream may use it.
    """

    device: Device
    pointer: int
    shape: tuple[int, ...]
    dtype: DType
    owner: object
    ready: Event | None = None

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def reshape(self, extent: int) -> DeviceArray:
        """The same as a vector. ``extent`` is -1, or the number of elements: what NumPy calls for."""
        assert extent in (-1, self.size)
        return replace(self, shape=(self.size,))


#: What a front end hands to a context: arrays in host memory, or in that of a device.
Memory = NDArray[Any] | DeviceArray


class DevicePlane(Protocol):
    """The operations of a group of ranks on devices, one device for each rank.

    The rules are those of `reigen.planes.base.DataPlane`. Each operation returns, as soon as it is enqueued, an event
    that passes when this rank's outputs are complete and its inputs may be overwritten; it keeps the memory until then.
    Arrays are vectors of one device. For the thread that drives the engine, except `takes`.

    Attributes:
        failure: tells why waiting for the other ranks is in vain, or None; asked while the plane waits for them.
    """

    failure: Callable[[], CollectiveError | None]

    @property
    def used(self) -> bool:
        """Whether there has been an operation, so that the ranks of the group hold connections to each other."""
        ...

    @property
    def flying(self) -> bool:
        """Whether something is enqueued here, or on a plane made by `beside`, that is not known to have ended."""
        ...

    def takes(self, device: Device, dtype: DType, how: tuple[ReduceOp, float, float] | None = None) -> bool:
        """Whether memory of ``device`` need not be staged through the host. All of this rank's is then of that device.

        The same on all ranks that are installed alike; where ranks differ, an operation is refused. Any thread.

        Args:
            device: where the memory is.
            dtype: its element type.
            how: operator, prescale and postscale, where it is to be reduced.

        Raises:
            ArgumentError: this rank has used another device before.
        """
        ...

    def stand_in(self, num_elements: int, dtype: DType, op: ReduceOp) -> DeviceArray:
        """Memory for an allreduce that this rank has joined out of: elements that leave the result as it is.

        Raises:
            CollectiveError: this rank has used no device so far.
        """
        ...

    def allreduce(
        self, buffers: Sequence[tuple[DeviceArray, DeviceArray]], reduction: Reduction, deadline: float
    ) -> Event:
        """Reduce each source into its target (which may be it) over all ranks.

        Raises:
            DeviceError: on every rank, at the first operation: the devices cannot be used together; the job carries on.
        """
        ...

    def reducescatter(
        self, source: DeviceArray, counts: Sequence[int], target: DeviceArray, reduction: Reduction, deadline: float
    ) -> Event:
        """See `DataPlane.reducescatter`, and `allreduce` for what is raised here and below."""
        ...

    def allgather(self, source: DeviceArray, counts: Sequence[int], target: DeviceArray, deadline: float) -> Event:
        """See `DataPlane.allgather`."""
        ...

    def broadcast(self, source: DeviceArray, target: DeviceArray, root: int, deadline: float) -> Event:
        """See `DataPlane.broadcast`; ``source`` is given everywhere, and read on the root."""
        ...

    def alltoall(
        self, source: DeviceArray, counts: Sequence[Sequence[int]], target: DeviceArray, deadline: float
    ) -> Event:
        """See `DataPlane.alltoall`."""
        ...

    def beside(self, host: DataPlane, ranks: Sequence[int]) -> DevicePlane:
        """A device plane for ``ranks``, whose ``host`` was split off from the data plane of this one's."""
        ...

    def look(self) -> CollectiveError | None:
        """How is what is flying? None: well, as far as one can see. Never waits."""
        ...

    def abort(self, error: CollectiveError) -> None:
        """End what is flying, whatever becomes of it. From now on every operation raises ``error``."""
        ...

    def close(self) -> None:
        """Release what the device holds, once nothing is flying here any more, or it is aborted."""
        ...
