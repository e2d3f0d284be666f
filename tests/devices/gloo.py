"""GPUs whose memory is the host's, connected by process groups of torch's over Gloo instead of NCCL.

A stand-in for the GPU and its runtime only: what connects the devices, `reigen.torch.process_group`, is what runs on
GPUs. Streams are threads. They do one thing after the other, and different streams do nothing in any order but that of
events: whoever forgets to wait for one reads what is not there yet, the more surely as a stream can be held back
(`Stream.hold`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch._C import _distributed_c10d as c10d

from reigen.backends.device import DeviceArray, ReplicatedStore
from reigen.torch.adapter import tensor_over
from reigen.torch.cuda_tensors import as_device_array
from reigen.torch.dtypes import torch_dtype
from reigen.torch.process_group import C10dGroup, SharedStore
from reigen.types import DType, dtype_named

PATIENCE_SECONDS = 30.0


class Failed(RuntimeError):
    """What a runtime says when its device is broken."""


class Event:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.reached = threading.Event()

    def passed(self) -> bool:
        if self._stream.error is not None:
            raise Failed(str(self._stream.error))
        return self.reached.is_set()


class Stream:
    """Carries out what is enqueued, in order, on a thread of its own."""

    _handles = itertools.count(1)

    def __init__(self, name: str) -> None:
        self.handle = next(self._handles)
        self.error: BaseException | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"stream-{name}", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def record(self) -> Event:
        event = Event(self)
        self.run(event.reached.set)
        return event

    def wait(self, event: Event) -> None:
        def until_reached() -> None:
            if not event.reached.wait(PATIENCE_SECONDS):
                raise Failed("an event was not reached")

        self.run(until_reached)

    def hold(self) -> Callable[[], None]:
        """Let nothing that is enqueued from now on begin, until the function that this returns is called."""
        gate = threading.Event()
        self.run(lambda: gate.wait(PATIENCE_SECONDS) and None)
        return gate.set

    def synchronize(self) -> None:
        """Wait until all that was enqueued is done."""
        event = self.record()
        assert event.reached.wait(PATIENCE_SECONDS), "the stream does not end"
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(PATIENCE_SECONDS)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                with torch.inference_mode():
                    work()
            except BaseException as error:  # noqa: BLE001  the device has failed; events tell
                self.error = error.with_traceback(None)
            del work


class Network:
    """Addresses of the devices of one job, on the loopback interface."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix or f"127.{random.randrange(1, 255)}.{random.randrange(255)}."

    def address(self, rank: int) -> str:
        return f"{self._prefix}{rank + 1}"

    def cut(self) -> None:
        """End the connections of this process that belong to it: what an abort does, which Gloo does not have."""
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # it is closed by now
                if str(link.readlink()).startswith("socket:"):
                    self._end(os.dup(int(link.name)))

    def _end(self, descriptor: int) -> None:
        with socket.socket(fileno=descriptor) as end:
            if end.family is socket.AF_INET and self._prefix in f"{end.getsockname()} {end.getpeername()}":
                end.shutdown(socket.SHUT_RDWR)


class _Recorded:
    """A process group that tells a device what it was asked for."""

    def __init__(self, group: Any, device: Device) -> None:
        self._group, self._device = group, device

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self._device.calls.append(name)
            if name.startswith("allreduce"):
                self._device.num_reduced += len(arguments[0])
            return getattr(self._group, name)(*arguments)

        return call


class Device:
    """One "GPU" of one rank: `reigen.torch.cuda_tensors.TorchDevice`.

    Attributes:
        calls: names of the process groups' methods that were called.
        num_reduced: how many tensors were in calls of allreduce.
        before_connecting: called first when the device is to be connected.
        without: why there is no library for it, if there is none.
    """

    kind = "cuda"

    def __init__(self, name: str, identity: str, network: Network, rank: int) -> None:
        self.name, self.identity = name, identity
        self.calls: list[str] = []
        self.num_reduced = 0
        self.before_connecting: Callable[[], Any] = int
        self.without = ""
        self.network, self._rank = network, rank
        self.side = Stream(f"side-{name}")
        self._user = Stream(f"user-{name}")
        self._aside = threading.local()

    def library(self) -> tuple[str, str]:
        return ("", self.without) if self.without else ("Gloo", "a stand-in")

    def connect(self, store: ReplicatedStore, rank: int, size: int) -> C10dGroup:
        self.calls.append("connect")
        self.before_connecting()
        gloo: Any = c10d.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self.network.address(self._rank))]
        options._timeout = timedelta(seconds=2 * PATIENCE_SECONDS)
        shared = SharedStore(store)
        group = _Recorded(gloo(shared, rank, size, options), self)

        def abort() -> None:
            self.calls.append("abort")
            self.network.cut()

        return C10dGroup(group, shared, rank, abort)

    def current(self) -> Any:
        return self.side if getattr(self._aside, "depth", 0) else self._user

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._aside.depth = getattr(self._aside, "depth", 0) + 1
        try:
            yield
        finally:
            self._aside.depth -= 1

    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        return as_device_array(self, torch.empty(shape, dtype=torch_dtype(dtype)))

    def full(self, num_elements: int, dtype: DType, value: float) -> DeviceArray:
        new = self.empty((num_elements,), dtype)
        self.current().run(functools.partial(new.owner.fill_, value))
        return new

    def adopt(self, tensor: torch.Tensor) -> None:
        """Nothing: the host's memory is for all threads."""

    def lend(self, values: NDArray[Any], dtype: DType | None = None) -> DeviceArray:
        """Memory into which the user's stream copies ``values`` in its own time; garbage until then."""
        dtype = dtype or dtype_named(values.dtype.name)
        array = np.full(values.shape, 0x5A, values.dtype)
        kept = values.copy()
        self._user.run(lambda: np.copyto(array, kept))
        return as_device_array(self, tensor_over(array, dtype), self._user.record())

    def take(self, array: DeviceArray, ended: Event | None = None) -> NDArray[Any]:
        """The contents, once the user's stream has waited for ``ended`` (or ``array.ready``)."""
        event: Any = ended or array.ready
        assert event is not None
        kept: list[torch.Tensor] = []
        self._user.wait(event)
        self._user.run(lambda: kept.append(array.owner.clone()))
        self._user.synchronize()
        if self.side.error is not None:
            raise self.side.error
        stored = kept[0].view(torch.uint16) if array.dtype.name == "bfloat16" else kept[0]
        contents: NDArray[Any] = stored.numpy()
        return contents

    def close(self) -> None:
        self._user.close()
        self.side.close()
