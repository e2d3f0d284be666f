"""The bucket plan: laws that hold for every plan, and its shape where that matters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen.api.gradients.bucket_plan import (
    ALIGNMENT_BYTES,
    BucketPlan,
    ParameterSpec,
    arrival_order,
    choose_bucket_bytes,
    plan_buckets,
    split_evenly,
)

KIB = 1024
SIZES = {"float32": 4, "float16": 2, "float64": 8}

specs = st.lists(
    st.builds(
        lambda numel, dtype: ParameterSpec(numel, SIZES[dtype], dtype),
        st.integers(0, 3000),
        st.sampled_from(sorted(SIZES)),
    ),
    max_size=40,
)


def floats(*kib: float) -> list[ParameterSpec]:
    return [ParameterSpec(int(size * KIB / 4), 4, "float32") for size in kib]


def members(plan: BucketPlan) -> list[list[int]]:
    return [[place.parameter for place in bucket.places] for bucket in plan.buckets]


@given(specs, st.integers(1, 20_000), st.randoms(use_true_random=False))
def test_every_plan_is_sound(parameters, bucket_bytes, random):
    order = list(range(len(parameters)))
    random.shuffle(order)
    plan = plan_buckets(parameters, order, bucket_bytes)

    placed = [place for bucket in plan.buckets for place in bucket.places]
    assert sorted(place.parameter for place in placed) == sorted(order)  # each exactly once
    assert plan.units == tuple((bucket,) for bucket in range(len(plan.buckets)))
    assert [[p for p in order if plan.unit_of[p] == unit] for unit in range(len(plan.units))] == [
        sorted(group, key=order.index) for group in members(plan)
    ]
    taken: set[int] = set()
    for bucket in plan.buckets:
        assert bucket.offset % ALIGNMENT_BYTES == 0
        assert bucket.nbytes <= bucket_bytes or len(bucket.places) == 1
        for place in bucket.places:
            spec = parameters[place.parameter]
            assert (spec.dtype, spec.numel * spec.itemsize) == (bucket.dtype, place.nbytes)
            assert place.offset % ALIGNMENT_BYTES == 0
            assert bucket.offset <= place.offset
            assert place.offset + place.nbytes <= bucket.offset + bucket.nbytes <= plan.nbytes
            mine = set(range(place.offset, place.offset + place.nbytes, 2))
            assert not taken & mine  # no two gradients overlap
            taken |= mine


@given(specs, st.integers(1, 20_000), st.randoms(use_true_random=False))
def test_within_a_dtype_buckets_keep_the_order(parameters, bucket_bytes, random):
    order = list(range(len(parameters)))
    random.shuffle(order)
    for dtype in SIZES:
        wanted = [p for p in order if parameters[p].dtype == dtype]
        plan = plan_buckets(parameters, order, bucket_bytes)
        got = [place.parameter for bucket in plan.buckets if bucket.dtype == dtype for place in bucket.places]
        assert got == wanted


def test_the_first_bucket_is_smaller_so_that_communication_starts_early():
    plan = plan_buckets(floats(*[1] * 12), range(12), 4 * KIB)
    assert [len(group) for group in members(plan)] == [1, 4, 4, 3]


def test_a_gradient_larger_than_the_cap_is_a_bucket_alone():
    plan = plan_buckets(floats(1, 1, 9, 1, 1), range(5), 4 * KIB)
    assert members(plan) == [[0], [1], [2], [3, 4]]


def test_each_element_type_has_buckets_of_its_own():
    parameters = [ParameterSpec(10, 4, "float32"), ParameterSpec(10, 2, "float16"), ParameterSpec(10, 4, "float32")]
    plan = plan_buckets(parameters, [0, 1, 2], 4 * KIB)
    assert [(bucket.dtype, [p.parameter for p in bucket.places]) for bucket in plan.buckets] == [
        ("float32", [0, 2]),
        ("float16", [1]),
    ]


def test_a_group_is_a_unit_of_any_size_and_the_others_are_planned_as_usual():
    plan = plan_buckets(floats(9, 1, 9, 1, 1), range(5), 4 * KIB, groups=[[2, 0]])
    assert members(plan) == [[0, 2], [1], [3, 4]]
    assert plan.units == ((0,), (1,), (2,))


def test_a_group_of_several_element_types_is_one_unit_of_several_buckets():
    parameters = [ParameterSpec(10, 4, "float32"), ParameterSpec(10, 2, "float16"), ParameterSpec(10, 4, "float32")]
    plan = plan_buckets(parameters, [1, 2, 0], 4 * KIB, groups=[[0, 1]])
    assert members(plan) == [[1], [0], [2]]
    assert plan.units == ((0, 1), (2,))
    assert plan.unit_of == {1: 0, 0: 0, 2: 1}


@given(specs, st.integers(1, 20_000), st.lists(st.integers(-2, 4), min_size=40, max_size=40))
def test_groups_are_never_cut_nor_mixed(parameters, bucket_bytes, group_of):
    order = [p for p in reversed(range(len(parameters))) if p % 7]
    groups = [[p for p in range(len(parameters)) if group_of[p] == group] for group in range(5)]
    plan = plan_buckets(parameters, order, bucket_bytes, groups)
    assert sorted(p for bucket in members(plan) for p in bucket) == sorted(order)
    assert [bucket for unit in plan.units for bucket in unit] == list(range(len(plan.buckets)))
    for group in groups:
        placed = {p for p in group if p in order}
        units = {plan.unit_of[p] for p in placed}
        assert len(units) == bool(placed)
        assert (
            placed == {p for unit in units for bucket in plan.units[unit] for p in members(plan)[bucket]} or not units
        )


def test_an_order_is_divided_into_runs_of_nearly_equal_length():
    assert split_evenly("abcdefgh", 3) == ["abc", "def", "gh"]
    assert split_evenly("ab", 5) == ["a", "b"]
    assert split_evenly("", 2) == []


def test_parameters_left_out_have_no_place():
    plan = plan_buckets(floats(1, 1, 1), [2, 0], 64 * KIB)
    assert members(plan) == [[2, 0]]
    assert 1 not in plan.unit_of


def test_no_parameters_no_buckets():
    assert plan_buckets([], [], 4 * KIB) == BucketPlan((), 0, (), {})


def test_the_guessed_order_is_from_last_to_first():
    assert arrival_order([], 4) == (3, 2, 1, 0)


def test_what_was_observed_comes_first_each_once_and_strangers_are_dropped():
    assert arrival_order([1, 3, 1, 9], 5) == (1, 3, 4, 2, 0)


@pytest.mark.parametrize(
    ("asked", "has_network", "overlaps", "mebibytes"),
    [(None, False, True, 16), (None, True, True, 4), (None, False, False, 64), (3 << 20, True, False, 3)],
)
def test_the_size_of_a_bucket(asked: int | None, has_network: bool, overlaps: bool, mebibytes: int):
    context: Any = SimpleNamespace(config=SimpleNamespace(bucket_bytes=asked), has_network=has_network)
    assert choose_bucket_bytes(context, overlaps) == mebibytes << 20
