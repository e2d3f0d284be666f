"""How the TCP plane reduces and how it cuts. Pure decisions, with their reasons.

What each algorithm costs a rank, for n ranks and S bytes: bytes that it sends, and hops on an element's longest way.

============ =================== ========= ===========================================================================
latency      (n-1) S             1         everybody sends everything to everybody and adds it up in rank order
direct       2 (n-1)/n S         2         slice r goes to rank r, which adds it up in rank order and sends it to all
ring         2 (n-1)/n S         2 (n-1)   Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
                                           workstations", 2009; partial sums go around, in the order of the ring
============ =================== ========= ===========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Algorithm = Literal["latency", "direct", "ring"]

#: What a hop may cost in bytes: about as many as travel while a message gets from one process to another.
HOP_BYTES = 1 << 16
#: The most that every rank adds up all of.
LATENCY_BYTES = 1 << 18
#: The most that is broadcast along a tree.
TREE_BYTES = 1 << 16
#: From so many ranks on large arrays go around the ring.
RING_RANKS = 1 << 30
#: Chunks: the smallest and the largest, and what all ranks' chunks of one round may take.
LEAST_BYTES, MOST_BYTES, ROUND_BYTES = 1 << 16, 1 << 20, 4 << 20
_LINE = 64


def choose(nbytes: int, size: int, requested: str = "auto") -> tuple[Algorithm, str]:
    """``(algorithm, reason)`` for an allreduce of ``nbytes`` among ``size`` ranks.

    Args:
        nbytes: of one rank's array.
        size: at least 2.
        requested: an algorithm, or ``auto``.
    """
    if requested == "latency":
        return "latency", "it was asked for"
    if requested == "direct":
        return "direct", "it was asked for"
    if requested == "ring":
        return "ring", "it was asked for"
    more = (size - 1) * (size - 2) * nbytes // size
    if more <= HOP_BYTES and nbytes <= LATENCY_BYTES:
        return "latency", f"{nbytes} bytes: one hop, for which {more} bytes more travel"
    if size >= RING_RANKS:
        return "ring", f"{size} ranks, so many that each should hear from one other at a time"
    return "direct", f"{nbytes} bytes: two hops, and sums in rank order"


def cut(begin: int, end: int, itemsize: int, size: int) -> list[tuple[int, int]]:
    """Elements ``begin`` to ``end``, which come from ``size - 1`` ranks at the same time, in chunks.

    Large ones first, because each costs some work whatever its size, then ever smaller ones: what remains to be done
    when the last one has come is done after everything else.
    """
    line = max(1, _LINE // itemsize)
    least = LEAST_BYTES // itemsize
    most = max(least, min(MOST_BYTES, ROUND_BYTES // max(1, size - 1)) // itemsize)
    chunks = []
    while begin < end:
        left = end - begin
        step = -(-max(least, min(most, left // 4)) // line) * line
        stop = end if left < step + step // 2 else begin + step
        chunks.append((begin, stop))
        begin = stop
    return chunks


def adds_in_order(size: int, requested: str = "auto") -> bool:
    """Whether sums are taken in rank order, whatever their sizes: not where partial sums may go around a ring."""
    return requested != "ring" and (requested != "auto" or size < RING_RANKS)


def stripes(count: int, itemsize: int, num_sockets: int) -> list[tuple[int, int]]:
    """``count`` elements from one rank to another, in messages that the sockets between them take in turn."""
    step = count if num_sockets == 1 else max(1, MOST_BYTES // itemsize)
    return [(begin, min(count, begin + step)) for begin in range(0, count, max(1, step))]


@dataclass(frozen=True, slots=True)
class Route:
    """How one rank's data reach all others, as one of them sees it.

    Attributes:
        before: from whom it gets them; None for the root.
        behind: to whom it passes them on, the one with most behind itself first.
        chunks: from and to which element, one message after the other.
        reason: why so.
    """

    before: int | None
    behind: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    reason: str


def route(count: int, itemsize: int, size: int, rank: int, root: int) -> Route:
    """The way of a broadcast of ``count`` elements."""
    place = (rank - root) % size  # the root is at 0
    if count * itemsize <= TREE_BYTES:
        span = size if place == 0 else place & -place
        behind = [place + step for step in (1 << k for k in reversed(range(size.bit_length()))) if step < span]
        before = place & (place - 1)
        chunks, reason = [(0, count)], f"{count * itemsize} bytes: along a tree, to reach all in few hops"
    else:
        behind, before = [place + 1], place - 1
        step = max(LEAST_BYTES, min(MOST_BYTES, count * itemsize // (8 * size))) // itemsize
        chunks = [(begin, min(count, begin + step)) for begin in range(0, count, step)]
        reason = f"{count * itemsize} bytes: in a chain, in which everybody sends them once"
    return Route(
        before=(before + root) % size if place else None,
        behind=tuple((other + root) % size for other in behind if other < size),
        chunks=tuple(chunks),
        reason=reason,
    )
