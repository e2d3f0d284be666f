"""Buckets on a device that are filled by several streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from reigen.api.gradients.bucket_plan import ParameterSpec, plan_buckets
from reigen.torch.cuda_tensors import TorchDeviceTensorAdapter, as_device_array
from reigen.torch.reducer.bucket_memory import DeviceBucketMemory
from reigen.torch.reducer.bucket_views import BucketViews


class Stream:
    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.waited: list[int] = []

    def record(self) -> int:
        return self.handle

    def wait(self, event: int) -> None:
        self.waited.append(event)


def test_a_bucket_waits_for_every_stream_that_has_filled_it() -> None:
    streams = [Stream(number) for number in range(3)]
    device: Any = SimpleNamespace(kind="cuda", now=streams[0])
    device.current = lambda: device.now
    device.empty = lambda shape, dtype: as_device_array(device, torch.empty(shape, dtype=torch.uint8))
    parameters = [torch.zeros(4), torch.zeros(2)]
    places = BucketViews(parameters)
    memory = DeviceBucketMemory(places, device, TorchDeviceTensorAdapter(lambda _: device))
    memory.allocate_for_pass(
        plan_buckets([ParameterSpec(p.numel(), 4, "float32") for p in parameters], [0, 1], 1 << 20, ())
    )
    for stream in streams:
        device.now = stream
        memory.filled()
    submitted: list[Any] = []
    reduce_group: Any = SimpleNamespace(reduce=lambda array, dtype, part, *, blocking: submitted.append(array))
    memory.reduce(reduce_group, 0, "0", blocking=False)
    assert streams[2].waited == [0, 1]
    assert [array.ready for array in submitted] == [2]
