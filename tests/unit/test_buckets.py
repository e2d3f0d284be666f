"""The bucket plan: laws that hold for every plan, and its shape where that matters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from reigen.frontends.buckets import ALIGNMENT_BYTES, BucketPlan, ParameterSpec, arrival_order, plan_buckets

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
    assert {p: plan.bucket_of[p] for p in order} == plan.bucket_of
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


def test_parameters_left_out_have_no_place():
    plan = plan_buckets(floats(1, 1, 1), [2, 0], 64 * KIB)
    assert members(plan) == [[2, 0]]
    assert 1 not in plan.bucket_of


def test_no_parameters_no_buckets():
    assert plan_buckets([], [], 4 * KIB) == BucketPlan((), 0, {})


def test_the_guessed_order_is_from_last_to_first():
    assert arrival_order([], 4) == (3, 2, 1, 0)


def test_what_was_observed_comes_first_each_once_and_strangers_are_dropped():
    assert arrival_order([1, 3, 1, 9], 5) == (1, 3, 4, 2, 0)
