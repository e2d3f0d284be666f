"""Buckets on a device that are filled by several streams."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reigen.api.gradients.bucket_plan import ParameterSpec, plan_buckets
from reigen.torch.cuda_tensors import TorchDeviceTensorAdapter, as_device_array
from reigen.torch.reducer.bucket_memory import DeviceBucketMemory
from reigen.torch.reducer.bucket_views import BucketViews


class Stream:
    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.waited: list[int] = []
        #: how many calls have enqueued work of the device's
        self.num_calls = 0

    def record(self) -> int:
        return self.handle

    def wait(self, event: int) -> None:
        self.waited.append(event)

    def run(self, work: Callable[[], None]) -> None:
        self.num_calls += 1
        work()


class Memory:
    """Memory of gradients of these shapes, in one bucket, on a device whose current stream is ``device.now``."""

    def __init__(self, num_streams: int, *shapes: int) -> None:
        self.streams = [Stream(number) for number in range(num_streams)]
        self.device: Any = SimpleNamespace(kind="cuda", now=self.streams[0])
        self.device.current = lambda: self.device.now
        self.device.empty = lambda shape, dtype: as_device_array(self.device, torch.empty(shape, dtype=torch.uint8))
        parameters = [torch.zeros(shape) for shape in shapes]
        self.places = BucketViews(parameters)
        lender = TorchDeviceTensorAdapter(lambda _: self.device)
        self.memory = DeviceBucketMemory(self.places, self.device, lender)
        specs = [ParameterSpec(parameter.numel(), 4, "float32") for parameter in parameters]
        self.memory.allocate_for_pass(plan_buckets(specs, list(range(len(shapes))), 1 << 20, ()))
        self.submitted: list[Any] = []

    def submit(self) -> list[int]:
        """Submit the bucket; returns the parameters whose gradients were copied."""
        reduce_group: Any = SimpleNamespace(reduce=lambda array, dtype, part, *, blocking: self.submitted.append(array))
        copied = list(self.memory.fill([0]))
        self.memory.reduce(reduce_group, 0, "0", blocking=False)
        return copied

    def gradients(self) -> list[list[float]]:
        return [place.tolist() for place in self.places.tensors if place is not None]


def test_a_bucket_waits_for_every_stream_that_has_filled_it() -> None:
    job = Memory(3, 4, 2, 1)
    for number, stream in enumerate(job.streams):
        job.device.now = stream
        assert not job.memory.put(number, torch.full_like(job.places.own(number), number + 1.0))
    assert job.submit() == [0, 1, 2]
    assert job.streams[2].waited == [0, 1]
    assert [array.ready for array in job.submitted] == [2]
    assert [stream.num_calls for stream in job.streams] == [1, 1, 1], "each copies what it has made"
    assert job.gradients() == [[1.0] * 4, [2.0] * 2, [3.0]]


def test_a_stream_that_comes_again_copies_all_that_it_has_made() -> None:
    job = Memory(2, 1, 1, 1)
    for number in range(3):
        job.device.now = job.streams[number % 2]
        job.memory.put(number, torch.tensor([number + 1.0]))
    assert sorted(job.submit()) == [0, 1, 2]
    assert [stream.num_calls for stream in job.streams] == [1, 1]
    assert job.streams[0].waited == [1], "the bucket is submitted before what the other stream has copied"
    assert job.gradients() == [[1.0], [2.0], [3.0]]


def test_gradients_of_a_bucket_are_copied_in_one_call_that_is_no_change_of_the_users() -> None:
    job = Memory(1, 4, 2, 1)
    versions = [place._version for place in job.places.tensors if place is not None]
    job.memory.put(0, torch.ones(4))
    assert job.memory.put(1, None), "zeros are there at once"
    job.memory.put(2, torch.tensor([7.0]).to(torch.float16))
    assert job.gradients()[2] == [0.0], "it is copied too early"
    assert job.submit() == [0, 2]
    assert job.streams[0].num_calls == 1
    assert job.gradients() == [[1.0] * 4, [0.0] * 2, [7.0]]
    assert [place._version for place in job.places.tensors if place is not None] == [
        versions[0],
        versions[1] + 1,  # zeros where there was no gradient
        versions[2],
    ]


@pytest.mark.parametrize("end", ["abandon", "end_pass"])
def test_nothing_of_a_pass_that_has_ended_goes_into_the_next_one(end: str) -> None:
    job = Memory(2, 4, 2)
    job.memory.put(0, torch.ones(4))
    if end == "abandon":
        job.memory.abandon()
    else:
        job.memory.end_pass(is_reduced=False)
    job.device.now = job.streams[1]
    job.memory.put(1, torch.full((2,), 3.0))
    assert job.submit() == [1]
    assert job.gradients() == [[0.0] * 4, [3.0] * 2]
    assert job.streams[1].waited == [], "a stream of the pass before is waited for"
    assert [stream.num_calls for stream in job.streams] == [0, 1]
