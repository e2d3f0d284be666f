"""CUDA tensors, lent to the plane for devices: `reigen.planes.device` in torch's words.

Work of the calling thread goes into torch's current stream, that of the plane into one more stream of the device.
Memory that the plane makes comes from torch's allocator while the side stream is current, so it belongs to that stream,
and is marked as used by the stream of whoever receives it. Memory that is lent is kept by the plane until it has been
used.

Written against torch's documented interface; not run on a GPU yet.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from reigen.planes.device import Device, DeviceArray, Event
from reigen.torch.dtypes import dtype_of, torch_dtype
from reigen.types import DType


class TorchDevice(Device, Protocol):
    """A device whose memory is torch's: owners of its arrays are tensors."""

    def adopt(self, tensor: torch.Tensor) -> None:
        """The calling thread's stream uses a tensor that may belong to the side stream."""


class CudaEvent:
    """`reigen.planes.device.Event`."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def passed(self) -> bool:
        """See `Event.passed`."""
        return bool(self.event.query())


class CudaStream:
    """`reigen.planes.device.Stream`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    @property
    def handle(self) -> int:
        """The ``cudaStream_t``."""
        handle: int = self.stream.cuda_stream
        return handle

    def record(self) -> CudaEvent:
        """See `Stream.record`."""
        return CudaEvent(self.stream.record_event())

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)


class CudaDevice:
    """`reigen.planes.device.Device`: the GPU that torch calls ``cuda:index``. By `cuda_device`, one object for each."""

    kind = "cuda"

    def __init__(self, index: int) -> None:
        self._index = index
        self.name = f"cuda:{index}"
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        #: without an UUID (torch before 2.3): what this process sees, and which of it this is
        self.identity = f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}:{index}" if uuid is None else str(uuid)
        make_stream: Any = torch.cuda.Stream
        self._side = CudaStream(make_stream(index))

    @property
    def side(self) -> CudaStream:
        """See `Device.side`."""
        return self._side

    def current(self) -> CudaStream:
        """See `Device.current`."""
        return CudaStream(torch.cuda.current_stream(self._index))

    def aside(self) -> AbstractContextManager[object]:
        """See `Device.aside`."""
        within: AbstractContextManager[object] = torch.cuda.stream(self._side.stream)
        return within

    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        """See `Device.empty`."""
        return over(self, torch.empty(shape, dtype=torch_dtype(dtype), device=self.name))

    def full(self, num_elements: int, dtype: DType, value: float) -> DeviceArray:
        """See `Device.full`."""
        return over(self, torch.full((num_elements,), value, dtype=torch_dtype(dtype), device=self.name))

    def adopt(self, tensor: torch.Tensor) -> None:
        """See `TorchDevice.adopt`."""
        tensor.record_stream(torch.cuda.current_stream(self._index))


@functools.cache
def cuda_device(index: int) -> CudaDevice:
    """The device of that number."""
    return CudaDevice(index)


def device_of(tensor: torch.Tensor) -> CudaDevice | None:
    """The GPU that holds a tensor."""
    return cuda_device(tensor.get_device()) if tensor.is_cuda else None


def over(device: Device, tensor: torch.Tensor, ready: Event | None = None) -> DeviceArray:
    """A contiguous tensor's memory."""
    return DeviceArray(device, tensor.data_ptr(), tuple(tensor.shape), dtype_of(tensor.dtype), tensor, ready)


class TorchLender:
    """`reigen.frontends.adapter.Lender` for dense tensors.

    Args:
        device_of: the device that holds a tensor, if it is for lending.
    """

    def __init__(self, device_of: Callable[[torch.Tensor], TorchDevice | None]) -> None:
        self._device_of = device_of

    def device(self, tensor: torch.Tensor) -> TorchDevice | None:
        """See `Lender.device`."""
        return self._device_of(tensor)

    def lend(self, tensor: torch.Tensor) -> tuple[DeviceArray, bool]:
        """See `Lender.lend`."""
        own = tensor.detach()
        aliases = own.is_contiguous() and not own.is_neg()
        if not aliases:
            own = own.resolve_neg().clone(memory_format=torch.contiguous_format)
        device = self._device_of(own)
        assert device is not None
        return over(device, own, device.current().record()), aliases

    def receive(self, array: DeviceArray) -> torch.Tensor:
        """See `Lender.receive`."""
        tensor = array.owner
        assert isinstance(tensor, torch.Tensor)
        device = self._device_of(tensor)
        assert device is not None
        assert array.ready is not None
        device.current().wait(array.ready)
        device.adopt(tensor)
        return tensor

    def copy(self, tensor: torch.Tensor, contents: torch.Tensor) -> None:
        """See `Lender.copy`."""
        tensor.detach().copy_(contents)


#: Lends CUDA tensors; None where torch has none.
LENDER = TorchLender(device_of) if torch.version.cuda is not None else None
