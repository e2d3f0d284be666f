"""Ranks that are threads, each with a "GPU" whose memory is that of ordinary torch tensors.

torch's own work is done when it returns, so the user's stream is the thread itself: waiting for an event is waiting.
The side stream takes its time before every event that it reaches, so that whoever reads without waiting reads too
early.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from reigen import context
from reigen.context import Context
from reigen.torch.adapter import TorchAdapter
from reigen.torch.cuda_tensors import TorchDeviceTensorAdapter
from tests.devices.gloo import PATIENCE_SECONDS, Device, Event, Network, Stream
from tests.unit.engine.jobs import between


class Now(Event):
    """Reached when it is recorded."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.reached.set()

    def passed(self) -> bool:
        return True


class Thread:
    """The stream of work that is done when the call returns."""

    handle = 0

    def record(self) -> Event:
        return Now()

    def wait(self, event: Event) -> None:
        assert event.reached.wait(PATIENCE_SECONDS)
        event.passed()  # raises where the device has failed

    def run(self, work: Callable[[], None]) -> None:
        work()


class Slow(Stream):
    """A stream that takes its time."""

    def record(self) -> Event:
        self.run(lambda: time.sleep(0.002))
        return super().record()


class TorchDevice(Device):
    """A device on which the calling thread works as torch does on the host."""

    def __init__(self, network: Network, rank: int) -> None:
        super().__init__("cuda:0", f"GPU-{rank}", network, rank)
        self.side.close()
        self.side = Slow(f"side-{rank}")
        #: tensors that were handed to a stream other than the one to which they belong
        self.num_adopted = 0

    def current(self) -> Any:
        return self.side if getattr(self._aside, "depth", 0) else Thread()

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
        self.without_library: set[int] = set()
        patch.setattr(context, "_current", _Mine(self))
        patch.setattr(TorchAdapter, "lender", TorchDeviceTensorAdapter(lambda _: self.seat.device))

    def run(self, size: int, act: Callable[[TorchDevice], Any], **knobs: Any) -> list[Any]:
        """``act(device)`` on each rank."""
        network = Network()
        devices = [TorchDevice(network, rank) for rank in range(size)]
        for rank in self.without_library:
            devices[rank].without = "there is no NCCL"

        def perform(job: Context) -> Any:
            self.seat.job, self.seat.device = job, devices[job.rank]
            return act(devices[job.rank])

        try:
            return between(size, perform, **knobs)
        finally:
            for device in devices:
                device.close()
