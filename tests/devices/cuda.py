"""A stand-in for a GPU and its runtime: streams are threads, memory is the host's. What is not ordered, has no order.

Streams do one thing after the other, and different streams do nothing in any order but that of events: whoever forgets
to wait for one reads what is not there yet, the more surely as a stream can be held back (`Stream.hold`).
"""

from __future__ import annotations

import functools
import itertools
import math
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from reigen.planes.device import DeviceArray
from reigen.testing.truth import narrowed
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
            raise Failed(f"the device is broken: {self._stream.error}")
        return self.reached.is_set()


class Stream:
    """Carries out what is enqueued, in order, on a thread of its own."""

    _handles = itertools.count(1)
    by_handle: ClassVar[weakref.WeakValueDictionary[int, Stream]] = weakref.WeakValueDictionary()

    def __init__(self, name: str) -> None:
        self.name = name
        self.handle = next(self._handles)
        self.by_handle[self.handle] = self
        self.error: BaseException | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"stream-{name}", daemon=True)
        self._thread.start()

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def record(self) -> Event:
        event = Event(self)
        self.enqueue(event.reached.set)
        return event

    def wait(self, event: Event) -> None:
        def until_reached() -> None:
            if not event.reached.wait(PATIENCE_SECONDS):
                raise Failed("an event was not reached")

        self.enqueue(until_reached)

    def hold(self) -> Callable[[], None]:
        """Let nothing that is enqueued from now on begin, until the function that this returns is called."""
        gate = threading.Event()
        self.enqueue(lambda: gate.wait(PATIENCE_SECONDS) and None)
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
                work()
            except BaseException as error:  # noqa: BLE001  the device has failed; events tell
                self.error = error


class Device:
    """One GPU of one rank: `reigen.planes.device.Device`."""

    kind = "cuda"

    def __init__(self, name: str, identity: str) -> None:
        self.name, self.identity = name, identity
        self.side = Stream(f"side-{name}")
        self._user = Stream(f"user-{name}")
        self._aside = threading.local()

    def current(self) -> Stream:
        return self.side if getattr(self._aside, "depth", 0) else self._user

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._aside.depth = getattr(self._aside, "depth", 0) + 1
        try:
            yield
        finally:
            self._aside.depth -= 1

    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        return self.over(
            np.frombuffer(bytearray(b"\x5a" * (math.prod(shape) * dtype.itemsize)), dtype.storage).reshape(shape), dtype
        )

    def full(self, num_elements: int, dtype: DType, value: float) -> DeviceArray:
        new = self.empty((num_elements,), dtype)
        elements = narrowed(np.full(num_elements, value), dtype) if dtype.is_floating else value
        assert isinstance(new.owner, np.ndarray)
        self.current().enqueue(functools.partial(np.copyto, new.owner, elements))
        return new

    def over(self, array: NDArray[Any], dtype: DType | None = None, *, ready: bool = False) -> DeviceArray:
        """An array as memory of this device; ``ready``: behind what the current stream has to do."""
        dtype = dtype or dtype_named(array.dtype.name)
        event = self.current().record() if ready else None
        return DeviceArray(self, array.ctypes.data, array.shape, dtype, array, event)

    def lend(self, values: NDArray[Any], dtype: DType | None = None) -> DeviceArray:
        """Memory into which the user's stream copies ``values`` in its own time; garbage until then."""
        array = np.full(values.shape, 0x5A, values.dtype)
        kept = values.copy()
        self._user.enqueue(lambda: np.copyto(array, kept))
        return self.over(array, dtype, ready=True)

    def take(self, array: DeviceArray, ended: Event | None = None) -> NDArray[Any]:
        """The contents, once the user's stream has waited for ``ended`` (or ``array.ready``)."""
        owner, event = array.owner, ended or array.ready
        assert isinstance(owner, np.ndarray)
        assert event is not None
        kept: list[NDArray[Any]] = []
        self._user.wait(event)
        self._user.enqueue(lambda: kept.append(owner.copy()))
        self._user.synchronize()
        return kept[0]

    def close(self) -> None:
        self._user.close()
        self.side.close()
