"""Counters of a worker's stores, for metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator

from reigen.cluster.metrics import MetricSample

_WAYS = ("network", "shared_memory")


class StoreCounters:
    """Counters of all stores of a worker: plain numbers, which any thread may read.

    Attributes:
        started: when the counting began, on the clock of ``time.monotonic()``.
        waited_seconds: for which callers have waited.
        num_pushes, num_pulls: keys that were pushed and pulled.
        encoded_bytes, code_bytes: bytes of gradients that were encoded, and of their codes.
    """

    def __init__(self) -> None:
        self.started, self.waited_seconds = time.monotonic(), 0.0
        self.num_pushes = self.num_pulls = 0
        self.encoded_bytes = self.code_bytes = 0
        #: bytes over the network, and through shared memory
        self._pushed, self._pulled = [0, 0], [0, 0]

    def pushed(self, num_bytes: int, *, is_memory: bool) -> None:
        """Count what leaves for a server."""
        self._pushed[is_memory] += num_bytes

    def pulled(self, num_bytes: int, *, is_memory: bool) -> None:
        """Count what has come from one."""
        self._pulled[is_memory] += num_bytes

    def samples(self) -> Iterator[MetricSample]:
        """Yield the metrics."""
        yield "reigen_wait_seconds_total", (), self.waited_seconds
        yield "reigen_pushes_total", (), self.num_pushes
        yield "reigen_pulls_total", (), self.num_pulls
        yield "reigen_encoded_bytes_total", (), self.encoded_bytes
        yield "reigen_code_bytes_total", (), self.code_bytes
        for operation, by_way in (("push", self._pushed), ("pull", self._pulled)):
            for way, num_bytes in zip(_WAYS, by_way, strict=True):
                yield "reigen_bytes_total", (operation, way), num_bytes
