"""Float32 arrays that are filled before each operation and checked after it: what all collectives' cases share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.work import WrongResultError

Array = NDArray[np.float32]


class SumOf:
    """A `Work`: rank r fills arrays with r + 1, an operation sums them over the ranks in place.

    Fresh data for every operation, as backward writes it: it is in the cache of the core that wrote it.

    Args:
        arrays: this rank's, float32.
        rank: of ``size``.
        size: number of ranks.
        operate: sums the arrays in place; returns when they are complete here.
        release: gives back what the case needed.
    """

    def __init__(
        self,
        arrays: Sequence[Array],
        rank: int,
        size: int,
        operate: Callable[[], Any],
        release: Callable[[], None] = lambda: None,
    ) -> None:
        self.operate = operate
        self.close = release
        self._arrays = arrays
        self._mine, self._sum = rank + 1, size * (size + 1) / 2

    def prepare(self) -> None:
        """Write this rank's contribution."""
        for array in self._arrays:
            array.fill(self._mine)

    def check(self) -> None:
        """Every element is the closed form's.

        Raises:
            WrongResultError: one is not.
        """
        for number, array in enumerate(self._arrays):
            if not (array == self._sum).all():
                wrong = array[array != self._sum][0]
                raise WrongResultError(f"array {number}: the sum is {self._sum:g}, not {wrong:g}")
