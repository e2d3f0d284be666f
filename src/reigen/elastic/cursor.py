"""Cursor: one place in the samples for all members of a job, from which the samples of each step are dealt. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from reigen.data.permutation import EpochOrder, Indices
from reigen.errors import ArgumentError


class SampleInterval(NamedTuple):
    """Samples of one step: places ``start`` to ``stop`` (exclusive) in an epoch's order."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of samples."""
        return self.stop - self.start


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Samples of a step that a rank takes together: one forward and backward.

    Attributes:
        number: of the part among those of all ranks in the step.
        indices: of the samples in the data set, int64.
        share: of the step's samples, these; what the mean over them counts in the mean over the step.
    """

    number: int
    indices: Indices
    share: float

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.indices)


class Cursor:
    """Order of the samples, and how many of them have been taken; the same on all members.

    Each epoch has its own order, a permutation that is computed where it is needed, so that a cursor is some integers,
    however long the data set is. Each step takes the next interval of it. No sample is taken twice in an epoch and
    none is left out; the last step of an epoch may be shorter.

    Args:
        length: number of samples.
        global_batch: samples of a step, of all ranks together, however many these are.
        seed: of the order.
        epoch, position: where to begin; samples of the epoch that have been taken.
        per_rank_batch: instead of ``global_batch``: samples of a step for each rank that there is.
        shuffle: False: in the order of the data set.
        drop_last: leave out a last step that would be shorter.

    Attributes:
        epoch, position: where the next step begins.

    Raises:
        ArgumentError: an argument makes no sense.

    Example::

        >>> cursor = Cursor(10, global_batch=4, seed=1)
        >>> interval = cursor.next_interval(size=2)
        >>> [len(part) for part in cursor.deal(interval, rank=0, size=2)]
        [2]
        >>> cursor.move_behind(interval)
        >>> cursor.position
        4
    """

    def __init__(
        self,
        length: int,
        global_batch: int | None = None,
        seed: int = 0,
        epoch: int = 0,
        position: int = 0,
        *,
        per_rank_batch: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        if (global_batch is None) == (per_rank_batch is None):
            raise ArgumentError("a Cursor needs either global_batch or per_rank_batch")
        for name, value, least in (
            ("length", length, 1),
            ("global_batch", 1 if global_batch is None else global_batch, 1),
            ("per_rank_batch", 1 if per_rank_batch is None else per_rank_batch, 1),
            ("epoch", epoch, 0),
            ("position", position, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ArgumentError(f"{name} of a Cursor must be an integer of at least {least}, got {value!r}")
        if drop_last and length < (global_batch or 1):
            raise ArgumentError(f"drop_last leaves out all of the {length} samples: global_batch is {global_batch}")
        self.length, self.global_batch, self.per_rank_batch = length, global_batch, per_rank_batch
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.epoch, self.position = epoch, min(position, length)
        self._order: EpochOrder | None = None

    def next_interval(self, size: int) -> SampleInterval:
        """Return the samples of the next step; the cursor stays.

        Args:
            size: number of ranks; it counts only with ``per_rank_batch``.

        Raises:
            ArgumentError: with ``drop_last`` and so many ranks there is no step at all.
        """
        wanted = self._batch(size)
        epoch, start = self.epoch, self.position
        if start >= self.length or (self.drop_last and start + wanted > self.length):
            epoch, start = epoch + 1, 0
            if self.drop_last and wanted > self.length:
                raise ArgumentError(f"drop_last leaves out all of the {self.length} samples: a step takes {wanted}")
        return SampleInterval(epoch, start, min(start + wanted, self.length))

    def move_behind(self, interval: SampleInterval) -> None:
        """Begin the next step behind these samples."""
        self.epoch, self.position = interval.epoch, interval.stop

    def num_steps_behind(self, interval: SampleInterval, num_epochs: int, size: int) -> int:
        """Return how many steps of so many ranks follow these samples until so many epochs are over."""
        batch = self._batch(size)

        def num_steps(num_samples: int) -> int:
            return num_samples // batch if self.drop_last else -(-num_samples // batch)

        return num_steps(self.length - interval.stop) + num_steps(self.length) * (num_epochs - 1 - interval.epoch)

    def is_last(self, interval: SampleInterval, size: int) -> bool:
        """Return whether this is the last step of its epoch."""
        left = self.length - interval.stop
        return left < (self._batch(size) if self.drop_last else 1)

    def deal(self, interval: SampleInterval, rank: int, size: int, num_parts: int | None = None) -> tuple[Part, ...]:
        """Return a rank's parts of a step; of all ranks together, in order, they are the interval.

        Args:
            interval: of the step.
            rank: which one.
            size: how many share the samples.
            num_parts: into how many parts the step is divided, whoever takes them; None: one for each rank. There are
                fewer where there are fewer samples.

        Returns:
            Nothing where there are fewer parts than ranks, and this one gets none.
        """
        count = size if num_parts is None else num_parts
        own = range(rank, rank + 1) if num_parts is None else range(*interval_bounds(num_parts, size, rank))
        bounds = [(number, *interval_bounds(interval.size, count, number)) for number in own]
        return tuple(
            Part(number, self.indices(interval, start, stop), (stop - start) / interval.size)
            for number, start, stop in bounds
            if stop > start
        )

    def indices(self, interval: SampleInterval, start: int, stop: int) -> Indices:
        """Return the samples at some places of an interval, counted from its beginning; int64."""
        first, last = interval.start + start, interval.start + stop
        if not self.shuffle:
            return np.arange(first, last, dtype=np.int64)
        if self._order is None or self._order.epoch != interval.epoch:
            self._order = EpochOrder(self.length, self.seed, interval.epoch)
        return self._order.samples(first, last)

    def state_dict(self) -> dict[str, int]:
        """Return where the next step begins, and in which order of samples that is."""
        order = {"length": self.length, "seed": self.seed, "shuffle": self.shuffle}
        return {"epoch": self.epoch, "position": self.position, **order}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Begin the next step where `state_dict` was taken, whatever the number of ranks was there.

        Raises:
            ArgumentError: that is within an epoch of another order: samples would be missing or come twice.
        """
        own, position = self.state_dict(), state_dict["position"]
        saved = {name: state_dict.get(name, own[name]) for name in ("length", "seed", "shuffle")}
        if position >= saved["length"]:
            position = self.length  # the epoch is done
        elif position and any(saved[name] != own[name] for name in saved):
            orders = [", ".join(f"{name}={values[name]!r}" for name in saved) for values in (saved, own)]
            raise ArgumentError(
                f"the state is of a Cursor with {orders[0]}, {position} samples into an epoch, and this "
                f"one has {orders[1]}: samples would be missing or come twice in that epoch. Go on with the same data "
                "and seed, or from a checkpoint of an epoch's end"
            )
        self.epoch, self.position = state_dict["epoch"], position

    def describe(self) -> list[str]:
        """Return what must be the same on all members, in lines."""
        batch = f"global_batch={self.global_batch}, per_rank_batch={self.per_rank_batch}"
        return [f"length={self.length}, {batch}, seed={self.seed}, shuffle={self.shuffle}, drop_last={self.drop_last}"]

    def _batch(self, size: int) -> int:
        return self.global_batch if self.global_batch is not None else (self.per_rank_batch or 1) * size


def interval_bounds(total: int, count: int, number: int) -> tuple[int, int]:
    """Return the bounds of one of ``count`` intervals of nearly equal length of 0 .. total - 1."""
    return total * number // count, total * (number + 1) // count
