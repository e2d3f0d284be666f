"""Part of a data set that belongs to one of several workers, and samplers of it.

The samplers are for ``torch.utils.data.DataLoader(sampler=...)``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from reigen.errors import ArgumentError

#: Treatment of the samples that are too few to give every part one more: ``drop`` them, so that all parts are
#: equally long; ``pad`` the parts with samples of others, so that all are equally long and none is left out; ``keep``
#: them, so that parts differ by one sample.
Remainder = Literal["drop", "pad", "keep"]


def share(length: int, num_parts: int = 1, part_index: int = 0, *, remainder: Remainder = "drop") -> range:
    """Return the positions of part ``part_index`` of a data set of ``length`` samples: consecutive ones.

    Parts of different length make workers take different numbers of steps, and a synchronous store would wait for the
    last batch of a worker that has none. So parts are equally long unless ``remainder="keep"`` asks for the exact
    division, ``[length * i // num_parts, length * (i + 1) // num_parts)``; then call ``Trainer.leave()`` at the end.

    Args:
        length: number of samples.
        num_parts: number of workers (``kv.num_workers``).
        part_index: number of the worker (``kv.rank``).
        remainder: see :data:`Remainder`. With ``pad``, positions may lie behind the end: take them modulo ``length``.

    Raises:
        ArgumentError: the numbers make no sense, or every part would be empty though there are samples.

    Example:
        >>> [list(share(10, 3, i, remainder="keep")) for i in range(3)]
        [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
        >>> [share(10, 3, i) for i in range(3)]
        [range(0, 3), range(3, 6), range(6, 9)]
    """
    if length < 0:
        raise ArgumentError(f"the number of samples cannot be negative, got {length}")
    if num_parts < 1:
        raise ArgumentError(f"num_parts must be at least 1, got {num_parts}")
    if not 0 <= part_index < num_parts:
        raise ArgumentError(f"part_index must be from 0 to {num_parts - 1}, got {part_index}")
    if remainder not in get_args(Remainder):
        raise ArgumentError(f"remainder must be one of {', '.join(get_args(Remainder))}, got {remainder!r}")
    if remainder == "keep":
        return range(length * part_index // num_parts, length * (part_index + 1) // num_parts)
    each = -(-length // num_parts) if remainder == "pad" else length // num_parts
    if length and not each:
        raise ArgumentError(
            f"{length} samples are too few for {num_parts} equal parts: each would be empty; "
            'use fewer parts, or remainder="pad", which gives samples to several'
        )
    return range(each * part_index, each * (part_index + 1))


def share_length(length: int, num_parts: int = 1, part_index: int = 0, *, remainder: Remainder = "drop") -> int:
    """Return the number of samples in :func:`share`; raises ArgumentError as that does."""
    return len(share(length, num_parts, part_index, remainder=remainder))


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
        return self._share[permutation(len(self._share), self._seed, epoch, self._part_index + 1)]


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
        return permutation(self._length, self._seed, epoch)[self._share] if self._shuffle else self._share


def permutation(length: int, *seeds: int) -> NDArray[np.int64]:
    """Return the numbers from 0 to ``length`` - 1 in an order that is the same for the same seeds, on every worker."""
    # RandomState's numbers are the same in every version of NumPy: workers need not have the same one.
    numbers = [number for seed in seeds for number in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)]
    order: NDArray[np.int64] = np.random.RandomState(numbers).permutation(length).astype(np.int64, copy=False)
    return order
