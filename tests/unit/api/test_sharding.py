"""Who updates which elements of shared parameters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reigen.api.gradients.bucket_plan import BucketPlan, ParameterSpec, plan_buckets
from reigen.api.gradients.sharding import SHARD_ALIGNMENT_BYTES, ShardGranularity, UpdateProgress, assign_shards
from reigen.types import DTYPES


def planned(sizes: list[tuple[int, str]], bucket_bytes: int) -> BucketPlan:
    specs = [ParameterSpec(numel, DTYPES[name].itemsize, name) for numel, name in sizes]
    return plan_buckets(specs, range(len(specs) - 1, -1, -1), bucket_bytes)


MODELS = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(["float32", "float64", "bfloat16"])), max_size=9)


@given(MODELS, st.integers(1, 1 << 15), st.integers(1, 5), st.sampled_from(ShardGranularity))
def test_every_element_has_one_owner_in_the_slice_of_its_bucket(sizes, bucket_bytes, num_owners, division):
    plan = planned(sizes, bucket_bytes)
    shares = assign_shards(plan, num_owners, division=division)
    owned = {parameter: [0] * numel for parameter, (numel, _) in enumerate(sizes)}
    place_of = {place.parameter: (bucket, place) for bucket in plan.buckets for place in bucket.places}
    for owner, pieces in enumerate(shares.pieces):
        for piece in pieces:
            bucket, place = place_of[piece.parameter]
            itemsize = DTYPES[bucket.dtype].itemsize
            counts = shares.counts[plan.buckets.index(bucket)]
            assert 0 <= piece.start <= piece.stop <= sizes[piece.parameter][0]
            if not piece.numel:
                continue
            assert division is ShardGranularity.ELEMENTS or piece.numel == sizes[piece.parameter][0]
            first = (place.offset - bucket.offset) // itemsize + piece.start
            assert sum(counts[:owner]) <= first
            assert first + piece.numel <= sum(counts[: owner + 1])
            assert piece.start * itemsize % SHARD_ALIGNMENT_BYTES == 0
            for element in range(piece.start, piece.stop):
                owned[piece.parameter][element] += 1
    assert all(times == 1 for elements in owned.values() for times in elements)
    for bucket, counts in zip(plan.buckets, shares.counts, strict=True):
        assert len(counts) == num_owners
        assert sum(counts) * DTYPES[bucket.dtype].itemsize == bucket.nbytes


@pytest.mark.parametrize("num_owners", [2, 3, 4])
def test_owners_have_almost_equal_shares_and_few_parameters_are_cut(num_owners):
    plan = planned([(1 << 16, "float32")] * 24, 1 << 24)
    shares = assign_shards(plan, num_owners)
    numels = [sum(piece.numel for piece in pieces) for pieces in shares.pieces]
    assert max(numels) <= 1.07 * min(numels)
    cut = [piece for pieces in shares.pieces for piece in pieces if piece.numel < 1 << 16]
    assert len(cut) <= 2 * len(plan.buckets) * (num_owners - 1)


@pytest.mark.parametrize("num_owners", [2, 3, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 18, 1 << 30])
def test_whole_parameters_are_shared_out_almost_equally_whatever_a_bucket_holds(num_owners, bucket_bytes):
    sizes = [1 << 12, 1 << 14, 1 << 16] * 12
    plan = planned([(size, "float32") for size in sizes], bucket_bytes)
    shares = assign_shards(plan, num_owners, division=ShardGranularity.PARAMETERS)
    numels = [sum(piece.numel for piece in pieces) for pieces in shares.pieces]
    assert max(numels) - min(numels) <= 2 * max(sizes)


def test_one_owner_has_all_whole():
    plan = planned([(7, "float32"), (0, "float32"), (100, "float64")], 64)
    assert {(p.parameter, p.start, p.stop) for p in assign_shards(plan, 1).pieces[0]} == {
        (0, 0, 7),
        (1, 0, 0),
        (2, 0, 100),
    }


@pytest.mark.parametrize(
    ("begun", "ended", "weights", "words"),
    [
        ([4, 4], [4, 4], 4, "those after update 4"),
        ([5, 5], [5, 5], 5, "those after update 5"),
        ([5, 4], [5, 4], None, "1 of 2 slices are done"),
        ([5, 5], [4, 5], None, "1 in the middle"),
        ([5, 5], [4, 4], None, "0 of 2 slices are done, 2 in the middle"),
    ],
)
def test_what_the_owners_have_said_tells_what_the_weights_are(begun, ended, weights, words):
    progress = UpdateProgress(5, begun, ended)
    assert progress.weights == weights
    assert words in progress.describe()
    assert ("NOT CONSISTENT" in progress.describe()) is (weights is None)
