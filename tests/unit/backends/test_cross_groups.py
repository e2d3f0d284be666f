from __future__ import annotations

import pytest

from reigen.backends.hierarchical.cross_groups import SMALL_BYTES, CrossGroups, two_stage_reduction
from reigen.kernels.reduce import Reduction
from reigen.types import DTYPES, ReduceOp


@pytest.mark.parametrize(
    ("groups", "cross_groups"),
    [
        ([[0], [1]], [(0, 1)]),
        ([[0, 1], [2, 3]], [(0, 2), (1, 3)]),
        ([[2, 3], [0, 1]], [(0, 2), (1, 3)]),
        ([[0, 2], [1, 3]], [(0, 1), (2, 3)]),
        ([[0, 2], [1]], [(0, 1)]),
        ([[0, 1, 2], [], [3], [4, 5]], [(0, 3, 4)]),
        ([[0, 1, 6], [2, 3], [4, 5, 7]], [(0, 2, 4), (1, 3, 5)]),
    ],
)
def test_every_cross_group_has_a_rank_of_every_host(
    groups: list[list[int]], cross_groups: list[tuple[int, ...]]
) -> None:
    found = CrossGroups.of(groups)
    assert list(found.groups) == cross_groups
    assert found.size == sum(map(len, groups))


def test_cross_groups_keep_the_order_of_hosts_even_if_there_are_fewer_then() -> None:
    found = CrossGroups.of([[0, 3], [1, 2]])
    assert found.groups == ((0, 1),)  # 3 and 2 would add the second machine first
    assert "fewest ranks has 2" in found.reason
    assert "one order" in found.reason


def test_who_is_where() -> None:
    found = CrossGroups.of([[0, 2, 4], [1], [3, 5]])
    assert [found.host_of(rank) for rank in range(6)] == [0, 1, 0, 2, 0, 2]
    assert [found.group_of(rank) for rank in range(6)] == [0, 0, None, 0, None, None]
    assert found.order == (0, 2, 4, 1, 3, 5)


@pytest.mark.parametrize(
    ("groups", "ordered"),
    [
        ([[0], [1], [2]], True),
        ([[0, 1, 2], [3], [4]], True),
        ([[0, 1], [2, 3]], False),
        ([[0, 2], [1]], False),
        ([[0], [1, 2]], False),
    ],
)
def test_sums_by_host_are_sums_in_rank_order_where_only_the_first_adds(groups: list[list[int]], ordered: bool) -> None:
    assert CrossGroups.of(groups).adds_in_rank_order is ordered


def test_small_tensors_travel_in_one_cross_group_large_ones_in_all() -> None:
    cross_groups = CrossGroups.of([[0, 1, 2], [3, 4, 5]])
    assert (
        cross_groups.slices(SMALL_BYTES // 4, 4) == [(0, SMALL_BYTES // 4)] + [(SMALL_BYTES // 4, SMALL_BYTES // 4)] * 2
    )
    large = cross_groups.slices(30_000, 4)
    assert [low for low, _ in large] == [0, *[high for _, high in large[:-1]]]
    assert large[-1][1] == 30_000
    assert max(high - low for low, high in large) <= 30_000 / 3 + 16


def test_some_ranks_by_host_numbered_anew() -> None:
    cross_groups = CrossGroups.of([[0, 2, 4], [1], [3, 5]])
    assert cross_groups.among([0, 3, 4, 5]) == [[0, 2], [1, 3]]
    assert cross_groups.among([1]) == [[0]]


def test_an_average_divides_once_at_the_end() -> None:
    stages = two_stage_reduction(Reduction(DTYPES["int32"], ReduceOp.AVERAGE, 6, prescale=2.0, postscale=3.0))
    assert stages.local == Reduction(DTYPES["int32"], ReduceOp.SUM, 6, prescale=2.0)
    assert stages.network == Reduction(DTYPES["int32"], ReduceOp.AVERAGE, 6, postscale=3.0)
    assert not stages.wide


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_sums_of_half_types_travel_as_float32_but_no_extremes(name: str) -> None:
    stages = two_stage_reduction(Reduction(DTYPES[name], ReduceOp.AVERAGE, 6, postscale=3.0))
    assert stages.wide
    assert stages.network == Reduction(DTYPES["float32"], ReduceOp.SUM, 6)  # what follows comes before rounding
    assert not two_stage_reduction(Reduction(DTYPES[name], ReduceOp.MAX, 6)).wide
