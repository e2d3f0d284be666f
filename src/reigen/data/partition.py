"""Part of a data set that belongs to one of several workers."""

from __future__ import annotations

from typing import Literal, get_args

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
