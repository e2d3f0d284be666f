"""Samplers for a worker's part of a data set, for ``torch.utils.data.DataLoader(sampler=...)``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from reigen.data.partition import Remainder, share
from reigen.errors import ArgumentError


class SplitSampler:
    """Sampler of always the same part of the data set, in another order each time: the part fits a worker's cache.

    Iterating uses the order of the current epoch and goes on to the next one.

    Args:
        length, num_parts, part_index, remainder: those of :func:`reigen.data.share`, and so are the errors.
        shuffle: False: ascending order.
        seed: chooses the orders.
    """

    def __init__(
        self,
        length: int,
        num_parts: int = 1,
        part_index: int = 0,
        *,
        shuffle: bool = True,
        seed: int = 0,
        remainder: Remainder = "drop",
    ) -> None:
        self._length, self._part_index, self._shuffle, self._seed = length, part_index, shuffle, seed
        own = share(length, num_parts, part_index, remainder=remainder)
        self._share: NDArray[np.int64] = np.arange(own.start, own.stop) % max(length, 1)
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._share)

    def __iter__(self) -> Iterator[int]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        yield from self._positions(epoch).tolist()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order comes next, to go on from a checkpoint; raises ArgumentError: it is negative."""
        if epoch < 0:
            raise ArgumentError(f"the epoch cannot be negative, got {epoch}")
        self._epoch = epoch

    def _positions(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return self._share
        # Parts that wrap around share samples: they are not to come at the same moment, so parts differ in order.
        return self._share[_permutation(len(self._share), self._seed, epoch, self._part_index + 1)]


class ShuffleSplitSampler(SplitSampler):
    """Sampler of another part of the data set each epoch: one permutation of everything, cut into parts.

    All workers make the same permutation from seed and epoch, so that a sample is used by one of them: give them the
    same seed, and let them be in the same epoch (:meth:`set_epoch`, where some worker iterates more often).

    Example:
        >>> parts = [ShuffleSplitSampler(10, num_parts=2, part_index=index, seed=1) for index in range(2)]
        >>> sorted(position for part in parts for position in part)
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def _positions(self, epoch: int) -> NDArray[np.int64]:
        return _permutation(self._length, self._seed, epoch)[self._share] if self._shuffle else self._share


def _permutation(length: int, *seeds: int) -> NDArray[np.int64]:
    # RandomState's numbers are the same in every version of NumPy: workers need not have the same one.
    numbers = [number for seed in seeds for number in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)]
    order: NDArray[np.int64] = np.random.RandomState(numbers).permutation(length).astype(np.int64, copy=False)
    return order
