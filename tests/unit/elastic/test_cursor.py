"""Order and dealing of samples: bijections, and parts that are the whole whatever the number of ranks."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen.data.permutation import EpochOrder, Indices, KeyedPermutation
from reigen.elastic.cursor import Cursor, SampleInterval, interval_bounds
from reigen.errors import ArgumentError


@given(st.integers(1, 3000), st.integers(-(1 << 70), 1 << 70), st.integers(0, 1 << 40))
def test_a_permutation_is_a_bijection(length: int, seed: int, epoch: int) -> None:
    found = KeyedPermutation(length, (seed, epoch))(np.arange(length))
    assert found.dtype == np.int64
    assert np.array_equal(np.sort(found), np.arange(length))


@given(st.integers(1, 1 << 62), st.data())
def test_any_part_can_be_computed_alone(length: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20, unique=True))
    permutation = KeyedPermutation(length, (3, 4))
    found = permutation(np.array(places))
    assert found.tolist() == [int(permutation(np.array([place]))[0]) for place in places]
    assert len(set(found.tolist())) == len(places)
    assert found.min() >= 0
    assert found.max() < length


@pytest.mark.parametrize("length", [5, 64, 200])
def test_each_place_gets_each_sample_equally_often(length: int) -> None:
    """Chi-squared of the first place over keys, at 6 standard deviations."""
    num_keys = 40 * length
    first = [int(KeyedPermutation(length, (seed, 0))(np.array([0]))[0]) for seed in range(num_keys)]
    counts = np.bincount(first, minlength=length)
    chi_squared = ((counts - 40) ** 2 / 40).sum()
    assert abs(chi_squared - (length - 1)) < 6 * np.sqrt(2 * (length - 1))


def test_neighbours_do_not_stay_neighbours() -> None:
    order = KeyedPermutation(10_000, (1, 0))(np.arange(10_000))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert sum(abs(int(a) - int(b)) == 1 for a, b in pairwise(order)) < 20


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {
        tuple(KeyedPermutation(50, key)(np.arange(50)).tolist()) for key in [(1, 0), (0, 1), (1, 1), (2, 0), (0, 0)]
    }
    assert len(orders) == 5


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(st.integers(1, 120), st.integers(4, 70), SIZES, st.integers(0, 3), st.booleans())
def test_each_epoch_has_each_sample_once(length: int, batch: int, sizes: list[int], seed: int, parts: bool) -> None:
    """Members change from step to step, as ``sizes`` says, in turn."""
    cursor = Cursor(length, global_batch=batch, seed=seed)
    taken: dict[int, list[int]] = {}
    number = 0
    while (interval := cursor.next_interval(1)).epoch < 2:
        size = sizes[number % len(sizes)]
        dealt = [cursor.deal(interval, rank, size, 5 if parts else None) for rank in range(size)]
        assert interval.size == min(batch, length - interval.start)
        assert [part.number for rank in dealt for part in rank] == sorted(part.number for r in dealt for part in r)
        assert sum(part.share for rank in dealt for part in rank) == pytest.approx(1)
        if not parts:
            counts = [sum(map(len, rank)) for rank in dealt]
            assert max(counts) - min(counts) <= 1
        taken.setdefault(interval.epoch, []).extend(i for rank in dealt for part in rank for i in part.indices.tolist())
        cursor.move_behind(interval)
        number += 1
    assert sorted(taken) == [0, 1]
    assert all(Counter(indices) == Counter(range(length)) for indices in taken.values())
    assert length < 8 or taken[0] != taken[1]


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 8), st.integers(1, 8))
def test_parts_do_not_depend_on_the_number_of_ranks(length: int, batch: int, size: int, other: int) -> None:
    cursor = Cursor(length, global_batch=batch)
    interval = cursor.next_interval(1)
    found = [
        [
            (part.number, part.share, part.indices.tolist())
            for rank in range(n)
            for part in cursor.deal(interval, rank, n, 6)
        ]
        for n in (size, other)
    ]
    assert found[0] == found[1]


@given(st.integers(1, 30_000), st.data())
def test_samples_of_any_intervals_in_any_order_are_those_of_the_permutation(length: int, data: st.DataObject) -> None:
    """Steps that are undone and dealt anew, other epochs, longer steps: whatever was computed ahead."""
    cursor = Cursor(length, global_batch=1, seed=7)
    for _ in range(6):
        epoch = data.draw(st.integers(0, 2))
        start, stop = sorted(data.draw(st.tuples(st.integers(0, length), st.integers(0, length))))
        found = cursor.indices(SampleInterval(epoch, start, stop), 0, stop - start)
        assert np.array_equal(found, KeyedPermutation(length, (7, epoch))(np.arange(start, stop)))
        found[:] = -1  # it is the caller's own


@pytest.mark.parametrize(("distance", "num_computed"), [(32, [4096]), (1024, [4096] * 16), (4096, [4096] + [32] * 63)])
def test_no_more_places_are_computed_than_the_next_calls_are_likely_to_ask_for(
    monkeypatch: pytest.MonkeyPatch, distance: int, num_computed: list[int]
) -> None:
    """64 batches of 32, the way a worker of one, 32 or 128 leases them."""
    computed: list[int] = []
    compute = KeyedPermutation.__call__

    def count(permutation: KeyedPermutation, places: Indices) -> Indices:
        computed.append(len(places))
        return compute(permutation, places)

    monkeypatch.setattr(KeyedPermutation, "__call__", count)
    order = EpochOrder(1 << 20, 1, 0)
    for batch in range(64):
        order.samples(distance * batch, distance * batch + 32)
    assert computed == num_computed


def test_a_cursor_goes_on_where_another_one_was() -> None:
    first = Cursor(100, global_batch=30, seed=5)
    for _ in range(5):
        first.move_behind(first.next_interval(1))
    second = Cursor(100, global_batch=30, seed=5)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == {"epoch": 1, "position": 30, "length": 100, "seed": 5, "shuffle": True}
    assert first.next_interval(1) == second.next_interval(1)
    second.load_state_dict({"epoch": 2, "position": 60})
    assert second.next_interval(1) == SampleInterval(2, 60, 90), "a state that does not say of which order it is"


@pytest.mark.parametrize("other", [{"length": 99}, {"length": 101}, {"seed": 6}, {"shuffle": False}])
def test_a_cursor_does_not_go_on_within_an_epoch_of_another_order(other: dict[str, int]) -> None:
    first = Cursor(100, global_batch=30, seed=5)
    second = Cursor(**{"length": 100, "global_batch": 30, "seed": 5, **other})
    for _ in range(3):
        first.move_behind(first.next_interval(1))
        with pytest.raises(ArgumentError, match="samples would be missing or come twice"):
            second.load_state_dict(first.state_dict())
    first.move_behind(first.next_interval(1))
    second.load_state_dict(first.state_dict())
    assert second.next_interval(1) == SampleInterval(1, 0, 30), "an epoch that is done has no place in its order"
    second.load_state_dict(Cursor(100, global_batch=30, seed=5, epoch=3).state_dict())
    assert second.next_interval(1) == SampleInterval(3, 0, 30)


def test_a_short_last_step_is_kept_or_dropped() -> None:
    kept, dropped = Cursor(10, global_batch=4), Cursor(10, global_batch=4, drop_last=True)
    for cursor, steps in (
        (kept, [(0, 0, 4), (0, 4, 8), (0, 8, 10), (1, 0, 4)]),
        (dropped, [(0, 0, 4), (0, 4, 8), (1, 0, 4)]),
    ):
        for step in steps:
            interval = cursor.next_interval(3)
            assert tuple(interval) == step
            assert cursor.is_last(interval, 3) == (step == (0, 8, 10) or (cursor is dropped and step == (0, 4, 8)))
            cursor.move_behind(interval)


def test_a_batch_for_each_rank_follows_the_number_of_ranks() -> None:
    cursor = Cursor(100, per_rank_batch=8)
    assert cursor.next_interval(3).size == 24
    assert cursor.next_interval(2).size == 16


def test_samples_in_the_order_of_the_data_set() -> None:
    cursor = Cursor(10, global_batch=6, shuffle=False)
    interval = cursor.next_interval(1)
    assert [part.indices.tolist() for rank in range(2) for part in cursor.deal(interval, rank, 2)] == [
        [0, 1, 2],
        [3, 4, 5],
    ]


@given(st.integers(0, 50), st.integers(1, 12))
def test_bounds_are_a_partition(total: int, count: int) -> None:
    bounds = [interval_bounds(total, count, number) for number in range(count)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == total
    assert all(a[1] == b[0] for a, b in pairwise(bounds))


@pytest.mark.parametrize(
    "arguments",
    [
        {"length": 0, "global_batch": 1},
        {"length": 5},
        {"length": 5, "global_batch": 1, "per_rank_batch": 1},
        {"length": 5, "global_batch": 0},
        {"length": 5, "global_batch": True},
        {"length": 5, "global_batch": 2.0},
        {"length": 5, "global_batch": 1, "epoch": -1},
        {"length": 5, "global_batch": 6, "drop_last": True},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ArgumentError):
        Cursor(**arguments)


def test_more_ranks_than_samples_with_drop_last() -> None:
    with pytest.raises(ArgumentError, match="leaves out all"):
        Cursor(10, per_rank_batch=4, drop_last=True).next_interval(3)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "arguments",
    [{"global_batch": 4}, {"global_batch": 4, "drop_last": True}, {"per_rank_batch": 2}, {"global_batch": 23}],
    ids=str,
)
def test_the_steps_that_are_left_are_those_that_come(size: int, arguments: dict[str, int]) -> None:
    cursor, left = Cursor(23, **arguments), []
    while (interval := cursor.next_interval(size)).epoch < 3:
        left.append(cursor.num_steps_behind(interval, 3, size))
        cursor.move_behind(interval)
    assert left == list(range(len(left)))[::-1]
