"""Sets of times, as intervals ``(begin, end)``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times, as intervals in order that neither touch nor overlap.

    Example:
        >>> union([(3, 4), (0, 1), (0.5, 2), (5, 5)])
        [(0, 2), (3, 4)]
    """
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if begin >= end:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def intersect_intervals(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The times in both; each must be a `merge_intervals`.

    Example:
        >>> intersection([(0, 2), (3, 6)], [(1, 4), (5, 9)])
        [(1, 2), (3, 4), (5, 6)]
    """
    found: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            found.append((begin, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return found


def total_length(intervals: Iterable[Interval]) -> float:
    """How long they are together.

    Example:
        >>> total([(0, 2), (3, 6)])
        5
    """
    return sum(end - begin for begin, end in intervals)
