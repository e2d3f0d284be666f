from __future__ import annotations

import random

import pytest

from reigen.kv.client.sharding import ALIGNMENT_ELEMENTS, ShardPlacer, choose_slice_bytes, home_server
from reigen.kv.protocol import ShardRange

_MIB = 1 << 20


def check(shards: tuple[ShardRange, ...], num_elements: int, unit: int = ALIGNMENT_ELEMENTS) -> None:
    """The shards cover the value, in order, and their borders are multiples of the unit."""
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert [shard.begin for shard in shards] == [0, *(shard.end for shard in shards[:-1])]
    assert shards[-1].end == num_elements
    assert all(shard.begin % unit == 0 for shard in shards)
    assert num_elements == 0 or all(shard.num_elements > 0 for shard in shards)


def test_a_small_key_lies_on_the_server_with_the_least_bytes() -> None:
    placer = ShardPlacer(3, 1_000_000, 4 * _MIB)
    placed = [placer.place(key, size, 4)[0].server for key, size in enumerate([100, 10, 20, 30, 40])]
    assert placed == [0, 1, 2, 1, 2]  # not by their number: 0, 1, 2, 0, 1
    assert placer.loads == [400, 160, 240]
    assert placer.place(9, 10, 8) == (ShardRange(0, 0, 10, 1),)
    assert placer.loads == [400, 240, 240]


def test_a_large_key_is_spread_over_all_servers_in_equal_shares() -> None:
    placer = ShardPlacer(7, 1_000_000, 4 * _MIB)
    shards = placer.place(1, 1200 * 1200, 4)
    check(shards, 1_440_000)
    assert [shard.server for shard in shards] == [0, 1, 2, 3, 4, 5, 6]
    assert (
        max(shard.num_elements for shard in shards) - min(shard.num_elements for shard in shards) <= ALIGNMENT_ELEMENTS
    )
    below = placer.place(2, 999_999, 4)
    assert below == (ShardRange(0, 0, 999_999, below[0].server),)
    assert sum(placer.loads) == 4 * (1200 * 1200 + 999_999)


@pytest.mark.parametrize(
    ("asked", "hosts", "num_processes", "chosen"),
    [
        (None, ["127.0.0.1", "::1"], 4, 4 << 20),
        (None, ["127.0.0.1", "::1"], 5, 12 << 20),
        (None, ["10.0.0.1"], 5, 1 << 20),
        (None, ["127.0.0.1", "fd00::2"], 4, 1 << 20),
        (12345, ["10.0.0.1"], 4, 12345),
        (12345, ["127.0.0.1"], 5, 12345),
    ],
)
def test_shards_are_smaller_where_a_wire_is_between_and_larger_where_processors_are_few(
    asked: int | None, hosts: list[str], num_processes: int, chosen: int
) -> None:
    assert choose_slice_bytes(asked, hosts, num_processes, num_processors=4)[0] == chosen


def test_shards_are_no_larger_than_the_slice_and_servers_take_turns() -> None:
    shards = ShardPlacer(2, 1000, 4 * _MIB).place(1, 25 * _MIB, 4)  # 100 MiB
    check(shards, 25 * _MIB)
    assert len(shards) == 26
    assert {shard.num_elements * 4 <= 4 * _MIB for shard in shards} == {True}
    assert [shard.server for shard in shards] == [0, 1] * 13
    below = ShardPlacer(2, 10**9, 4 * _MIB).place(1, 25 * _MIB, 4)
    assert {shard.server for shard in below} == {0}
    assert len(below) == 25


def test_a_key_that_must_not_be_cut_is_one_shard() -> None:
    placer = ShardPlacer(2, 1000, 4096)
    assert placer.place(1, 10**6, 4, whole=True) == (ShardRange(0, 0, 10**6, 0),)


def test_shards_of_row_sparse_keys_are_whole_rows() -> None:
    shards = ShardPlacer(2, 1000, 4096).place(1, 100 * 300, 4, row_length=300)
    check(shards, 30_000, unit=300)
    assert max(shard.num_elements for shard in shards) == 900
    wide = ShardPlacer(2, 1000, 4096).place(1, 3 * 5000, 4, row_length=5000)
    check(wide, 15_000, unit=5000)
    assert len(wide) == 3


@pytest.mark.parametrize("num_elements", [0, 1, 31, 32, 33, 64, 65])
def test_tiny_values(num_elements: int) -> None:
    shards = ShardPlacer(3, 1, 4 * _MIB).place(1, num_elements, 4)
    check(shards, num_elements)
    assert len(shards) == min(3, max(1, -(-num_elements // 32)))


def test_one_server_takes_everything() -> None:
    placer = ShardPlacer(1, 10, 4 * _MIB)
    assert placer.place(1, 100, 4) == (ShardRange(0, 0, 100, 0),)
    assert placer.loads == [400]


def test_a_key_that_is_placed_anew_does_not_count_twice() -> None:
    placer = ShardPlacer(2, 10, 4 * _MIB)
    placer.place(1, 1000, 4)
    shards = placer.place(1, 1000, 4, whole=True)
    assert sum(placer.loads) == 4000
    placer.forget(1)
    assert placer.loads == [0, 0]
    placer.adopt(1, shards, 4)  # what another process of this rank has placed
    assert placer.loads == [4000, 0]


@pytest.mark.parametrize("seed", range(20))
def test_loads_are_balanced_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    servers = rng.randint(1, 8)
    sizes = [int(10 ** rng.uniform(0, 6.5)) for _ in range(200)]
    placer, again = (ShardPlacer(servers, 100_000, _MIB) for _ in range(2))
    for key, size in enumerate(sizes):
        shards = placer.place(key, size, 4)
        check(shards, size)
        assert max(shard.num_elements * 4 for shard in shards) <= _MIB
        assert again.place(key, size, 4) == shards
    largest_uncut = 4 * max((size for size in sizes if size < 100_000), default=0)
    assert max(placer.loads) - min(placer.loads) <= largest_uncut + 4 * ALIGNMENT_ELEMENTS * len(sizes)
    assert sum(placer.loads) == 4 * sum(sizes)


def test_the_home_of_a_key_follows_from_the_key_alone() -> None:
    assert [home_server(key, 3) for key in (0, 4, 2**64 - 1)] == [0, 1, 0]
