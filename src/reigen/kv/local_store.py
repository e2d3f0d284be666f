"""Stores whose values lie in this process: ``local``, ``device`` and their spellings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from reigen import optim
from reigen.api.adapter import Array
from reigen.api.numpy_adapter import get_adapter
from reigen.compression import Codec, from_params, means_none
from reigen.errors import ArgumentError
from reigen.kv import residual_files
from reigen.kv.consistency.sample_leases import SamplePlan
from reigen.kv.samples import BatchOrder, SampleLease, checked_plan
from reigen.kv.store import KeyTensors, KVStore, Pending, PendingGroup, UpdateFunction, check_optimizer
from reigen.kv.values import (
    Key,
    RowSparse,
    TensorSpec,
    flatten_tensor,
    row_numbers,
    sum_arrays,
    sum_row_sparse,
    sum_tensors,
    write_tensor,
)

#: Nothing is pending.
COMPLETED = PendingGroup(())


class LocalStore(KVStore):
    """Store for the devices of one process, of type ``kind``. Nothing is pending in it when a call returns.

    Values on devices are added up on the host.
    """

    def __init__(self, kind: str = "local") -> None:
        super().__init__(kind)
        #: what is stored: tensors of the frameworks that the keys were initialised with, contiguous and our own
        self._stored: dict[Key, Any] = {}
        self._updater: UpdateFunction | None = None
        self._rounds: Counter[Key] = Counter()
        self._is_closed = False
        #: by plan of samples, how many batches are done
        self._next_batch: dict[SamplePlan, int] = {}
        self._codec: Codec | None = None
        #: what compression has not let through yet
        self._residuals: residual_files.Residuals = {}

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def set_optimizer(self, optimizer: optim.Optimizer) -> None:
        """Set the optimizer. One that keeps the same states may replace another at any time."""
        check_optimizer(optimizer)
        self.wait()
        if isinstance(self._updater, optim.Updater):
            self._updater.set_optimizer(optimizer)
            return
        if self._rounds and self._updater is None:
            raise ArgumentError(
                "set_optimizer() comes before the first push: without an optimizer, pushes have put gradients in the "
                "place of what was stored"
            )
        self._updater = optim.Updater(optimizer)

    def set_updater(self, updater: UpdateFunction) -> None:
        self.wait()
        self._updater = updater

    def set_learning_rate(self, learning_rate: float) -> None:
        self.wait()
        updater = self._optimizing()
        updater.set_optimizer(updater.optimizer.with_learning_rate(learning_rate))

    def set_gradient_compression(self, params: Mapping[str, object]) -> None:
        """Have each device's values lose as much as they would lose on their way."""
        if "device" not in self.type:
            super().set_gradient_compression(params)
        self._codec = None if means_none(params) else from_params(params)
        self._residuals.clear()

    def save_optimizer_states(self, fname: str | Path, dump_optimizer: bool = False) -> None:
        self.wait()
        is_optimizing = self._codec is None or isinstance(self._updater, optim.Updater)
        states = self._optimizing().get_states(dump_optimizer) if is_optimizing else optim.States(())
        residual_files.merge_residuals(states, self._residuals, self._specs).save(fname)

    def load_optimizer_states(self, fname: str | Path) -> None:
        self.wait()
        states, left = residual_files.load_states(fname, self._specs)
        if states.pieces or self._codec is None:
            self._optimizing().set_states(states)
        if self._codec is not None:
            self._residuals = left

    def sample_leases(
        self,
        num_samples: int,
        batch_size: int,
        *,
        epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        first_epoch: int = 0,
    ) -> Iterator[SampleLease]:
        """Yield batches of a data set; those that were yielded before, in a loop with other ``epochs``, are done."""
        plan, first, stop = checked_plan(
            num_samples, batch_size, epochs, first_epoch, seed, shuffle=shuffle, drop_last=drop_last
        )
        order = BatchOrder(plan)
        self._next_batch.setdefault(plan, first)
        while self._next_batch[plan] < stop:
            yield order.lease(self._next_batch[plan])
            self._next_batch[plan] += 1

    # -- other workers: there are none --------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Return at once, as `leave` and `wait` do: nothing is pending."""

    def leave(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def rounds(self, key: Key) -> int:
        self._known(key)
        return self._rounds[key]

    def close(self) -> None:
        self._is_closed = True
        self._stored.clear()
        self._specs.clear()

    # -- values -------------------------------------------------------------------------------------------------------

    def _init(self, pairs: list[tuple[Key, Any]]) -> None:
        self._check()
        for key, value in pairs:
            self._stored[key] = copy_to_host(value)

    def _push(self, groups: list[KeyTensors], priority: int) -> Pending:
        for key, tensors in groups:
            self._take(key, tensors)
        return COMPLETED

    def _pull(self, groups: list[KeyTensors], priority: int, blocking: bool) -> Pending:
        for key, outs in groups:
            self._give(key, outs)
        return COMPLETED

    def _pushpull(self, values: list[KeyTensors], outs: list[KeyTensors], priority: int, blocking: bool) -> Pending:
        self._push(values, priority)
        return self._pull(outs, priority, blocking)

    def _pull_rows(self, key: Key, outs: list[RowSparse], rows: Any, priority: int) -> Pending:
        spec = self._specs[key]
        wanted = np.arange(spec.shape[0]) if rows is None else np.unique(row_numbers(rows, spec.shape[0]))
        stored = flatten_tensor(self._stored[key])[0].reshape(spec.shape)
        for out in outs:
            out.receive(wanted.copy(), stored[wanted])  # each has its own: tensors may use the memory
        return COMPLETED

    def _known(self, key: Key) -> TensorSpec:
        self._check()
        return super()._known(key)

    def _check(self) -> None:
        if self._is_closed:
            raise ArgumentError("this store was closed")

    def _take(self, key: Key, tensors: list[Any]) -> None:
        """Do a round: add values up, and update the stored one."""
        spec = self._specs[key]
        self._rounds[key] += 1
        if any(isinstance(tensor, RowSparse) for tensor in tensors):
            self._apply_rows(key, *sum_row_sparse(tensors, spec))
        else:
            self._apply(key, self._total(key, tensors, spec))

    def _total(self, key: Key, tensors: list[Any], spec: TensorSpec) -> Array:
        """Return the sum of dense values; with compression, of their decoded codes."""
        if self._codec is None:
            return sum_tensors(tensors, spec)[0]
        parts = []
        codes = bytearray(self._codec.max_bytes(spec.num_elements))
        for device, tensor in enumerate(tensors):
            owner = key, f"device {device}"
            residual = self._residuals.get(owner)
            if residual is None and (residual := self._codec.begin(spec.num_elements, spec.dtype)) is not None:
                self._residuals[owner] = residual
            self._codec.encode(flatten_tensor(tensor)[0], residual, codes)
            part = np.empty(spec.num_elements, spec.dtype.storage)
            self._codec.decode(codes, part)
            parts.append(part)
        if len(parts) > 1:
            sum_arrays(parts, spec.dtype, parts[0])
        return parts[0]

    def _apply(self, key: Key, elements: Array) -> None:
        """Update a key by a sum."""
        spec = self._specs[key]
        stored = flatten_tensor(self._stored[key])[0]
        if self._updater is None:
            np.copyto(stored, elements)
        elif isinstance(self._updater, optim.Updater):
            self._updater(key, elements, stored, spec.dtype)
        else:
            kind = get_adapter(self._stored[key])
            # a copy: the sum may be the user's own memory, and updaters may use it up
            value = kind.wrap(elements.copy().reshape(spec.shape), like=self._stored[key])
            self._updater(key, value, self._stored[key])

    def _apply_rows(self, key: Key, indices: Array, rows: Array) -> None:
        """Update a key by the sums of some rows."""
        spec = self._specs[key]
        stored = flatten_tensor(self._stored[key])[0].reshape(spec.shape[0], spec.row_length)
        if isinstance(self._updater, optim.Updater):
            self._updater.update_rows(key, indices, rows, stored, spec.dtype)
        elif self._updater is None:
            stored[:] = 0
            stored[indices] = rows
        else:
            kind = get_adapter(self._stored[key])
            shaped = rows.reshape(len(indices), *spec.shape[1:])
            value = RowSparse(indices, kind.wrap(shaped, like=self._stored[key]), spec.shape)
            self._updater(key, value, self._stored[key])

    def _give(self, key: Key, outs: list[Any]) -> None:
        stored = flatten_tensor(self._stored[key])[0]
        for out in outs:
            fill_tensor(out, stored)

    def _optimizing(self) -> optim.Updater:
        if not isinstance(self._updater, optim.Updater):
            raise ArgumentError("this store has no optimizer; call set_optimizer() before")
        return self._updater


def copy_to_host(value: Any) -> Any:
    """Return a contiguous copy of a first value in host memory: a tensor of the same framework."""
    if not isinstance(value, RowSparse):
        return _host_tensor(flatten_tensor(value)[0].copy().reshape(tuple(value.shape)), value)
    rows = flatten_tensor(value.values)[0]
    whole = np.zeros(value.shape, rows.dtype)
    whole[value.checked_indices()] = rows.reshape(len(value.indices), *value.shape[1:])
    return _host_tensor(whole, value.values)


def _host_tensor(array: Array, like: Any) -> Any:
    kind = get_adapter(like)
    return kind.wrap(array, like=like if kind.device(like) == "cpu" else like.reshape(-1)[:0].cpu())


def fill_tensor(out: Any, elements: Array) -> None:
    """Have a dense tensor hold ``elements``."""
    memory, aliases = flatten_tensor(out)
    if aliases:
        np.copyto(memory, elements)
    write_tensor(out, elements, aliases)
