from __future__ import annotations

import random

import pytest

from reigen.kv.sharding import UNIT, Cell, Placer, choose_slice_bytes, home

_MIB = 1 << 20


def check(cells: tuple[Cell, ...], num_elements: int, unit: int = UNIT) -> None:
    """The cells cover the value, in order, and their borders are multiples of the unit."""
    assert [cell.index for cell in cells] == list(range(len(cells)))
    assert [cell.begin for cell in cells] == [0, *(cell.end for cell in cells[:-1])]
    assert cells[-1].end == num_elements
    assert all(cell.begin % unit == 0 for cell in cells)
    assert num_elements == 0 or all(cell.num_elements > 0 for cell in cells)


def test_a_small_key_lies_on_the_server_with_the_least_bytes() -> None:
    placer = Placer(3, 1_000_000, 4 * _MIB)
    placed = [placer.place(key, size, 4)[0][0].server for key, size in enumerate([100, 10, 20, 30, 40])]
    assert placed == [0, 1, 2, 1, 2]  # not by their number: 0, 1, 2, 0, 1
    assert placer.loads == [400, 160, 240]
    cells, reason = placer.place(9, 10, 8)
    assert cells == (Cell(9, 0, 0, 10, 1),)
    assert reason == "10 elements on server 1 (below the bound): 1 cell(s)"


def test_a_large_key_is_spread_over_all_servers_in_equal_shares() -> None:
    placer = Placer(7, 1_000_000, 4 * _MIB)
    cells, reason = placer.place(1, 1200 * 1200, 4)
    check(cells, 1_440_000)
    assert [cell.server for cell in cells] == [0, 1, 2, 3, 4, 5, 6]
    assert max(cell.num_elements for cell in cells) - min(cell.num_elements for cell in cells) <= UNIT
    assert reason == "1440000 elements, the bound is 1000000: 7 cell(s) on 7 server(s)"
    assert placer.place(2, 999_999, 4)[1].endswith("(below the bound): 1 cell(s)")


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
def test_cells_are_smaller_where_a_wire_is_between_and_larger_where_processors_are_few(
    asked: int | None, hosts: list[str], num_processes: int, chosen: int
) -> None:
    assert choose_slice_bytes(asked, hosts, num_processes, num_processors=4)[0] == chosen


def test_cells_are_no_larger_than_the_slice_and_servers_take_turns() -> None:
    cells, _ = Placer(2, 1000, 4 * _MIB).place(1, 25 * _MIB, 4)  # 100 MiB
    check(cells, 25 * _MIB)
    assert len(cells) == 26
    assert {cell.num_elements * 4 <= 4 * _MIB for cell in cells} == {True}
    assert [cell.server for cell in cells] == [0, 1] * 13
    below, _ = Placer(2, 10**9, 4 * _MIB).place(1, 25 * _MIB, 4)
    assert {cell.server for cell in below} == {0}
    assert len(below) == 25


def test_a_key_that_must_not_be_cut_is_one_cell() -> None:
    placer = Placer(2, 1000, 4096)
    assert placer.place(1, 10**6, 4, whole=True) == (
        (Cell(1, 0, 0, 10**6, 0),),
        "1000000 elements on server 0 (must not be cut): 1 cell(s)",
    )


def test_cells_of_row_sparse_keys_are_whole_rows() -> None:
    cells, _ = Placer(2, 1000, 4096).place(1, 100 * 300, 4, row_length=300)
    check(cells, 30_000, unit=300)
    assert max(cell.num_elements for cell in cells) == 900
    wide, _ = Placer(2, 1000, 4096).place(1, 3 * 5000, 4, row_length=5000)
    check(wide, 15_000, unit=5000)
    assert len(wide) == 3


@pytest.mark.parametrize("num_elements", [0, 1, 31, 32, 33, 64, 65])
def test_tiny_values(num_elements: int) -> None:
    cells, _ = Placer(3, 1, 4 * _MIB).place(1, num_elements, 4)
    check(cells, num_elements)
    assert len(cells) == min(3, max(1, -(-num_elements // 32)))


def test_one_server_takes_everything() -> None:
    cells, reason = Placer(1, 10, 4 * _MIB).place(1, 100, 4)
    assert cells == (Cell(1, 0, 0, 100, 0),)
    assert "the only server" in reason


def test_a_key_that_is_placed_anew_does_not_count_twice() -> None:
    placer = Placer(2, 10, 4 * _MIB)
    placer.place(1, 1000, 4)
    cells, _ = placer.place(1, 1000, 4, whole=True)
    assert sum(placer.loads) == 4000
    placer.forget(1)
    assert placer.loads == [0, 0]
    placer.adopt(cells, 4)  # what another process of this rank has placed
    assert placer.loads == [4000, 0]


@pytest.mark.parametrize("seed", range(20))
def test_loads_are_balanced_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    servers = rng.randint(1, 8)
    sizes = [int(10 ** rng.uniform(0, 6.5)) for _ in range(200)]
    placer, again = (Placer(servers, 100_000, _MIB) for _ in range(2))
    for key, size in enumerate(sizes):
        cells, reason = placer.place(key, size, 4)
        check(cells, size)
        assert max(cell.num_elements * 4 for cell in cells) <= _MIB
        assert again.place(key, size, 4) == (cells, reason)
    largest_uncut = 4 * max((size for size in sizes if size < 100_000), default=0)
    assert max(placer.loads) - min(placer.loads) <= largest_uncut + 4 * UNIT * len(sizes)
    assert sum(placer.loads) == 4 * sum(sizes)


def test_the_home_of_a_key_follows_from_the_key_alone() -> None:
    assert [home(key, 3) for key in (0, 4, 2**64 - 1)] == [0, 1, 0]
