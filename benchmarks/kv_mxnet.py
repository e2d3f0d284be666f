"""The peer ps-lite, inside MXNet 1.9.1's dist_sync, for `benchmarks/kv.py`: one worker.

It runs in an environment of its own. An operation has ended when MXNet's engine has written the arrays.
"""

from __future__ import annotations

import mxnet as mx
import numpy as np

from benchmarks.harness.sizes import element_counts
from benchmarks.harness.work import Case, WrongResultError


class PushPull:
    """A `Work`: worker r pushes arrays of r + 1, and pulls what the servers then hold."""

    def __init__(self, kv: mx.kv.KVStore, keys: list[int], counts: list[int], *, updates: bool) -> None:
        self._kv, self._updates = kv, updates
        self._pushed = [mx.nd.zeros(count) for count in counts]
        self._pulled = [mx.nd.zeros(count) for count in counts]
        kv.init(keys, self._pulled)
        several = (keys, self._pushed, self._pulled)
        self._arguments = several if len(keys) > 1 else tuple(each[0] for each in several)

    def prepare(self) -> None:
        for array in self._pushed:
            array[:] = self._kv.rank + 1
        mx.nd.waitall()

    def operate(self) -> None:
        keys, pushed, pulled = self._arguments
        self._kv.pushpull(keys, pushed, out=pulled)
        for pulled in self._pulled:
            pulled.wait_to_read()

    def check(self) -> None:
        expected = self._kv.num_workers * (self._kv.num_workers + 1) / 2
        for array in self._pulled:
            found = array.asnumpy()
            if not (np.ptp(found) == 0 and (self._updates or found[0] == expected)):
                raise WrongResultError(f"MXNet's servers hold {found[:3]}, not {expected}")

    def close(self) -> None:
        mx.nd.waitall()


class Worker:
    def __init__(self) -> None:
        self.versions = {"mxnet": mx.__version__}
        self._kv = mx.kv.create("dist_sync")
        self._num_keys = 0
        self._updates = False

    def open(self, case: Case) -> PushPull:
        counts = element_counts(case)
        if case.name == "sgd":  # once and for all keys: a store has one optimizer
            self._updates = True
            self._kv.set_optimizer(mx.optimizer.SGD(learning_rate=1e-6, momentum=0.9))
        keys = list(range(self._num_keys, self._num_keys + len(counts)))
        self._num_keys += len(keys)
        return PushPull(self._kv, keys, counts, updates=self._updates)

    def close(self) -> None:
        """MXNet leaves its job when the process ends."""


def start(rank: int, size: int) -> Worker:
    return Worker()
