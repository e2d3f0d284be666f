"""CUDA tensors, lent to the backend for devices: `reigen.backends.device` in torch's words.

Work of the calling thread goes into torch's current stream, that of the backend into one more stream of the device.
Memory that the backend makes comes from torch's allocator while the side stream is current, so it belongs to that
stream, and is marked as used by the stream of whoever receives it. Memory that is lent is kept by the backend until it
has been used. The devices are connected by process groups of torch.distributed (`reigen.torch.process_group`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from reigen.backends.device import Device, DeviceArray, DeviceEvent, DeviceGroup, ReplicatedStore
from reigen.torch.dtypes import dtype_of, torch_dtype
from reigen.types import DType


@functools.cache
def nccl_library() -> tuple[str, str]:
    """Return ``(name and version of NCCL, where it is from)``, or ``("", why process groups with NCCL are no way)``."""
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return "", f"torch {torch.__version__} has no NCCL"
    if not hasattr(torch.distributed.ProcessGroupNCCL, "abort"):
        return "", f"torch {torch.__version__} cannot abort a process group; 2.6 and later can"
    version: Any = torch.cuda.nccl.version
    library = f"NCCL {'.'.join(map(str, version()))}"
    return library, f"{library} of torch {torch.__version__}"


class TorchDevice(Device, Protocol):
    """Device whose memory is torch's: owners of its arrays are tensors."""

    def adopt(self, tensor: torch.Tensor) -> None:
        """Let the calling thread's stream use a tensor that may belong to the side stream."""


class CudaEvent:
    """`reigen.backends.device.DeviceEvent`."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def passed(self) -> bool:
        return bool(self.event.query())


class CudaStream:
    """`reigen.backends.device.DeviceStream`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    @property
    def handle(self) -> int:
        handle: int = self.stream.cuda_stream
        return handle

    def record(self) -> CudaEvent:
        return CudaEvent(self.stream.record_event())

    def wait(self, event: DeviceEvent) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue the device's operations of ``work``. Inference tensors can be written, too."""
        with torch.cuda.stream(self.stream), torch.inference_mode():
            work()


class CudaDevice:
    """`reigen.backends.device.Device`: the GPU ``cuda:index`` of torch. By `cuda_device`, one object for each."""

    kind = "cuda"

    def __init__(self, index: int) -> None:
        self._index = index
        self.name = f"cuda:{index}"
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        #: without an UUID (torch before 2.3): what this process sees, and which of it this is
        self.identity = f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}:{index}" if uuid is None else str(uuid)
        #: by handle; that a stream is current is asked for each gradient, and making torch's object is what takes long
        self._streams: dict[int, CudaStream] = {}
        make_stream: Any = torch.cuda.Stream
        #: the stream for collectives
        self.side = CudaStream(make_stream(index))

    def library(self) -> tuple[str, str]:
        return nccl_library()

    def connect(self, store: ReplicatedStore, rank: int, size: int) -> DeviceGroup:
        from reigen.torch.process_group import connect_nccl  # not every torch has torch.distributed

        return connect_nccl(store, rank, size, torch.device(self.name))

    def current(self) -> CudaStream:
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        stream = self._streams.get(handle)
        if stream is None:
            stream = self._streams[handle] = CudaStream(torch.cuda.current_stream(self._index))
        return stream

    def aside(self) -> AbstractContextManager[object]:
        within: AbstractContextManager[object] = torch.cuda.stream(self.side.stream)
        return within

    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        """Return uninitialised memory on the device; never an inference tensor."""
        with torch.inference_mode(mode=False):
            return as_device_array(self, torch.empty(shape, dtype=torch_dtype(dtype), device=self.name))

    def full(self, num_elements: int, dtype: DType, value: float) -> DeviceArray:
        with torch.inference_mode(mode=False):
            return as_device_array(self, torch.full((num_elements,), value, dtype=torch_dtype(dtype), device=self.name))

    def adopt(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self._index))


@functools.cache
def cuda_device(index: int) -> CudaDevice:
    """Return the device of that number."""
    return CudaDevice(index)


def cuda_device_of(tensor: torch.Tensor) -> CudaDevice | None:
    """Return the GPU that holds a tensor."""
    return cuda_device(tensor.get_device()) if tensor.is_cuda else None


def as_device_array(device: Device, tensor: torch.Tensor, ready: DeviceEvent | None = None) -> DeviceArray:
    """Return a contiguous tensor's memory."""
    return DeviceArray(device, tuple(tensor.shape), dtype_of(tensor.dtype), tensor, ready)


class TorchDeviceTensorAdapter:
    """`reigen.api.adapter.DeviceTensorAdapter` for dense tensors; ``device_of`` gives their device, if it lends."""

    def __init__(self, device_of: Callable[[torch.Tensor], TorchDevice | None]) -> None:
        self._device_of = device_of

    def device(self, tensor: torch.Tensor) -> TorchDevice | None:
        return self._device_of(tensor)

    def lend(self, tensor: torch.Tensor) -> tuple[DeviceArray, bool]:
        own = tensor.detach()
        aliases = own.is_contiguous() and not own.is_neg()
        if not aliases:
            own = own.resolve_neg().clone(memory_format=torch.contiguous_format)
        device = self._device_of(own)
        assert device is not None
        return as_device_array(device, own, device.current().record()), aliases

    def receive(self, array: DeviceArray) -> torch.Tensor:
        tensor = array.owner
        assert isinstance(tensor, torch.Tensor)
        device = self._device_of(tensor)
        assert device is not None
        assert array.ready is not None
        device.current().wait(array.ready)
        device.adopt(tensor)
        return tensor

    def copy(self, tensor: torch.Tensor, contents: torch.Tensor) -> None:
        tensor.detach().copy_(contents)


#: Lends CUDA tensors; None where torch has none.
DEVICE_TENSOR_ADAPTER = TorchDeviceTensorAdapter(cuda_device_of) if torch.version.cuda is not None else None
