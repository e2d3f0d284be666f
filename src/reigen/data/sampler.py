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
        length: number of samples of the whole data set.
        num_parts: number of workers (``kv.num_workers``).
        part_index: number of the worker (``kv.rank``).
        shuffle: False: ascending order.
        seed: chooses the orders.
        remainder: treatment of samples that cannot be divided equally (:func:`reigen.data.share`).

    Raises:
        ArgumentError: the numbers make no sense, or every part would be empty.

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
        self._length, self._shuffle, self._seed = length, shuffle, seed
        self._share = share(length, num_parts, part_index, remainder=remainder)
        self._part_index = part_index
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
        positions = np.arange(self._share.start, self._share.stop) % max(self._length, 1)
        if self._shuffle:
            # Parts that wrap around share samples: they are not to come at the same moment, so parts differ in order.
            positions = positions[_permutation(len(positions), self._seed, epoch, self._part_index + 1)]
        return positions


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
        positions = np.arange(self._share.start, self._share.stop) % max(self._length, 1)
        return _permutation(self._length, self._seed, epoch)[positions] if self._shuffle else positions


def _permutation(length: int, *seeds: int) -> NDArray[np.int64]:
    # RandomState's numbers are the same in every version of NumPy: workers need not have the same one.
    numbers = [number for seed in seeds for number in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)]
    order: NDArray[np.int64] = np.random.RandomState(numbers).permutation(length).astype(np.int64, copy=False)
    return order
