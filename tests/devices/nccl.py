"""A stand-in for libnccl: the same functions, executing on host memory, for ranks that are threads of one process.

It is as strict as the documentation allows a library to be: a communicator whose last operation is still in progress
refuses the next; a group's kernels reach the stream only after it has been asked for progress a few times; the handle
of a communicator is written when it is ready; operators that were destroyed are refused; ranks that enqueue different
things break the device. Kernels wait for the other ranks until the communicator is aborted, and leave garbage then.
"""

# ruff: noqa: N802 - the functions are called as in C

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.devices.cuda import PATIENCE_SECONDS, Failed, Stream

from reigen.planes.nccl_library import Nccl
from reigen.testing.truth import narrowed, widened
from reigen.types import DTYPES, DType

SUCCESS, SYSTEM_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 0, 2, 4, 5, 6, 7
SUM, PRODUCT, MAX, MIN, AVERAGE, FIRST_MADE = range(6)
TYPES = {0: "int8", 1: "uint8", 2: "int32", 4: "int64", 6: "float16", 7: "float32", 8: "float64", 9: "bfloat16"}
VERSION = 22703


class Fabric:
    """What connects the GPUs: messages by key, each read a certain number of times."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: dict[Hashable, tuple[Any, int]] = {}
        #: which ranks have begun to make the communicator of an id
        self.members: dict[bytes, set[int]] = {}

    def put(self, key: Hashable, value: Any, num_reads: int) -> None:
        with self._changed:
            assert key not in self._messages, f"{key} twice"
            self._messages[key] = (value, num_reads)
            self._changed.notify_all()

    def get(self, key: Hashable, stop: Callable[[], bool]) -> Any:
        """Raises Failed when ``stop`` says so."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._messages or stop(), PATIENCE_SECONDS):
                raise Failed(f"nobody sent {key}")
            if key not in self._messages:
                raise Aborted
            value, left = self._messages.pop(key)
            if left > 1:
                self._messages[key] = (value, left - 1)
            return value

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def joined(self, unique: bytes, rank: int) -> None:
        with self._changed:
            members = self.members.setdefault(unique, set())
            assert rank not in members, f"rank {rank} twice"
            members.add(rank)


class Aborted(Exception):
    """The communicator was aborted while a kernel waited."""


@dataclass
class Call:
    """One function of a group, as it was called."""

    name: str
    source: int
    target: int
    count: int
    datatype: int
    op: int = SUM
    peer: int = -1
    factor: bytes = b""
    number: Hashable = None

    @property
    def dtype(self) -> DType:
        return DTYPES[TYPES[self.datatype]]

    def agreed(self) -> tuple[object, ...]:
        """What must be the same on all ranks."""
        return self.name, self.count, self.datatype, min(self.op, FIRST_MADE), self.factor, self.peer


@dataclass
class Comm:
    """A communicator of one rank."""

    unique: bytes
    size: int
    rank: int
    out: Any
    ready: bool = False
    aborted: bool = False
    failed: int = SUCCESS
    gone: bool = False
    lag: int = 0
    launch: list[tuple[list[Call], Stream]] = field(default_factory=list)
    ops: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    numbers: Counter[Hashable] = field(default_factory=Counter)


class FakeNccl:
    """The functions of libnccl, for one rank or several.

    Args:
        fabric: shared by all ranks.
        lag: how often progress has to be asked for until something is done.
    """

    _handles = itertools.count(0x1000, 0x10)

    def __init__(self, fabric: Fabric, lag: int = 3, version: int = VERSION) -> None:
        self.fabric = fabric
        self.lag = lag
        self.version = version
        #: names of the functions that were called, but for the questions
        self.calls: list[str] = []
        #: function -> result that it gives instead of doing anything
        self.broken: dict[str, int] = {}
        self.comms: dict[int, Comm] = {}
        self._thread = threading.local()
        self._op_numbers = itertools.count(FIRST_MADE)

    def library(self) -> Nccl:
        return Nccl(self, "a stand-in")

    def _called(self, name: str) -> int:
        self.calls.append(name)
        return self.broken.get(name, SUCCESS)

    # -- about the library

    def ncclGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return SUCCESS

    def ncclGetErrorString(self, result: int) -> bytes:
        return {REMOTE_ERROR: b"remote process exited or there was a network error"}.get(result, b"invalid something")

    def ncclGetLastError(self, comm: int | None) -> bytes:
        return b"said the stand-in"

    # -- communicators

    def ncclGetUniqueId(self, unique: Any) -> int:
        unique._obj.internal[:] = os.urandom(128)
        return self._called("ncclGetUniqueId")

    def ncclCommInitRankConfig(self, out: Any, size: int, unique: Any, rank: int, config: Any) -> int:
        assert (config._obj.size, config._obj.magic, config._obj.blocking) == (24, 0xCAFEBEEF, 0)
        result = self._called("ncclCommInitRankConfig")
        if result:
            return result
        handle = next(self._handles)
        out._obj.value = handle
        self.comms[handle] = Comm(bytes(unique), size, rank, out, lag=self.lag)
        self.fabric.joined(bytes(unique), rank)
        return IN_PROGRESS

    def ncclCommGetAsyncError(self, handle: int, state: Any) -> int:
        comm = self.comms[handle]
        assert not comm.gone, "asked for progress after the end"
        state._obj.value = self._progress(comm)
        return SUCCESS

    def _progress(self, comm: Comm) -> int:
        if comm.failed or self.broken.get("asynchronous"):
            return comm.failed or self.broken["asynchronous"]
        if comm.lag:
            comm.lag -= 1
            return IN_PROGRESS
        if not comm.ready:
            if len(self.fabric.members[comm.unique]) < comm.size:
                return IN_PROGRESS
            comm.out._obj.value = comm.out._obj.value  # NCCL writes the handle again: its storage must still be there
            comm.ready = True
        for calls, stream in comm.launch:
            stream.enqueue(lambda calls=calls: self._kernel(comm, calls))  # type: ignore[misc]
        comm.launch.clear()
        return SUCCESS

    def _usable(self, handle: int) -> Comm | None:
        """None: the last operation is still in progress, which NCCL does not like."""
        comm = self.comms[handle]
        assert not comm.gone, "used after the end"
        return None if comm.lag or comm.launch or not comm.ready else comm

    def ncclCommAbort(self, handle: int) -> int:
        comm = self.comms[handle]
        assert not comm.gone
        comm.aborted = comm.gone = True
        self.fabric.wake()
        return self._called("ncclCommAbort")

    def ncclCommFinalize(self, handle: int) -> int:
        comm = self._usable(handle)
        if comm is None:
            return INVALID_ARGUMENT
        assert not comm.ops, "operators are left"
        comm.lag = self.lag
        return self._called("ncclCommFinalize") or IN_PROGRESS

    def ncclCommDestroy(self, handle: int) -> int:
        self.comms[handle].gone = True
        return self._called("ncclCommDestroy")

    # -- operators

    def ncclRedOpCreatePreMulSum(self, op: Any, scalar: int, datatype: int, residence: int, handle: int) -> int:
        comm = self._usable(handle)
        if comm is None:
            return INVALID_ARGUMENT
        assert residence == 1
        op._obj.value = next(self._op_numbers)
        comm.ops[op._obj.value] = (ctypes.string_at(scalar, DTYPES[TYPES[datatype]].itemsize), datatype)
        return self._called("ncclRedOpCreatePreMulSum")

    def ncclRedOpDestroy(self, op: int, handle: int) -> int:
        comm = self._usable(handle)
        if comm is None or comm.ops.pop(op, None) is None:
            return INVALID_ARGUMENT
        return self._called("ncclRedOpDestroy")

    # -- groups

    def ncclGroupStart(self) -> int:
        assert getattr(self._thread, "group", None) is None, "no group within a group"
        self._thread.group = []
        return self._called("ncclGroupStart")

    def ncclGroupEnd(self) -> int:
        group: list[tuple[Comm, Call, Stream]] = self._thread.group
        self._thread.group = None
        for comm in {id(comm): comm for comm, _, _ in group}.values():
            comm.launch.append(([call for _, call, _ in group], group[0][2]))
            comm.lag = self.lag
        return self._called("ncclGroupEnd") or (IN_PROGRESS if group else SUCCESS)

    def _call(self, handle: int, stream: int, call: Call, key: Hashable = "collective") -> int:
        comm = self._usable(handle)
        result = self._called(call.name)
        if comm is None or result:
            return result or INVALID_ARGUMENT
        if call.op >= FIRST_MADE:
            if call.op not in comm.ops:
                return INVALID_ARGUMENT
            call.factor, made_for = comm.ops[call.op]
            if made_for != call.datatype:
                return INVALID_ARGUMENT
        call.number = (comm.unique, key, comm.numbers[key])
        comm.numbers[key] += 1
        self._thread.group.append((comm, call, Stream.by_handle[stream]))
        return SUCCESS

    def ncclAllReduce(
        self, source: int, target: int, count: int, datatype: int, op: int, comm: int, stream: int
    ) -> int:
        return self._call(comm, stream, Call("ncclAllReduce", source, target, count, datatype, op))

    def ncclReduce(
        self, source: int, target: int, count: int, datatype: int, op: int, root: int, comm: int, stream: int
    ) -> int:
        return self._call(comm, stream, Call("ncclReduce", source, target, count, datatype, op, root))

    def ncclReduceScatter(
        self, source: int, target: int, count: int, datatype: int, op: int, comm: int, stream: int
    ) -> int:
        return self._call(comm, stream, Call("ncclReduceScatter", source, target, count, datatype, op))

    def ncclBroadcast(
        self, source: int, target: int, count: int, datatype: int, root: int, comm: int, stream: int
    ) -> int:
        return self._call(comm, stream, Call("ncclBroadcast", source, target, count, datatype, peer=root))

    def ncclAllGather(self, source: int, target: int, count: int, datatype: int, comm: int, stream: int) -> int:
        return self._call(comm, stream, Call("ncclAllGather", source, target, count, datatype))

    def ncclSend(self, source: int, count: int, datatype: int, peer: int, comm: int, stream: int) -> int:
        key = (self.comms[comm].rank, peer)
        return self._call(comm, stream, Call("ncclSend", source, 0, count, datatype, peer=peer), key)

    def ncclRecv(self, target: int, count: int, datatype: int, peer: int, comm: int, stream: int) -> int:
        key = (peer, self.comms[comm].rank, "in")
        return self._call(comm, stream, Call("ncclRecv", 0, target, count, datatype, peer=peer), key)

    # -- what runs on the device

    def _kernel(self, comm: Comm, calls: Sequence[Call]) -> None:
        """A whole group: everything leaves before anything is waited for."""
        if comm.aborted:
            return
        for call in calls:
            self._send(comm, call)
        for call in calls:
            try:
                self._receive(comm, call)
            except Aborted:
                return

    def _send(self, comm: Comm, call: Call) -> None:
        if call.name == "ncclRecv":
            return
        if call.name == "ncclSend":
            self.fabric.put(_message(call), _read(call.source, call.count, call.dtype).copy(), 1)
            return
        if call.name == "ncclBroadcast" and comm.rank != call.peer:
            return
        count = call.count * (comm.size if call.name == "ncclReduceScatter" else 1)
        data = _read(call.source, count, call.dtype).copy()
        self.fabric.put((call.number, comm.rank), (call.agreed(), data), comm.size)

    def _receive(self, comm: Comm, call: Call) -> None:
        if call.name == "ncclSend":
            return
        if call.name == "ncclRecv":
            data = self.fabric.get(_message(call), lambda: comm.aborted)
            assert data.size == call.count, "the sender sends another number of elements"
            _read(call.target, call.count, call.dtype)[:] = data
            return
        senders = [call.peer] if call.name == "ncclBroadcast" else range(comm.size)  # a root waits for nobody
        told = [self.fabric.get((call.number, rank), lambda: comm.aborted) for rank in senders]
        assert {agreed for agreed, _ in told} == {call.agreed()}, f"the ranks call different things: {told}"
        inputs = [data for _, data in told]
        begin, end = 0, call.count
        match call.name:
            case "ncclBroadcast":
                (result,) = inputs
            case "ncclAllGather":
                result, end = np.concatenate(inputs), comm.size * call.count
            case "ncclReduceScatter":
                result = _combined(inputs, call)
                begin, end = comm.rank * call.count, (comm.rank + 1) * call.count
            case _:
                result = _combined(inputs, call)
        if call.name != "ncclReduce" or comm.rank == call.peer:
            _read(call.target, end - begin, call.dtype)[:] = result[begin:end]


def _message(call: Call) -> Hashable:
    """What a send and its receive are called."""
    unique, key, number = call.number  # type: ignore[misc]
    return unique, key[:2], number


def _read(pointer: int, count: int, dtype: DType) -> NDArray[Any]:
    memory = (ctypes.c_ubyte * (count * dtype.itemsize)).from_address(pointer)
    return np.frombuffer(memory, dtype.storage)


def _combined(inputs: Sequence[NDArray[Any]], call: Call) -> NDArray[Any]:
    """As NCCL does it: in the element's own type, with a rounding at each step."""
    dtype = call.dtype
    if not dtype.is_floating:
        step = {SUM: np.add, PRODUCT: np.multiply, MAX: np.maximum, MIN: np.minimum}[call.op]
        total = inputs[0]
        for other in inputs[1:]:
            total = step(total, other)
        return total
    values = [widened(one, dtype) for one in inputs]
    factor = {AVERAGE: np.array(1 / len(inputs))}.get(call.op)
    if call.factor:
        factor = widened(np.frombuffer(call.factor, dtype.storage), dtype)
    if factor is not None:
        values = [widened(narrowed(value * factor, dtype), dtype) for value in values]
    step = {PRODUCT: np.multiply, MAX: np.maximum, MIN: np.minimum}.get(call.op, np.add)
    total = values[0]
    with np.errstate(all="ignore"):
        for other in values[1:]:
            total = widened(narrowed(step(total, other), dtype), dtype)
    return narrowed(total, dtype)
