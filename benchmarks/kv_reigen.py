"""Reigen's dist_sync for `benchmarks/kv.py` and `benchmarks/kv_wire.py`: one worker.

The name of a case says what is also set: "plain" nothing, "sgd" an optimizer, "2bit+sgd" that and compression.
"""

from __future__ import annotations

import numpy as np

from benchmarks.harness.sizes import element_counts
from benchmarks.harness.work import Case, WrongResultError
from reigen import __version__, kv, optim


class PushPull:
    """A `Work`: worker r pushes arrays of r + 1, and pulls what the servers then hold."""

    def __init__(self, store: kv.KVStore, keys: list[int], counts: list[int], *, exact: bool) -> None:
        self._store, self._exact = store, exact
        self._pushed = [np.zeros(count, np.float32) for count in counts]
        self._pulled = [np.zeros(count, np.float32) for count in counts]
        store.init(keys, self._pulled)
        several = (keys, self._pushed, self._pulled)
        self._arguments = several if len(keys) > 1 else tuple(each[0] for each in several)

    def prepare(self) -> None:
        for array in self._pushed:
            array.fill(self._store.rank + 1)

    def operate(self) -> None:
        self._store.pushpull(*self._arguments)

    def check(self) -> None:
        expected = self._store.num_workers * (self._store.num_workers + 1) / 2
        for array in self._pulled:
            if not (np.ptp(array) == 0 and (not self._exact or array[0] == expected)):
                raise WrongResultError(f"the servers hold {array[:3]}, not {expected}")

    def close(self) -> None:
        """The keys stay until the end of the job."""


class Worker:
    def __init__(self) -> None:
        self.versions = {"reigen": __version__}
        self._store = kv.create("dist_sync")
        self._num_keys = 0
        self._exact = True

    def open(self, case: Case) -> PushPull:
        counts = element_counts(case)
        for use in case.name.split("+"):  # once and for all keys: a store has one optimizer, and one compression
            if use == "sgd":
                self._store.set_optimizer(optim.create("sgd", learning_rate=1e-6, momentum=0.9))
            elif use != "plain":
                self._store.set_gradient_compression({"type": use})
            self._exact &= use == "plain"
        keys = list(range(self._num_keys, self._num_keys + len(counts)))
        self._num_keys += len(keys)
        return PushPull(self._store, keys, counts, exact=self._exact)

    def close(self) -> None:
        self._store.close()


def start(rank: int, size: int) -> Worker:
    return Worker()
