"""How the TCP backend cuts and which way it takes: decisions without any connection."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from reigen.backends.tcp.algorithm import (
    LEAST_BYTES,
    MOST_BYTES,
    RING_BYTES,
    RING_RANKS,
    ROWS_AHEAD,
    TREE_BYTES,
    ElementRange,
    adds_in_order,
    choose_algorithm,
    cut_chunks,
    make_owner_rows,
    make_rows,
    plan_broadcast,
    rows_ahead,
    stripe_messages,
)
from reigen.config import TCP_ALGORITHMS

SIZES = (2, 3, 4, 5, 8, 13, 40)
MIB = 1 << 20


def reach(spans: Sequence[ElementRange]) -> ElementRange:
    """From where to where spans lead that follow each other without a gap; empty ones count."""
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(spans))
    return spans[0][0], spans[-1][1]


@pytest.mark.parametrize(
    ("nbytes", "size", "algorithm"),
    [
        (4, 2, "latency"),
        (1 << 18, 2, "latency"),
        (MIB, 2, "latency"),
        (MIB + 4, 2, "direct"),
        (25 * MIB, 2, "direct"),
        (1 << 16, 3, "latency"),
        (1 << 16, 4, "direct"),
        (1 << 10, 13, "latency"),
        (1 << 13, 13, "direct"),
        (25 * MIB, RING_RANKS - 1, "direct"),
        (25 * MIB, RING_RANKS, "ring"),
        (RING_BYTES - 1, RING_RANKS, "direct"),
    ],
)
def test_the_size_and_the_number_of_ranks_decide(nbytes: int, size: int, algorithm: str) -> None:
    chosen, reason = choose_algorithm(nbytes, size)
    assert chosen == algorithm
    assert str(nbytes) in reason


@pytest.mark.parametrize("algorithm", [name for name in TCP_ALGORITHMS if name not in {"auto", "ordered"}])
def test_who_asks_for_an_algorithm_gets_it(algorithm: str) -> None:
    for nbytes in (4, 100 * MIB):
        assert choose_algorithm(nbytes, 2, algorithm) == (algorithm, "it was asked for")


def test_sums_have_an_order_unless_some_array_may_go_around_a_ring() -> None:
    for size in SIZES:
        for requested in TCP_ALGORITHMS:
            used = {choose_algorithm(nbytes, size, requested)[0] for nbytes in (1, 1 << 17, RING_BYTES, 100 * MIB)}
            assert adds_in_order(size, requested) == ("ring" not in used)


@pytest.mark.parametrize("itemsize", [1, 2, 8])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 8191, 8193, 100_003, 3_276_801])
def test_chunks_follow_each_other_and_become_small(count: int, itemsize: int) -> None:
    chunks = cut_chunks(7, 7 + count, itemsize)
    assert (reach(chunks) if count else (7, 7)) == (7, 7 + count)
    lengths = [(end - begin) * itemsize for begin, end in chunks]
    assert all(0 < length <= 1.5 * MOST_BYTES + 64 for length in lengths)
    assert all(later <= earlier for earlier, later in itertools.pairwise(lengths[:-1]))
    assert not lengths or lengths[-1] <= 1.5 * LEAST_BYTES + 64
    assert all(length * itemsize % 64 == 0 for length in (end - begin for begin, end in chunks[:-1]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 1000, 100_003, 26_214_400])
def test_rows_give_every_rank_its_part_of_every_element_once(count: int, size: int) -> None:
    rows = make_rows(count, 4, size)
    spans = [span for row in rows for span in row]
    assert all(len(row) == size for row in rows)
    assert reach(spans) == (0, count)
    assert max((end - begin) * 4 for begin, end in spans) <= 1.5 * MOST_BYTES


@pytest.mark.parametrize("size", SIZES)
def test_what_is_ahead_in_rows_does_not_grow_with_the_array(size: int) -> None:
    for count in (100_003, 26_214_400):
        lengths = [row[-1][1] - row[0][0] for row in make_rows(count, 4, size)]
        assert max(lengths) * 4 <= 1.5 * max(1 << (20 if size == 2 else 19), size << 16)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 1000, 100_003, 26_214_400])
def test_contributions_are_ahead_of_sums_by_as_many_bytes_at_the_end_as_at_the_beginning(count: int, size: int) -> None:
    rows = make_rows(count, 4, size)
    nbytes = [4 * (row[-1][1] - row[0][0]) for row in rows]
    ahead = rows_ahead(rows, 4)
    assert len(ahead) == len(rows) + 1
    assert ahead[-1] == len(rows)
    assert all(earlier <= later for earlier, later in itertools.pairwise(ahead))
    wanted = ROWS_AHEAD << (20 if size == 2 else 19)
    for row, reached in enumerate(ahead):
        assert reached >= min(len(rows), row + ROWS_AHEAD)
        assert reached == len(rows) or sum(nbytes[row : reached + 1]) > wanted
        assert sum(nbytes[row:reached]) <= wanted or reached == row + ROWS_AHEAD


def test_nothing_is_ahead_where_there_are_no_rows() -> None:
    assert rows_ahead([], 4) == (0,)


def test_rows_of_parts_that_are_given() -> None:
    bounds = [(0, 0), (0, 500_000), (500_000, 500_001), (500_001, 800_000)]
    rows = make_owner_rows(bounds, 4)
    for rank, (begin, end) in enumerate(bounds):
        parts = [row[rank] for row in rows if row[rank][0] < row[rank][1]]
        assert (reach(parts) if parts else (begin, begin)) == (begin, end)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, 3, TREE_BYTES // 4, TREE_BYTES // 4 + 1, 1_000_003])
def test_a_broadcast_reaches_everybody_once_and_both_ends_agree(count: int, size: int) -> None:
    for root in {0, 1, size - 1}:
        routes = [plan_broadcast(count, 4, size, rank, root) for rank in range(size)]
        assert len({route.chunks for route in routes}) == 1
        assert reach(routes[0].chunks) == (0, count)
        told = {(rank, other) for rank, route in enumerate(routes) for other in route.children}
        assert told == {(route.parent, rank) for rank, route in enumerate(routes) if route.parent is not None}
        assert routes[root].parent is None
        reached, depth = {root}, 0
        while len(reached) < size:
            further = {other for rank, other in told if rank in reached}
            assert not further <= reached, "a circle"
            reached, depth = reached | further, depth + 1
        if count * 4 <= TREE_BYTES:
            assert depth <= math.ceil(math.log2(size))
        else:
            assert all(len(route.children) <= 1 for route in routes), "nobody sends everything twice"


def test_sockets_take_messages_in_turn() -> None:
    assert stripe_messages(0, 4, 1) == []
    assert stripe_messages(10_000_000, 4, 1) == [(0, 10_000_000)]
    parts = stripe_messages(10_000_000, 4, 2)
    assert reach(parts) == (0, 10_000_000)
    assert all((end - begin) * 4 <= MOST_BYTES for begin, end in parts)
