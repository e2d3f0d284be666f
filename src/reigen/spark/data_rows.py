"""Division of the rows of a data set among ranks: each row once an epoch, no padding, as many steps on every rank.

Pure: every rank makes the same plan from the numbers of rows in the row groups, and takes its part of it.

(a) Row groups are put into an order, another one in each pass over the data, and lie there end to end.
(b) Rank r of n has the rows ``[N * r // n, N * (r + 1) // n)`` of all N: ranks differ by one row at most, and a row
    group is read by two ranks only where a boundary goes through it. Both take its rows in the same order.
(c) All ranks take as many steps as the batches that the shorter parts fill. Only the last batch of a pass is of another
    size than the others. A single row that would be left is put into the batch before it (batch normalization cannot
    train on one row), so that the last batch is of 2 to ``batch_size`` + 2 rows, where there are so many.
(d) In that last step a rank's mean counts with the weight of its rows, so that the average over the ranks is the mean
    over all rows of the step, as one process would have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reigen.data.partition import permutation, share
from reigen.errors import ArgumentError

# Parts of the seeds of three kinds of orders.
_GROUPS, _ROWS, _CHUNK = 1, 2, 3


class RowRange(NamedTuple):
    """Rows of one row group: those at positions ``start`` to ``stop`` of its order."""

    group: int
    start: int
    stop: int


@dataclass(frozen=True)
class RowPlan:
    """A rank's part of the rows in each pass over the data.

    Args:
        group_rows: numbers of rows in the row groups, the same on every rank.
        num_ranks: number of ranks that divide the rows.
        rank: number of this one.
        batch_size: rows in a step of one rank.
        shuffle: False: the order of the row groups, and of the rows within them, is that of the files.
        seed: chooses the orders, the same on every rank.
        same_part: the rank has the same rows in each pass, so that they can stay in its memory.

    Raises:
        ArgumentError: the batch size is less than 1.
    """

    group_rows: Sequence[int]
    num_ranks: int
    rank: int
    batch_size: int
    shuffle: bool = True
    seed: int = 0
    same_part: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ArgumentError(f"batch_size must be at least 1, got {self.batch_size}")

    def check_enough_rows(self) -> None:
        """Raise ArgumentError if there are fewer rows than ranks: some rank would have no batch."""
        if self.total_rows < self.num_ranks:
            raise ArgumentError(
                f"{self.total_rows} rows are fewer than the {self.num_ranks} processes that train on them; "
                "set num_proc to fewer, or use more data"
            )

    @property
    def total_rows(self) -> int:
        """Number of rows of all ranks."""
        return sum(self.group_rows)

    @property
    def num_rows(self) -> int:
        """Number of this rank's rows."""
        return len(share(self.total_rows, self.num_ranks, self.rank, remainder="keep"))

    @property
    def num_steps(self) -> int:
        """Number of steps in a pass, the same on every rank."""
        least = self.total_rows // self.num_ranks
        return max(1, -(-(least - (self.batch_size > 1)) // self.batch_size))

    def batch_sizes(self) -> list[int]:
        """Return the numbers of rows in this rank's batches of a pass."""
        whole = self.num_steps - 1
        return [self.batch_size] * whole + [self.num_rows - self.batch_size * whole]

    def weight(self, step: int) -> float:
        """Return the factor of this rank's mean in a step of a pass, so that the ranks' average is that of the rows."""
        before = self.batch_size * (self.num_steps - 1)
        if step < self.num_steps - 1:
            return 1.0
        return (self.num_rows - before) * self.num_ranks / (self.total_rows - before * self.num_ranks)

    @property
    def is_even(self) -> bool:
        """True if all weights are 1, on every rank."""
        return self.total_rows % self.num_ranks == 0

    def pieces(self, number: int) -> list[RowRange]:
        """Return the rows that this rank reads in a pass (0, 1, ...), in order."""
        order = range(len(self.group_rows)) if not self.shuffle else self._permutation(number, _GROUPS)
        return cut_pieces(self.group_rows, order, share(self.total_rows, self.num_ranks, self.rank, remainder="keep"))

    def group_order(self, number: int, group: int) -> NDArray[np.int64]:
        """Return the order of a row group's rows in a pass: the numbers of the rows by their positions."""
        rows = self.group_rows[group]
        return self._permutation(number, _ROWS, group, length=rows) if self.shuffle else np.arange(rows)

    def chunk_order(self, number: int, chunk: int, length: int) -> NDArray[np.int64]:
        """Return the order of rows that are in this rank's memory at the same time, in a pass."""
        if not self.shuffle:
            return np.arange(length)
        return permutation(length, self.seed, number, _CHUNK, self.rank, chunk)

    def _permutation(self, number: int, kind: int, *more: int, length: int | None = None) -> NDArray[np.int64]:
        length = len(self.group_rows) if length is None else length
        return permutation(length, self.seed, 0 if self.same_part else number, kind, *more)


def cut_pieces(group_rows: Sequence[int], order: Sequence[int] | NDArray[np.int64], part: range) -> list[RowRange]:
    """Return the pieces of row groups, end to end in an order, that lie in a part of the positions.

    Example:
        >>> cut_pieces([4, 3, 5], [2, 0, 1], range(3, 10))
        [RowRange(group=2, start=3, stop=5), RowRange(group=0, start=0, stop=4), RowRange(group=1, start=0, stop=1)]
    """
    ends = list(accumulate(group_rows[group] for group in order))
    pieces = []
    for group, end in zip(order, ends, strict=True):
        begin = end - group_rows[group]
        start, stop = max(part.start, begin), min(part.stop, end)
        if start < stop:
            pieces.append(RowRange(int(group), start - begin, stop - begin))
    return pieces


def steps_from(plan_steps: int, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Divide steps into passes: yields pass, first step in it, and the step behind the last.

    Args:
        plan_steps: steps of a pass.
        first: number of the first step since training began.
        count: steps to take.

    Example:
        >>> list(steps_from(7, first=5, count=10))
        [(0, 5, 7), (1, 0, 7), (2, 0, 1)]
    """
    end = first + count
    while first < end:
        number, start = divmod(first, plan_steps)
        stop = min(plan_steps, start + end - first)
        yield number, start, stop
        first += stop - start
