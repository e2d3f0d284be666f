"""Process groups of torch.distributed under the device backend: NCCL for CUDA tensors.

The groups are made directly, beside the default group of `torch.distributed`, which is the user's own. They find each
other over the job's own connections (`ReplicatedStore`), with no TCPStore and no MASTER_PORT. What holds for each:

a. It makes no decision about time: `reigen.backends.device` has the deadlines and knows of lost ranks, and aborts it.
   torch's watchdog for NCCL, which would end the process, is told to leave errors alone (`_ENVIRONMENT`).
b. ``work.wait()`` lets the *current stream* wait, not the processor (with NCCL; with Gloo, which works on the host, the
   stream is a thread, and waits).
c. Only what all process groups can do is used: SUM, PRODUCT, MIN and MAX of the types in `rules`, equal parts in
   allgather and reduce_scatter, bytes where nothing is reduced. Factors are multiplications before. So the same code
   runs over Gloo on tensors in host memory, as it does in the tests, fault by fault.

Written for NCCL, and run over it on a GPU, and over Gloo.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from reigen.api.horovod_basics import env
from reigen.backends.device import DeviceArray, ReplicatedStore
from reigen.backends.device.rules import DeviceReduction, make_device_reduction
from reigen.kernels.reduce import Reduction

#: Longer than any deadline: torch's own limits are not to be met.
GROUP_TIMEOUT = timedelta(days=365)
#: Read by the constructor of a process group for NCCL: errors are reported and nothing else, `wait` waits on the GPU
#: only, the process is not ended because a thread of torch's is slow, and nothing is written when groups are aborted.
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_environment_lock = threading.Lock()


def connect_nccl(store: ReplicatedStore, rank: int, size: int, device: torch.device) -> C10dGroup:
    """Return a process group for NCCL, its communicator made. See `reigen.backends.device.Device.connect`."""
    nccl: Any = c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = GROUP_TIMEOUT
    shared = SharedStore(store)
    with torch.cuda.device(device):
        with _environment_lock, env(**_ENVIRONMENT):
            group: Any = nccl(shared, rank, size, options)
        group.eager_connect_single_device(device)

    def abort() -> None:
        # The destructor joins torch's watchdog, which may be busy with the error for minutes: it is never called. Nor
        # are those of its stores, which the watchdog may ask.
        for each in (group, shared, *shared.clones):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        group.abort()

    return C10dGroup(group, shared, rank, abort)


class SharedStore(c10d.Store):
    """Store of torch's over one of ours. It must live as long as the process group that uses it."""

    def __init__(self, store: ReplicatedStore) -> None:
        super().__init__()
        self._store = store
        #: stores that torch has made of this one
        self.clones: list[SharedStore] = []

    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all keys have values; how long that may take is the rendezvous's business."""
        for key in keys:
            self._store.get(key)

    def clone(self) -> SharedStore:
        """Return another store with the same contents, which lives as long as this one."""
        self.clones.append(SharedStore(self._store))
        return self.clones[-1]


class C10dGroup:
    """`reigen.backends.device.DeviceGroup` over a process group: a backend of `torch.distributed`, connected.

    It was connected by ``store``, and may ask it as long as it lives; ``abort`` ends what is pending.
    """

    def __init__(self, group: Any, store: SharedStore, rank: int, abort: Callable[[], None]) -> None:
        self._group, self._store, self._rank, self._abort = group, store, rank, abort

    def allreduce(self, buffers: Sequence[tuple[DeviceArray, DeviceArray]], reduction: Reduction) -> list[Any]:
        device_reduction = make_device_reduction(reduction)
        tensors = []
        for source, target in (pair for pair in buffers if pair[0].size):
            tensors.append(_elements(target, device_reduction))
            _fill(tensors[-1], _elements(source, device_reduction), device_reduction.factor)
        if len(tensors) < 2:  # groups of tensors have at least one
            options = _options("Allreduce", reduceOp=device_reduction.op)
            return self._wait(*(self._group.allreduce([tensor], options) for tensor in tensors))
        return self._wait(
            self._group.allreduce_coalesced(tensors, _options("AllreduceCoalesced", reduceOp=device_reduction.op))
        )

    def reduce_scatter(
        self, source: DeviceArray, counts: Sequence[int], target: DeviceArray, reduction: Reduction
    ) -> list[Any]:
        """Reduce and scatter; parts of different sizes are padded to the largest."""
        device_reduction = make_device_reduction(reduction)
        given, result, longest = _elements(source, device_reduction), _elements(target, device_reduction), max(counts)
        options = _options("ReduceScatter", reduceOp=device_reduction.op)
        if not longest:
            return []
        if min(counts) == longest:
            scaled = given if device_reduction.factor == 1.0 else given * device_reduction.factor
            return self._wait(self._group._reduce_scatter_base(result, scaled, options))
        padded = given.new_zeros((len(counts), longest))
        for row, part in zip(padded, torch.split_with_sizes(given, list(counts)), strict=True):
            _fill(row[: part.numel()], part, device_reduction.factor)
        own = torch.empty_like(padded[0])
        works = self._wait(self._group._reduce_scatter_base(own, padded.view(-1), options))
        result.copy_(own[: result.numel()])
        return works

    def allgather(self, source: DeviceArray, counts: Sequence[int], target: DeviceArray) -> list[Any]:
        """Allgather; where the ranks have different amounts, by a broadcast from each of them."""
        given, result = _bytes(source), _bytes(target)
        if not result.numel():
            return []
        if len(set(counts)) == 1:
            return self._wait(self._group._allgather_base(result, given, _options("Allgather")))
        parts = torch.split_with_sizes(result, [count * source.dtype.itemsize for count in counts])
        parts[self._rank].copy_(given)
        return self._wait(*(self._broadcast(part, root) for root, part in enumerate(parts) if part.numel()))

    def broadcast(self, source: DeviceArray, target: DeviceArray, root: int) -> list[Any]:
        result = _bytes(target)
        if not result.numel():
            return []
        if root == self._rank:
            _fill(result, _bytes(source), 1.0)
        return self._wait(self._broadcast(result, root))

    def alltoall(self, source: DeviceArray, counts: Sequence[Sequence[int]], target: DeviceArray) -> list[Any]:
        width, rank = source.dtype.itemsize, self._rank
        if not any(map(any, counts)):
            return []
        sent, received = ([n * width for n in row] for row in (counts[rank], [row[rank] for row in counts]))
        given = _bytes(source)[: sum(sent)]  # there may be rows for no rank at the end
        return self._wait(self._group.alltoall_base(_bytes(target), given, received, sent, _options("AllToAll")))

    def abort(self) -> None:
        self._abort()

    def close(self) -> None:
        self._group.shutdown()

    def _broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        return self._group.broadcast([tensor], _options("Broadcast", rootRank=root, rootTensor=0))

    @staticmethod
    def _wait(*works: Any) -> list[Any]:
        """Let the current stream wait for a started operation, and return it."""
        for work in works:
            work.wait()
        return [C10dWork(work) for work in works]


class C10dWork:
    """`reigen.backends.device.DeviceWork` over a work of `torch.distributed`."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def exception(self) -> BaseException | None:
        """Return why it has failed; without the library's words, which torch cannot hand to Python."""
        try:
            if self._work.exception() is None:
                return None
        except TypeError:  # "Unable to convert": an exception of C++
            pass
        return RuntimeError("the library says no more here; NCCL_DEBUG=WARN makes NCCL say what it was")


def _elements(array: DeviceArray, device_reduction: DeviceReduction) -> torch.Tensor:
    """Return the elements as a vector; its changes do not count as the user's, whose tensor it may be."""
    vector: torch.Tensor = array.owner.data.view(-1)
    if not device_reduction.as_bytes:
        return vector
    # without elements, the stride may be one that does not let it be viewed as bytes
    return vector.view(torch.uint8) if vector.numel() else vector.new_empty(0, dtype=torch.uint8)


def _bytes(array: DeviceArray) -> torch.Tensor:
    return _elements(array, _AS_BYTES)


def _fill(target: torch.Tensor, source: torch.Tensor, factor: float) -> None:
    """Write ``factor * source`` into ``target``, if it is not there yet."""
    if factor != 1.0:
        torch.mul(source, factor, out=target)
    elif target.data_ptr() != source.data_ptr():
        target.copy_(source)


def _options(name: str, **values: Any) -> Any:
    """Return the options of a collective."""
    options = getattr(c10d, f"{name}Options")()
    if "reduceOp" in values:
        values["reduceOp"] = getattr(c10d.ReduceOp, values["reduceOp"])
    for key, value in values.items():
        setattr(options, key, value)
    return options


_AS_BYTES = DeviceReduction("SUM", as_bytes=True)
