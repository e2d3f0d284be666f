"""Samples that workers of a store lease, batch by batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reigen.data.permutation import EpochOrder, Indices
from reigen.errors import ArgumentError
from reigen.kv.consistency.sample_leases import MAX_BATCHES, SamplePlan


@dataclass(frozen=True, eq=False, slots=True)
class SampleLease:
    """Batch of samples that this worker alone trains on.

    Attributes:
        number: of the batch, from 0 in epoch 0 on.
        epoch: that it belongs to.
        indices: of the samples in the data set, int64.
    """

    number: int
    epoch: int
    indices: Indices

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.indices)


class BatchOrder:
    """Samples of each batch of a plan, the same for all workers, and in the order of `reigen.elastic.Cursor`.

    Example::

        >>> order = BatchOrder(SamplePlan(num_samples=5, batch_size=2, shuffle=False))
        >>> order.lease(2).indices, order.lease(3).epoch
        (array([4]), 1)
    """

    def __init__(self, plan: SamplePlan) -> None:
        self.plan = plan
        self._order: EpochOrder | None = None

    def lease(self, batch: int) -> SampleLease:
        """Return a batch with its samples."""
        plan = self.plan
        epoch, start, stop = plan.bounds(batch)
        if not plan.shuffle:
            return SampleLease(batch, epoch, np.arange(start, stop, dtype=np.int64))
        if self._order is None or self._order.epoch != epoch:
            self._order = EpochOrder(plan.num_samples, plan.seed, epoch)
        return SampleLease(batch, epoch, self._order.samples(start, stop))


def checked_plan(
    num_samples: int, batch_size: int, epochs: int, first_epoch: int, seed: int, *, shuffle: bool, drop_last: bool
) -> tuple[SamplePlan, int, int]:
    """Return a plan, and from which batch to which (exclusive) its epochs go; raises ArgumentError if it has none."""
    for name, value, least in (
        ("num_samples", num_samples, 1),
        ("batch_size", batch_size, 1),
        ("epochs", epochs, 0),
        ("first_epoch", first_epoch, 0),
        ("seed", seed, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 63:
            raise ArgumentError(f"{name} of sample_leases() is an integer of at least {least}, got {value!r}")
    plan = SamplePlan(num_samples, batch_size, seed, bool(shuffle), bool(drop_last))
    if not plan.batches_per_epoch:
        raise ArgumentError(f"drop_last leaves out all of the {num_samples} samples: batch_size is {batch_size}")
    first, stop = (plan.batches_per_epoch * epoch for epoch in (first_epoch, epochs))
    if max(first, stop) >= MAX_BATCHES:
        raise ArgumentError(f"{epochs} epochs of {plan.batches_per_epoch} batches are more than {MAX_BATCHES} batches")
    return plan, first, max(first, stop)
