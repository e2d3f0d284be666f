"""Permutation of a data set by a key, any part of which can be computed alone: no array of its length. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

#: Places whose samples are computed at a time: for a batch alone, NumPy's calls would take longer than what they do.
_NUM_PLACES = 4096
_ROUNDS = 8
_WORD = (1 << 64) - 1
#: splitmix64 (Steele, Lea and Flood: Fast Splittable Pseudorandom Number Generators, 2014)
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix(word: int) -> int:
    """Return 64 bits that depend on every bit of a word."""
    word = (word ^ (word >> 30)) * _FIRST & _WORD
    word = (word ^ (word >> 27)) * _SECOND & _WORD
    return word ^ (word >> 31)


class KeyedPermutation:
    """Bijection of 0 .. length - 1: a Feistel network on the next power of four, with cycle walking.

    What the network maps beyond the length is mapped again until it is below: that is a bijection of the rest (Black
    and Rogaway: Ciphers with Arbitrary Finite Domains, 2002). There are fewer than four passes on average.

    Args:
        length: of the domain; at least 1.
        key: integers, whose order counts; other ones give another bijection.

    Example::

        >>> permutation = KeyedPermutation(10, (1, 0))
        >>> sorted(permutation(np.arange(10)).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, length: int, key: tuple[int, ...]) -> None:
        assert length >= 1
        self._length = length
        self._bits = np.uint64(max(1, -(-(length - 1).bit_length() // 2)))
        self._mask = np.uint64((1 << int(self._bits)) - 1)
        word = 0
        for part in key:
            word = _mix((word + _STEP + (part & _WORD)) & _WORD)
        self._keys = [np.uint64(_mix((word + _STEP * (number + 1)) & _WORD)) for number in range(_ROUNDS)]

    def __call__(self, places: Indices) -> Indices:
        """Return the images of these places; int64, of the same shape.

        Args:
            places: int64, each of 0 .. length - 1.
        """
        found = self._network(places.astype(np.uint64))
        while (beyond := found >= self._length).any():
            found[beyond] = self._network(found[beyond])
        return found.astype(np.int64)

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._bits, values & self._mask
        for key in self._keys:
            mixed = right + key
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & self._mask)
        return (left << self._bits) | right


class EpochOrder:
    """Order of the samples of an epoch, of which the part that the next calls are likely to ask for is kept.

    Attributes:
        epoch: whose order it is.
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        self.epoch, self._length = epoch, length
        self._permutation = KeyedPermutation(length, (seed, epoch))
        self._first, self._kept = 0, np.empty(0, np.int64)
        #: where the last call began; None: there was none
        self._last: int | None = None

    def samples(self, first: int, last: int) -> Indices:
        """Return the samples at these places, in an array of the caller's own."""
        before, self._last = self._last, first
        if not self._first <= first <= last <= self._first + len(self._kept):
            asks_again = before is None or 0 <= first - before < _NUM_PLACES // 2
            if last - first >= _NUM_PLACES or not asks_again:
                return self._permutation(np.arange(first, last, dtype=np.int64))
            end = min(first + _NUM_PLACES, self._length)
            self._first, self._kept = first, self._permutation(np.arange(first, end, dtype=np.int64))
        return self._kept[first - self._first : last - self._first].copy()
