"""Algorithms of the TCP backend: which one reduces, and into which chunks data are cut. Pure functions.

Costs of each algorithm for a rank, of n ranks and S bytes: bytes sent, and hops on an element's longest way.

============ =================== ========= ===========================================================================
latency      (n-1) S             1         each rank sends everything to all others and adds it up in rank order
direct       2 (n-1)/n S         2         slice r goes to rank r, which adds it up in rank order and sends it to all
ring         2 (n-1)/n S         2 (n-1)   Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
                                           workstations", 2009; partial sums go around, in the order of the ring
============ =================== ========= ===========================================================================
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

from reigen.backends.buffer_list import rank_slice

#: First element and end.
ElementRange = tuple[int, int]
Algorithm = Literal["latency", "direct", "ring"]

#: Cost of a hop in bytes: about as many as travel while a message gets from one process to another.
HOP_BYTES = 1 << 16
#: Limit for adding up everything on every rank; between two ranks, where that sends no more bytes, it is one hop less.
LATENCY_BYTES = 1 << 20
#: Limit for a broadcast along a tree.
TREE_BYTES = 1 << 16
#: From so many ranks on arrays of so many bytes go around the ring. Among 4 hosts, each with 100 Mbit/s and a queue of
#: 20 ms, both ways get 96 % of the wire; among 5 to 6 the direct one gets 93 %, among 8 it gets 90 %.
RING_RANKS, RING_BYTES = 8, 1 << 22
#: Chunks of one message: the last, and the largest.
LEAST_BYTES, MOST_BYTES = 1 << 16, 1 << 20
#: Rows of a chunk for each rank: the last, and the largest where its chunks are not too small then. Some rows are on
#: their way at once, and what exceeds the network's queues is dropped: with 4 hosts, each with 200 Mbit/s, 5 ms one way
#: and a queue of 100 ms, rows of 1.6 MB took 3.1 s for 25 MiB (600 packets sent again), rows of 512 KiB take 1.73 s;
#: 1.93 s where only the last MiB, not the last two, is in smaller ones.
LEAST_ROW_BYTES, MOST_ROW_BYTES = 1 << 17, 1 << 19
#: The same between two ranks: no rank receives from two at once, so nothing piles up; fewer messages are less work.
LEAST_PAIR_BYTES, MOST_PAIR_BYTES = 1 << 18, 1 << 20
#: By so many of the largest rows contributions are ahead of sums, and by more rows where they are small, at the end: a
#: sum can leave when the last contribution to it has come, and until then others are to fill the wire. With 4, four
#: hosts with 200 Mbit/s, 5 ms one way and a queue of 100 ms sent four times as many packets again
#: (one run, on a busy host).
ROWS_AHEAD = 3
_LINE = 64
#: Number of cuts that are cached: the same arrays come again and again.
_MOST_PLANS = 64


def choose_algorithm(nbytes: int, size: int, requested: str = "auto") -> tuple[Algorithm, str]:
    """Choose ``(algorithm, reason)`` for an allreduce of ``nbytes`` among ``size`` ranks.

    Args:
        nbytes: of one rank's array.
        size: at least 2.
        requested: an algorithm, or ``auto``, or ``ordered``: the same, but sums of all sizes are taken in rank order.
    """
    if requested not in {"auto", "ordered"}:
        return cast("Algorithm", requested), "it was asked for"
    more = (size - 1) * (size - 2) * nbytes // size
    if more <= HOP_BYTES and nbytes <= LATENCY_BYTES:
        return "latency", f"{nbytes} bytes: one hop, for which {more} bytes more travel"
    if size >= RING_RANKS and nbytes >= RING_BYTES and requested == "auto":
        return "ring", f"{nbytes} bytes and {size} ranks: each hears from one other, so that nothing piles up before it"
    return "direct", f"{nbytes} bytes: two hops, and sums in rank order"


@functools.lru_cache(maxsize=_MOST_PLANS)
def cut_chunks(
    begin: int, end: int, itemsize: int, most_bytes: int = MOST_BYTES, least_bytes: int = LEAST_BYTES, divisor: int = 4
) -> tuple[ElementRange, ...]:
    """Cut elements ``begin`` to ``end`` in chunks: large ones first, as each costs some work, then ever smaller ones.

    Work on the last chunk is done after everything else, so that one is small. None is
    more than one ``divisor``-th of what is left, unless it is of the least size.
    """
    line = max(1, _LINE // itemsize)
    most, least = most_bytes // itemsize, least_bytes // itemsize
    chunks = []
    while begin < end:
        remaining = end - begin
        step = -(-max(least, min(most, remaining // divisor)) // line) * line
        stop = end if remaining < step + step // 2 else begin + step
        chunks.append((begin, stop))
        begin = stop
    return tuple(chunks)


@functools.lru_cache(maxsize=_MOST_PLANS)
def make_rows(count: int, itemsize: int, size: int) -> tuple[tuple[ElementRange, ...], ...]:
    """Cut ``count`` elements in rows, each of which has a chunk for every rank, in their order; some may be empty."""
    most, least, divisor = max(MOST_ROW_BYTES, size * LEAST_BYTES), LEAST_ROW_BYTES, 4
    if size == 2:
        most, least, divisor = MOST_PAIR_BYTES, LEAST_PAIR_BYTES, 2
    rows = []
    for begin, end in cut_chunks(0, count, itemsize, most, least, divisor):
        slices = (rank_slice(end - begin, rank, size, itemsize) for rank in range(size))
        rows.append(tuple((begin + low, begin + high) for low, high in slices))
    return tuple(rows)


def make_owner_rows(bounds: Sequence[ElementRange], itemsize: int) -> list[list[ElementRange]]:
    """Make rows that give every rank the elements between its bounds."""
    size = len(bounds)
    columns = [cut_chunks(*span, itemsize, max(LEAST_BYTES, MOST_ROW_BYTES // size), LEAST_BYTES) for span in bounds]
    return [list(row) for row in itertools.zip_longest(*columns, fillvalue=(0, 0))]


def rows_ahead(rows: Sequence[Sequence[ElementRange]], itemsize: int) -> tuple[int, ...]:
    """Return how many rows' contributions leave before anything is complete, before row 1 is, and so on, up to all.

    Before row r is complete there have left those to the rows from r on that have as many bytes as `ROWS_AHEAD` of the
    largest, and to no fewer than `ROWS_AHEAD`.
    """
    most = ROWS_AHEAD * (MOST_PAIR_BYTES if len(rows[0]) == 2 else MOST_ROW_BYTES) // itemsize if rows else 0
    ends = [*itertools.accumulate((sum(end - begin for begin, end in row) for row in rows), initial=0)]
    return tuple(
        min(len(rows), max(row + ROWS_AHEAD, bisect.bisect_right(ends, ends[row] + most) - 1))
        for row in range(len(ends))
    )


def adds_in_order(size: int, requested: str = "auto") -> bool:
    """Return whether sums of all sizes are taken in rank order: not where partial sums may go around a ring."""
    return requested != "ring" and (requested != "auto" or size < RING_RANKS)


def stripe_messages(count: int, itemsize: int, num_sockets: int) -> list[tuple[int, int]]:
    """Cut ``count`` elements from one rank to another into messages that the sockets between them take in turn."""
    step = count if num_sockets == 1 else max(1, MOST_BYTES // itemsize)
    return [(begin, min(count, begin + step)) for begin in range(0, count, max(1, step))]


@dataclass(frozen=True, slots=True)
class BroadcastRoute:
    """Route of one rank's data to all others, as one of them sees it.

    Attributes:
        parent: the rank that it receives them from; None for the root.
        children: the ranks that it passes them on to, the one with most descendants first.
        chunks: first element and end, one message after the other.
        reason: why so.
    """

    parent: int | None
    children: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    reason: str


def plan_broadcast(count: int, itemsize: int, size: int, rank: int, root: int) -> BroadcastRoute:
    """Plan the broadcast of ``count`` elements."""
    place = (rank - root) % size  # the root is at 0
    if count * itemsize <= TREE_BYTES:
        span = size if place == 0 else place & -place
        children = [place + step for step in (1 << k for k in reversed(range(size.bit_length()))) if step < span]
        parent = place & (place - 1)
        chunks, reason = [(0, count)], f"{count * itemsize} bytes: along a tree, to reach all in few hops"
    else:
        children, parent = [place + 1], place - 1
        step = max(LEAST_BYTES, min(MOST_BYTES, count * itemsize // (8 * size))) // itemsize
        chunks = [(begin, min(count, begin + step)) for begin in range(0, count, step)]
        reason = f"{count * itemsize} bytes: in a chain, in which every rank sends them once"
    return BroadcastRoute(
        parent=(parent + root) % size if place else None,
        children=tuple((other + root) % size for other in children if other < size),
        chunks=tuple(chunks),
        reason=reason,
    )
