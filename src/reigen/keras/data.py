"""Each rank's part of the data, in as many batches on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import keras
import numpy as np
from numpy.typing import NDArray

from reigen import context
from reigen.api.process_sets import ProcessSet, global_process_set, process_set_number
from reigen.errors import ArgumentError

Uneven = Literal["repeat", "drop"]


def shard(
    *arrays: Any,
    uneven: Uneven = "repeat",
    shuffle_seed: int | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return this rank's rows of arrays, for ``fit(x, y)``: as many on every rank, so that all take as many steps.

    Rank 0 has rows 0, size, 2 * size, ... Where the number of rows is no multiple of the number of ranks, some of the
    first rows are on two ranks, or the last rows on none.

    Args:
        arrays: NumPy arrays, or what can be indexed by an array of row numbers, all with as many rows.
        uneven: repeat rows, or drop them.
        shuffle_seed: shuffle the rows before, the same way on every rank.
        process_set: whose ranks divide the data.

    Returns:
        The array; or a tuple, if there are several.

    Raises:
        ArgumentError: there is no array; they differ in their numbers of rows, or have fewer than there are ranks.
    """
    if not arrays or len({len(array) for array in arrays}) != 1:
        raise ArgumentError(f"arrays with as many rows are needed, got {[len(array) for array in arrays]}")
    order = np.arange(len(arrays[0]))
    if shuffle_seed is not None:
        order = np.random.default_rng(shuffle_seed).permutation(order)
    rows = _take_share(order, uneven, process_set)
    parts = tuple(array[rows] for array in arrays)
    return parts[0] if len(parts) == 1 else parts


class ShardedDataset(keras.utils.PyDataset):
    """Dataset of a rank's batches of another one: as many on every rank, so that all take as many steps.

    Rank 0 has batches 0, size, 2 * size, ... Where their number is no multiple of the number of ranks, some of the
    first ones are on two ranks, or the last ones on none. Batches may differ in size: each counts the same in an
    average of gradients, so a last batch of fewer samples counts for more than these.

    Args:
        dataset: of ``keras.utils.PyDataset``, of as many batches on every rank, at least as many as there are ranks.
        uneven: repeat batches, or drop them.
        process_set: whose ranks divide the data.

    Raises:
        ArgumentError: there are fewer batches than ranks.
    """

    def __init__(self, dataset: Any, uneven: Uneven = "repeat", process_set: ProcessSet = global_process_set) -> None:
        super().__init__(
            workers=dataset.workers,
            use_multiprocessing=dataset.use_multiprocessing,
            max_queue_size=dataset.max_queue_size,
        )
        self.dataset = dataset
        self._batches = _take_share(np.arange(dataset.num_batches), uneven, process_set)

    @property
    def num_batches(self) -> int:
        """Number of batches on each rank."""
        return len(self._batches)

    def __len__(self) -> int:
        """Return the number of batches on each rank."""
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        """Return a batch."""
        return self.dataset[int(self._batches[index])]

    def on_epoch_begin(self) -> None:
        """Hand it on."""
        self.dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Hand it on: the dataset may shuffle, the same way on every rank."""
        self.dataset.on_epoch_end()


def _take_share(order: NDArray[Any], uneven: Uneven, process_set: ProcessSet) -> NDArray[Any]:
    job = context.current()
    ranks: Sequence[int] = job.process_sets[process_set_number(process_set)]
    if job.rank not in ranks:
        raise ArgumentError(f"rank {job.rank} is not in the process set of ranks {list(ranks)}")
    size, number = len(ranks), list(ranks).index(job.rank)
    if len(order) < size:
        raise ArgumentError(f"{len(order)} are fewer than {size} ranks")
    if uneven == "drop":
        order = order[: len(order) - len(order) % size]
    elif uneven == "repeat":
        order = np.concatenate([order, order[: -len(order) % size]])
    else:
        raise ArgumentError(f'uneven must be "repeat" or "drop", got {uneven!r}')
    return order[number::size]
