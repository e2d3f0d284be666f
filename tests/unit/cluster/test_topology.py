"""Places in a job: those that make sense, and every contradiction of those that do not."""

import dataclasses

import pytest

from reigen.cluster.topology import Topology, renumber_rank
from reigen.errors import ArgumentError, ConfigError


def test_places():
    assert dataclasses.astuple(Topology.alone()) == (0, 1, 0, 1, 0, 1)
    assert dataclasses.astuple(Topology.on_one_host(2, 4)) == (2, 4, 2, 4, 0, 1)
    Topology(rank=5, size=8, local_rank=1, local_size=4, cross_rank=1, cross_size=2)


@pytest.mark.parametrize(
    ("numbers", "complaint"),
    [
        ((4, 4, 0, 4, 0, 1), "rank is 4, but must be from 0 to 3"),
        ((-1, 4, 0, 4, 0, 1), "rank is -1"),
        ((0, 0, 0, 1, 0, 1), "size is 0, but must be at least 1"),
        ((0, 2, 2, 2, 0, 1), "local_rank is 2"),
        ((0, 2, 0, 3, 0, 1), "local_size is 3, but the whole job has 2"),
        ((0, 2, 0, 2, 1, 1), "cross_rank is 1"),
        ((0, 2, 0, 2, 0, 3), "cross_size is 3, but the whole job has 2"),
    ],
)
def test_contradictions(numbers, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Topology(*numbers)


def test_every_contradiction_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        Topology(9, 2, 7, 2, 0, 1)
    assert "rank is 9" in str(caught.value)
    assert "local_rank is 7" in str(caught.value)


def test_a_place_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Topology.alone().rank = 1  # type: ignore[misc]


def test_some_of_the_ranks_are_numbered_anew():
    assert [renumber_rank(2, 4, ranks) for ranks in ([2], [3, 2, 0], range(4))] == [0, 1, 2]


@pytest.mark.parametrize(
    ("ranks", "complaint"),
    [
        ([], "at least one"),
        ([2, 2], "different ranks from 0 to 3"),
        ([2, 4], "different ranks from 0 to 3"),
        ([-1, 2], "different ranks from 0 to 3"),
        ([0, 1], "does not hold this process, rank 2"),
    ],
)
def test_what_is_no_job_of_some_of_the_ranks(ranks, complaint):
    with pytest.raises(ArgumentError, match=complaint):
        renumber_rank(2, 4, ranks)
