"""Ranks that are threads, each with a "GPU" whose memory is that of ordinary torch tensors.

torch's own work is done when it returns, so the user's stream is the thread itself: waiting for an event is waiting.
The side stream takes its time before every event that it reaches, so that whoever reads without waiting reads too
early.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.devices.cuda import PATIENCE_SECONDS, Event, Stream
from tests.devices.nccl import Fabric, FakeNccl
from tests.unit.jobs import between

from reigen import assembly, context
from reigen.config import Config
from reigen.context import Context
from reigen.planes.base import DataPlane
from reigen.planes.device import DeviceArray
from reigen.planes.nccl import NcclPlane
from reigen.torch.adapter import TorchAdapter
from reigen.torch.cuda import TorchLender, over
from reigen.torch.dtypes import torch_dtype
from reigen.types import DType


class Now(Event):
    """Reached when it is recorded."""

    def passed(self) -> bool:
        return True


class Thread:
    """The stream of work that is done when the call returns."""

    handle = 0

    def record(self) -> Event:
        event = Now.__new__(Now)
        event.reached = threading.Event()
        event.reached.set()
        return event

    def wait(self, event: Event) -> None:
        assert event.reached.wait(PATIENCE_SECONDS)


class Slow(Stream):
    """A stream that takes its time."""

    def record(self) -> Event:
        self.enqueue(lambda: time.sleep(0.002))
        return super().record()


class TorchDevice:
    """`reigen.torch.cuda.TorchDevice`."""

    kind = "cuda"

    def __init__(self, rank: int) -> None:
        self.name, self.identity = "cuda:0", f"GPU-{rank}"
        self.side = Slow(f"side-{rank}")
        self._aside = threading.local()
        #: tensors that were handed to a stream other than the one to which they belong
        self.num_adopted = 0

    def current(self) -> Any:
        return self.side if getattr(self._aside, "depth", 0) else Thread()

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._aside.depth = getattr(self._aside, "depth", 0) + 1
        try:
            yield
        finally:
            self._aside.depth -= 1

    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        return over(self, torch.empty(shape, dtype=torch_dtype(dtype)))

    def full(self, num_elements: int, dtype: DType, value: float) -> DeviceArray:
        return over(self, torch.full((num_elements,), value, dtype=torch_dtype(dtype)))

    def adopt(self, tensor: torch.Tensor) -> None:
        self.num_adopted += 1


class _Mine:
    """Stands for the context of whichever rank asks."""

    def __init__(self, jobs: TorchRanks) -> None:
        object.__setattr__(self, "_jobs", jobs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jobs.seat.job, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._jobs.seat.job, name, value)


class TorchRanks:
    """Runs functions on ranks that are threads, with all of `reigen.torch`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seat: Any = threading.local()
        self.fakes: list[FakeNccl] = []
        self.without_nccl: set[int] = set()
        self._fabric = Fabric()
        patch.setattr(assembly, "device_plane_of", self._plane)
        patch.setattr(context, "_current", _Mine(self))
        patch.setattr(TorchAdapter, "lender", TorchLender(lambda _: self.seat.device))

    def _plane(self, config: Config, plane: DataPlane) -> NcclPlane | None:
        fake = self.fakes[plane.rank]
        if plane.rank in self.without_nccl:
            return NcclPlane(plane, range(plane.size), lambda: (None, "there is no NCCL"))
        return NcclPlane(plane, range(plane.size), lambda: (fake.library(), "a stand-in"))

    def run(self, size: int, act: Callable[[FakeNccl], Any], **knobs: Any) -> list[Any]:
        """``act(NCCL)`` on each rank."""
        self.fakes = [FakeNccl(self._fabric) for _ in range(size)]
        devices = [TorchDevice(rank) for rank in range(size)]

        def perform(job: Context) -> Any:
            self.seat.job, self.seat.device = job, devices[job.rank]
            return act(self.fakes[job.rank])

        try:
            return between(size, perform, **knobs)
        finally:
            for device in devices:
                device.side.close()
