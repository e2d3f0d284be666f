"""Sets of ranks as integers: bit r stands for rank r. Union and comparison take the same time for any job's ranks."""

from __future__ import annotations

from collections.abc import Iterable


def to_mask(ranks: Iterable[int]) -> int:
    """Return the ranks as one integer."""
    mask = 0
    for rank in ranks:
        mask |= 1 << rank
    return mask


def to_ranks(mask: int) -> tuple[int, ...]:
    """Return the ranks of an integer, in ascending order."""
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return tuple(found)


def lowest_rank(mask: int) -> int:
    """Return the lowest rank of a mask that is not empty."""
    return (mask & -mask).bit_length() - 1


def to_bytes(mask: int) -> tuple[int, bytes]:
    """Return the lowest rank of a mask that is not empty, and the mask from there on as bytes, little-endian."""
    first = lowest_rank(mask)
    mask >>= first
    return first, mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def from_bytes(first: int, data: bytes) -> int:
    """Return the mask of `to_bytes`."""
    return int.from_bytes(data, "little") << first
