"""The device plane of NVIDIA GPUs: collectives of NCCL on tensors where they lie.

How it works
------------
a. *Bootstrap.* At the first operation of a group of ranks, over the data plane of the same ranks in host memory (which
   is authenticated, has deadlines and knows the dead): everybody tells which GPU of which host it uses and which NCCL
   it has (`nccl_rules.Fact`); if they do not go together, all ranks get the same `DeviceError` and the job carries on.
   Then the group's first rank asks NCCL for a unique id and broadcasts it.
b. *Non-blocking communicators* (``ncclCommInitRankConfig``, ``blocking=0``). No call of NCCL waits for another rank:
   it returns "in progress", and this plane polls ``ncclCommGetAsyncError``, looks ten times a second whether a rank was
   lost (`failure`), and ends with an error at the deadline. The first operations may take seconds here, since NCCL
   connects the ranks when it needs to; after that it is a matter of microseconds until the operation is enqueued.
c. *Operations.* The side stream waits for the producers' events; then one NCCL group
   (``ncclGroupStart`` .. ``ncclGroupEnd``) enqueues all tensors of the batch; then an event is recorded. Nobody waits
   for the GPU. Sums are scaled by a pre-multiplying operator, inside NCCL's kernel.
d. *What is flying* is kept in order, with its memory and deadline: one side stream for all planes of a rank, so what
   was enqueued first ends first. `look` drops what has ended, and asks NCCL for asynchronous errors.
e. *Abort.* ``ncclCommAbort`` ends the kernels that wait for a rank that is gone. `close` lets what is flying end and
   finalizes; if something goes wrong or finalizing takes too long, it aborts, too.

What is different from the planes in host memory: NCCL chooses the order of sums, so bits may depend on sizes and
topology (though all ranks hold the same bits); half-precision types are added as they are, with a rounding at each
step; MIN and MAX need not propagate NaN.

Written against the documented interface of NCCL 2.14 and later; not run on a GPU yet. Tested with a stand-in that
executes on host memory (tests/devices).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from reigen.errors import ArgumentError, CollectiveError, DeadlineError
from reigen.kernels.reduce import Reduction, neutral_of
from reigen.planes import nccl_library
from reigen.planes.base import DataPlane
from reigen.planes.device import Device, DeviceArray, Event
from reigen.planes.nccl_bootstrap import introduce, share_id
from reigen.planes.nccl_library import IN_PROGRESS, Communicator, Nccl
from reigen.planes.nccl_rules import BYTE, Recipe, recipe, refusal
from reigen.types import DTYPES, DType, ReduceOp

_log = logging.getLogger(__name__)

#: How often the other ranks are looked at while NCCL waits for them.
_SLICE_SECONDS = 0.1
#: How long close() waits for NCCL.
_GRACE_SECONDS = 2.0
#: Polls without a pause; then pauses, each twice as long as the one before, up to the longest.
_EAGER_POLLS = 100
_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 2e-3
#: Names and arguments of NCCL's functions, up to the communicator and the stream, which come last in all of them.
_Calls = Iterator[tuple[Any, ...]]
#: Where in such a tuple the number of elements stands. Calls without elements are left out, by all ranks alike.
_COUNT_OF = {"ncclSend": 2, "ncclRecv": 2} | dict.fromkeys(
    ("ncclAllReduce", "ncclReduce", "ncclReduceScatter", "ncclBroadcast", "ncclAllGather"), 3
)


@dataclass(slots=True)
class _Flight:
    """Something that was enqueued."""

    plane: NcclPlane
    ended: Event
    deadline: float
    memory: Sequence[DeviceArray]


@dataclass(slots=True)
class _Hangar:
    """What the planes of one rank have in common.

    Attributes:
        device: the only one that this rank uses, once it has used any.
        flights: what is enqueued, in order.
        told: whether it has been said what there is.
    """

    device: Device | None = None
    flights: deque[_Flight] = field(default_factory=deque)
    told: bool = False


class NcclPlane:
    """`reigen.planes.device.DevicePlane` by NCCL. Costs nothing until its first operation.

    Args:
        host: the data plane of the same ranks for host memory.
        ranks: how the job numbers them.
        load: finds NCCL; called when it is needed.
    """

    name = "nccl"

    def __init__(
        self, host: DataPlane, ranks: Sequence[int], load: Callable[[], tuple[Nccl | None, str]] = nccl_library.load
    ) -> None:
        self.failure: Callable[[], CollectiveError | None] = lambda: None
        self._host = host
        self._ranks = tuple(ranks)
        self._load = load
        self._hangar = _Hangar()
        self._nccl: Nccl | None = None
        self._comm: Communicator | None = None
        self._broken: CollectiveError | None = None

    # -- what can be done ---------------------------------------------------------------------------------------------

    @property
    def used(self) -> bool:
        """See `DevicePlane.used`."""
        return self._comm is not None

    @property
    def flying(self) -> bool:
        """See `DevicePlane.flying`."""
        return self._broken is None and bool(self._hangar.flights)

    def takes(self, device: Device, dtype: DType, how: tuple[ReduceOp, float, float] | None = None) -> bool:
        """See `DevicePlane.takes`."""
        nccl, source = self._load()
        if not self._hangar.told:
            self._hangar.told = True
            if self._host.rank == 0:
                what = "are staged through the host" if nccl is None else "are reduced on the GPUs"
                _log.info("CUDA tensors %s: %s", what, source)
        if nccl is None or (how is not None and refusal(dtype, *how) is not None):
            return False
        claimed = self._hangar.device
        if claimed is None:
            self._hangar.device = claimed = device
        if claimed is not device:
            raise ArgumentError(
                f"this tensor is on {device.name}, but this rank has used {claimed.name} before, and a rank uses one "
                "GPU; call torch.cuda.set_device(hvd.local_rank()) after hvd.init() and put everything there"
            )
        return True

    def beside(self, host: DataPlane, ranks: Sequence[int]) -> NcclPlane:
        """See `DevicePlane.beside`."""
        plane = NcclPlane(host, ranks, self._load)
        plane.failure, plane._hangar = self.failure, self._hangar
        return plane

    # -- operations ---------------------------------------------------------------------------------------------------

    def stand_in(self, num_elements: int, dtype: DType, op: ReduceOp) -> DeviceArray:
        """See `DevicePlane.stand_in`."""
        device = self._hangar.device
        if device is None:
            rank = self._ranks[self._host.rank]
            raise CollectiveError(
                f"rank {rank} has joined before it used a GPU, and cannot take part in the others' operations on GPUs; "
                "let every rank reduce at least one tensor before join(), or set REIGEN_NCCL=0",
                ranks=(rank,),
            )
        with device.aside():
            number = DTYPES["float64"] if dtype.is_floating else dtype
            return device.full(num_elements, dtype, neutral_of(number, op))

    def allreduce(
        self, buffers: Sequence[tuple[DeviceArray, DeviceArray]], reduction: Reduction, deadline: float
    ) -> Event:
        """See `DevicePlane.allreduce`. All of them are one NCCL group."""
        how = recipe(reduction, self._host.size)

        def calls(op: int) -> _Calls:
            for source, target in buffers:
                yield "ncclAllReduce", source.pointer, target.pointer, source.size, how.datatype, op

        return self._launch([array for pair in buffers for array in pair], calls, deadline, how)

    def reducescatter(
        self, source: DeviceArray, counts: Sequence[int], target: DeviceArray, reduction: Reduction, deadline: float
    ) -> Event:
        """See `DevicePlane.reducescatter`. Where the ranks get different amounts, a reduce for each of them."""
        how = recipe(reduction, self._host.size)

        def calls(op: int) -> _Calls:
            if len(set(counts)) == 1:
                yield "ncclReduceScatter", source.pointer, target.pointer, counts[0], how.datatype, op
                return
            for root, (begin, count) in enumerate(_parts(counts, source.dtype)):
                into = target.pointer if root == self._host.rank else 0
                yield "ncclReduce", source.pointer + begin, into, count, how.datatype, op, root

        return self._launch([source, target], calls, deadline, how)

    def allgather(self, source: DeviceArray, counts: Sequence[int], target: DeviceArray, deadline: float) -> Event:
        """See `DevicePlane.allgather`. Where the ranks have different amounts, a broadcast from each of them."""
        width = source.dtype.itemsize

        def calls(_: int) -> _Calls:
            if len(set(counts)) == 1:
                yield "ncclAllGather", source.pointer, target.pointer, counts[0] * width, BYTE
                return
            for root, (begin, count) in enumerate(_parts(counts, source.dtype)):
                yield "ncclBroadcast", source.pointer, target.pointer + begin, count * width, BYTE, root

        return self._launch([source, target], calls, deadline)

    def broadcast(self, source: DeviceArray, target: DeviceArray, root: int, deadline: float) -> Event:
        """See `DevicePlane.broadcast`."""
        nbytes = target.size * target.dtype.itemsize

        def calls(_: int) -> _Calls:
            yield "ncclBroadcast", source.pointer, target.pointer, nbytes, BYTE, root

        return self._launch([source, target], calls, deadline)

    def alltoall(
        self, source: DeviceArray, counts: Sequence[Sequence[int]], target: DeviceArray, deadline: float
    ) -> Event:
        """See `DevicePlane.alltoall`. A send to, and a receive from, every rank."""
        rank, width = self._host.rank, source.dtype.itemsize

        def calls(_: int) -> _Calls:
            for peer, (begin, count) in enumerate(_parts(counts[rank], source.dtype)):
                yield "ncclSend", source.pointer + begin, count * width, BYTE, peer
            for peer, (begin, count) in enumerate(_parts([row[rank] for row in counts], source.dtype)):
                yield "ncclRecv", target.pointer + begin, count * width, BYTE, peer

        return self._launch([source, target], calls, deadline)

    def _launch(
        self,
        memory: Sequence[DeviceArray],
        calls: Callable[[int], _Calls],
        deadline: float,
        how: Recipe | None = None,
    ) -> Event:
        """Enqueue one NCCL group of ``calls(operator)`` behind what makes the memory ready; the event behind it."""
        device = memory[0].device
        with device.aside():
            nccl, comm = self._connected(device, deadline)
            self._land()
            stream = device.side
            for event in {id(array.ready): array.ready for array in memory}.values():
                if event is not None:
                    stream.wait(event)
            op = 0 if how is None else how.op
            if how is not None and how.factor:
                op = nccl.premul_sum(how.factor, how.datatype, comm)
            self._group(nccl, comm, [call for call in calls(op) if call[_COUNT_OF[call[0]]]], stream.handle)
            self._settle(nccl, comm, deadline, "enqueue the operation")
            if how is not None and how.factor:
                nccl.check(nccl.functions.ncclRedOpDestroy(op, comm.handle), "ncclRedOpDestroy", comm)
            ended = stream.record()
        self._hangar.flights.append(_Flight(self, ended, deadline, memory))
        return ended

    @staticmethod
    def _group(nccl: Nccl, comm: Communicator, calls: Sequence[tuple[Any, ...]], stream: int) -> None:
        nccl.check(nccl.functions.ncclGroupStart(), "ncclGroupStart", comm)
        try:
            for name, *arguments in calls:
                nccl.check(getattr(nccl.functions, name)(*arguments, comm.handle, stream), name, comm)
        finally:
            result = nccl.functions.ncclGroupEnd()
        nccl.check(result, "ncclGroupEnd", comm)

    # -- bootstrap ----------------------------------------------------------------------------------------------------

    def _connected(self, device: Device, deadline: float) -> tuple[Nccl, Communicator]:
        """The communicator, made if this is the first operation: steps a and b."""
        if self._broken is not None:
            raise self._broken
        if self._nccl is not None and self._comm is not None:
            return self._nccl, self._comm
        nccl, source = self._load()
        assert nccl is not None, f"whoever lends a device's memory has asked whether there is NCCL: {source}"
        introduce(self._host, self._ranks, device, nccl, deadline)
        unique_id = share_id(self._host, self._ranks, nccl, deadline)
        self._nccl, self._comm = nccl, nccl.begin(self._host.size, unique_id, self._host.rank)
        self._settle(nccl, self._comm, deadline, "make a communicator")
        return self._nccl, self._comm

    def _settle(self, nccl: Nccl, comm: Communicator, deadline: float, what: str) -> None:
        """Wait until NCCL has done what it was asked for last; not for the GPU.

        Raises:
            DeadlineError: it has not by the deadline.
            CollectiveError: it failed, or a rank was lost.
        """
        look_next = time.monotonic() + _SLICE_SECONDS
        pause, polls = _SHORTEST_PAUSE, 0
        while (state := nccl.progress(comm)) == IN_PROGRESS:
            now = time.monotonic()
            if now >= look_next:
                look_next = now + _SLICE_SECONDS
                lost = self.failure()
                if lost is not None:
                    raise lost
            if now >= deadline:
                raise DeadlineError(
                    f"NCCL did not {what} in time on rank {self._ranks[self._host.rank]}, with the ranks "
                    f"{list(self._ranks)}; it does not say for whom it waits (NCCL_DEBUG=INFO shows more)"
                )
            polls += 1
            if polls <= _EAGER_POLLS:
                time.sleep(0)
            else:
                time.sleep(pause)
                pause = min(_LONGEST_PAUSE, 2 * pause)
        nccl.check(state, what, comm)

    # -- what is flying -----------------------------------------------------------------------------------------------

    def look(self) -> CollectiveError | None:
        """See `DevicePlane.look`."""
        try:
            self._land()
        except RuntimeError as error:
            return CollectiveError(f"{self._hangar.device and self._hangar.device.name} has failed: {error}")
        for plane in {id(flight.plane): flight.plane for flight in self._hangar.flights}.values():
            error_of = plane._asynchronous_error()
            if error_of is not None:
                return error_of
        flights = self._hangar.flights
        if flights and time.monotonic() >= flights[0].deadline:
            return DeadlineError(
                f"a collective on {flights[0].memory[0].device.name} did not end in time: a rank has not enqueued it, "
                "or its GPU is busy with something that does not end"
            )
        return None

    def _land(self) -> None:
        """Drop what has ended."""
        flights = self._hangar.flights
        while flights and flights[0].ended.passed():
            flights.popleft()

    def _asynchronous_error(self) -> CollectiveError | None:
        if self._nccl is None or self._comm is None:
            return None
        try:
            self._nccl.check(self._nccl.progress(self._comm), "a collective", self._comm)
        except CollectiveError as error:
            return error
        return None

    # -- ends ---------------------------------------------------------------------------------------------------------

    def abort(self, error: CollectiveError) -> None:
        """See `DevicePlane.abort`."""
        self._broken = self._broken or error
        comm, self._comm = self._comm, None
        if self._nccl is not None and comm is not None and comm.handle:
            assert self._hangar.device is not None
            with self._hangar.device.aside():
                self._nccl.functions.ncclCommAbort(comm.handle)  # there is nobody left whom a failure could help

    def close(self) -> None:
        """See `DevicePlane.close`."""
        nccl, comm, device = self._nccl, self._comm, self._hangar.device
        if nccl is None or comm is None or device is None:
            return
        try:
            with device.aside():
                while any(flight.plane is self for flight in self._hangar.flights):
                    error = self.look() or self.failure()
                    if error is not None:
                        raise error
                    time.sleep(_LONGEST_PAUSE)
                nccl.check(nccl.functions.ncclCommFinalize(comm.handle), "ncclCommFinalize", comm)
                self._settle(nccl, comm, time.monotonic() + _GRACE_SECONDS, "finalize")
                nccl.check(nccl.functions.ncclCommDestroy(comm.handle), "ncclCommDestroy", comm)
                self._comm = None
        except RuntimeError as error:  # CollectiveError is one; so are the framework's
            _log.debug("the communicator is aborted: %s", error)
            self.abort(CollectiveError("the communicator is closed"))


def _parts(counts: Sequence[int], dtype: DType) -> list[tuple[int, int]]:
    """``(bytes before it, elements)`` of each part."""
    begins = itertools.accumulate(counts, initial=0)
    return [(begin * dtype.itemsize, count) for begin, count in zip(begins, counts, strict=False)]
