"""Sets of times, as intervals ``(begin, end)``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals: the same times, in order, with gaps between them."""
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
    """Intersect two lists of merged intervals: the times in both."""
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
    """Return their length together."""
    return sum(end - begin for begin, end in intervals)
