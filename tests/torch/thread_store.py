"""A synchronous store for workers that are threads of one test: for the Trainer's logic, without servers."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from typing import Any

import numpy as np

from reigen.kv.store import KVStore, PendingGroup
from reigen.kv.values import DENSE, RowSparse, flatten_tensor, write_tensor
from reigen.optim import Optimizer, Updater

_DEADLINE = 30.0


class Servers:
    """What all workers share."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.changed = threading.Condition()
        self.meeting = threading.Barrier(num_workers, timeout=_DEADLINE)
        self.stored: dict[Any, np.ndarray] = {}
        self.pushes: dict[Any, dict[int, Any]] = defaultdict(dict)
        self.applied: dict[Any, int] = defaultdict(int)
        self.updater: Updater | None = None
        self.left: set[int] = set()
        #: (what, key, ...) in the order in which it came
        self.log: list[tuple[Any, ...]] = []


class ThreadStore(KVStore):
    """One worker's store. Sums are taken in rank order."""

    def __init__(self, servers: Servers, rank: int, kind: str = "dist_sync") -> None:
        super().__init__(kind)
        self.servers, self.rank, self.num_workers = servers, rank, servers.num_workers
        self.staleness = math.inf if "async" in kind else 0
        self.closed = False

    def _init(self, pairs):
        if self.rank == 0:
            for key, value in pairs:
                dense = value.values if isinstance(value, RowSparse) else value
                self.servers.stored[key] = flatten_tensor(dense)[0].copy()
        self.barrier()

    def _push(self, groups, priority):
        for key, (value,) in groups:
            if isinstance(value, RowSparse):
                taken = RowSparse(value.checked_indices(), value.values.numpy().copy(), value.shape)
                self.servers.log.append(("rows", key, taken.indices.tolist()))
                self._contribute(key, taken)
            else:
                self._contribute(key, flatten_tensor(value)[0].copy())
        return PendingGroup(())

    def _contribute(self, key, value):
        servers = self.servers
        with servers.changed:
            assert self.rank not in servers.pushes[key], "the round before was not waited for"
            servers.pushes[key][self.rank] = value
            self._apply_complete()

    def _apply_complete(self):
        servers = self.servers
        for key, round_ in servers.pushes.items():
            if round_ and {*round_, *servers.left} == set(range(self.num_workers)):
                self._apply(key, [round_[rank] for rank in sorted(round_)])
                round_.clear()
                servers.applied[key] += 1
        servers.changed.notify_all()

    def _apply(self, key, values):
        servers, spec = self.servers, self._specs[key]
        stored = servers.stored[key]
        if isinstance(values[0], RowSparse):
            rows = np.unique(np.concatenate([value.indices for value in values]))
            total = np.zeros((len(rows), spec.row_length), stored.dtype)
            for value in values:
                total[np.searchsorted(rows, value.indices)] += value.values.reshape(-1, spec.row_length)
            servers.updater.update_rows(key, rows, total, stored.reshape(-1, spec.row_length), spec.dtype)
            return
        assert spec.stype == DENSE
        total = values[0]
        for value in values[1:]:
            total = total + value
        if servers.updater is None:
            stored[:] = total
        else:
            servers.updater(key, total, stored, spec.dtype)

    def _pull(self, groups, priority, blocking):
        for key, outs in groups:
            self._wait_for_round(key)
            for out in outs:
                array, aliases = flatten_tensor(out)
                array[:] = self.servers.stored[key]
                write_tensor(out, array, aliases)
        return PendingGroup(())

    def _pushpull(self, values, outs, priority, blocking):
        self.servers.log.append(("pushpull", [key for key, _ in values]))
        groups = [(key, tensors) for key, tensors in values]
        self._push(groups, priority)
        return _Later(lambda: self._pull(outs, priority, blocking))

    def _pull_rows(self, key, outs, rows, priority):
        spec = self._specs[key]
        ids = np.unique(flatten_tensor(rows)[0])
        for out in outs:
            out.receive(ids, self.servers.stored[key].reshape(spec.shape)[ids])
        return PendingGroup(())

    def _wait_for_round(self, key):
        with self.servers.changed:
            done = self.servers.changed.wait_for(lambda: self.rank not in self.servers.pushes[key], _DEADLINE)
        assert done, f"the round of {key!r} was never complete"

    def set_optimizer(self, optimizer: Optimizer) -> None:
        self.servers.log.append(("optimizer", self.rank, optimizer))
        self.servers.updater = self.servers.updater or Updater(optimizer)
        self.barrier()

    def set_learning_rate(self, learning_rate: float) -> None:
        if self.rank == 0:
            updater = self.servers.updater
            assert updater is not None
            updater.set_optimizer(updater.optimizer.with_learning_rate(learning_rate))

    def set_gradient_compression(self, params):
        assert not self._specs, "compression comes before init()"
        self.servers.log.append(("compression", self.rank, dict(params)))

    def save_optimizer_states(self, fname, dump_optimizer=False):
        self.servers.updater.save(fname, dump_optimizer)

    def load_optimizer_states(self, fname):
        self.servers.updater.load(fname)

    def barrier(self) -> None:
        self.servers.meeting.wait()

    def leave(self) -> None:
        with self.servers.changed:
            self.servers.left.add(self.rank)
            self._apply_complete()

    def wait(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class _Later:
    def __init__(self, finish):
        self._finish, self._done = finish, False

    def wait(self, timeout=None):
        if not self._done:
            self._finish()
            self._done = True

    def done(self):
        return self._done
